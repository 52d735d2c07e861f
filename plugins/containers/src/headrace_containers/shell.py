"""A task in a container: the model runs commands until it answers, then a script that it cannot see rewards it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from headrace_servicekit.tool_calls import beside_calls
from headrace_simulator.backends.base import BackendError, Message
from headrace_simulator.backends.base import Tool as ToolSchema
from headrace_simulator.backends.conversation.calls import Limits, ServiceLost, Tool, answers
from headrace_simulator.backends.options import unknown
from pydantic import Field, PositiveFloat, PositiveInt

from headrace_containers.files import gather
from headrace_containers.options import ContainerOptions, refusal
from headrace_containers.provider import (
    MIB,
    BadPath,
    BadSpec,
    Container,
    ContainerError,
    ContainerLost,
    File,
    Ran,
)

TOOLS = ("bash", "read_file", "write_file")
CHECKS = "/checks"
"""Where the files of a check are, once the model has ended."""
_MOST_TEXT = 30_000
"""Characters of a variable."""
REWARD = "/checks/reward"
"""Where a check may write a number."""


class ShellOptions(ContainerOptions):
    """Options of `shell`."""

    tools: list[str] = Field(
        ["bash"], min_length=1, description="what the model may call: bash, read_file, write_file"
    )
    parser: Literal["hermes", "json", "llama3", "mistral", "qwen3_coder", "glm"] = Field(
        "hermes", description="form of calls, as of the task `tools`"
    )
    system: str = Field("", description="system message that the conversation begins with")
    question: str = Field("", description="what the model reads where an item has no question")
    files: Path | None = Field(
        None, description="folder whose files lie in the working directory at the start"
    )
    setup: str = Field("", description="script that is run before the model reads its question")
    check: str = Field(
        "",
        description="script that is run as root, in the working directory, once the model has ended. It has the "
        "variables QUESTION and ANSWER of the item, and COMPLETION, the last turn. Exit code 0 is a reward of 1, any "
        "other 0, or it writes a number to /checks/reward. Left out: scorers give the reward",
    )
    check_files: Path | None = Field(
        None, description="folder whose files are in /checks for the check alone"
    )
    check_s: PositiveFloat = Field(120.0, description="seconds that the check may take")
    command_s: PositiveFloat = Field(30.0, description="seconds that the calls of one turn may take together")
    most_calls: PositiveInt = Field(8, description="calls of one turn that are answered")
    most_characters: PositiveInt = Field(8000, description="characters of an answer that are kept")


class Shell:
    """See the module. Raises BackendError for what cannot be had."""

    def __init__(self, options: ShellOptions) -> None:
        self._options = options
        for key, folder in (("files", options.files), ("check_files", options.check_files)):
            if folder is not None and not folder.is_dir():
                raise BackendError(
                    f"options_json.{key}", f"there is no folder {folder}; paths start where the service does"
                )
        if strange := [name for name in options.tools if name not in TOOLS]:
            raise BackendError("options_json.tools", unknown("tool", strange[0], TOOLS).message)
        self._turn = Turn(options.most_characters)
        self._tools = {name: self._turn.tools[name] for name in options.tools}
        self._limits = Limits(options.command_s, options.most_calls, options.most_characters)
        self._item: Mapping[str, Any] = {}
        self._turns = 0
        options.prepare()

    def reset(self, seed: int, item: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[ToolSchema]]:
        """A new container, prepared; and the item's question, or its conversation."""
        options, self._item, self._turns = self._options, item, 0
        self._turn.close()
        image = str((item.get("fields") or {}).get("image") or "")
        try:
            container = self._turn.container = options.source().start(options.spec(image))
            if options.files is not None:
                container.write(gather(options.files))
            if options.setup:
                ran = container.exec(("/bin/sh", "-c", options.setup), timeout_s=options.check_s)
                if ran.exit_code:
                    raise BackendError("options_json.setup", f"it ended with {_ended(ran)}")
        except ContainerError as error:
            self._turn.close()
            raise refusal(error) from error
        asked = item.get("messages") or [
            {"role": "user", "content": str(item.get("question") or options.question)}
        ]
        system = [{"role": "system", "content": options.system}] if options.system else []
        return [*system, *asked], [tool.schema for tool in self._tools.values()]

    def step(self, message: Message) -> tuple[Sequence[Message], float, bool, Mapping[str, Any]]:
        """Runs the calls; a turn without any is the last one, after which the check gives the reward."""
        _, calls = beside_calls(self._options.parser, message["content"], self._tools)
        try:
            if not calls:
                reward = self._checked(str(message["content"])) if self._options.check else 0.0
                self._turn.close()
                return [], reward, True, {"success": reward >= 1.0} if self._options.check else {}
            found = answers(calls, self._tools, self._limits)
        except (ServiceLost, ContainerLost):
            self._turn.close()
            raise
        self._turns += 1
        told = [
            {
                "role": "tool",
                "content": each.content,
                "tool_call_id": call.id or f"call{self._turns:03}{at:02}",
                "name": call.name or "unknown",
            }
            for at, (call, each) in enumerate(zip(calls, found, strict=False))
        ]
        return told, 0.0, False, {}

    def _checked(self, completion: str) -> float:
        """The reward of what the model has left. Its own processes are ended before."""
        options, container = self._options, self._turn.running()
        container.exec(("/bin/sh", "-c", "kill -9 -1"), timeout_s=10.0)
        files = gather(options.check_files, CHECKS) if options.check_files is not None else []
        try:
            container.write([*files, File(f"{CHECKS}/check.sh", options.check.encode(), 0o700)], user="root")
        except BadPath as error:  # the model has made the folder, which it may not
            raise ContainerLost(f"the check cannot be written: {error}") from error
        item = {
            "QUESTION": str(self._item.get("question", "")),
            "ANSWER": str(self._item.get("answer", "")),
            "COMPLETION": completion,
        }
        item = {name: text.replace("\0", "")[:_MOST_TEXT] for name, text in item.items()}
        command = ("/bin/sh", f"{CHECKS}/check.sh")
        ran = container.exec(command, env=item, user="root", timeout_s=options.check_s)
        try:
            text = container.read(REWARD, most_bytes=100).decode(errors="replace")
        except BadPath:
            return float(ran.exit_code == 0)
        try:
            reward = float(text)
        except ValueError:
            reward = math.nan
        if not math.isfinite(reward):
            raise ContainerLost(f"the check wrote {text[:80]!r} to {REWARD}, which is no number")
        return reward


class Turn:
    """The container of the present episode, and the tools that work in it, one after the other."""

    def __init__(self, most_characters: int) -> None:
        self.container: Container | None = None
        self._most_bytes = max(4 * most_characters, 1 << 14)
        self._lock = threading.Lock()

        def bash(command: str, left_s: float) -> str:
            """Runs a shell command in the working directory; returns what it prints, and its exit code."""
            ran = self._in_turn(
                lambda container: container.exec(
                    ("/bin/sh", "-c", command), timeout_s=left_s, most_bytes=self._most_bytes
                )
            )
            if ran.ended == "time":
                raise TimeoutError
            printed = (ran.stdout + ran.stderr).decode(errors="replace").rstrip()
            cut = f"\n[{ran.left_out} bytes are left out]" if ran.left_out else ""
            return f"{printed}{cut}\n[exit code {ran.exit_code}]".lstrip()

        def read_file(path: str, left_s: float) -> str:
            """Returns the content of a text file."""
            data: bytes = self._in_turn(lambda each: each.read(path, most_bytes=MIB))
            return data.decode(errors="replace")

        def write_file(path: str, content: str, left_s: float) -> str:
            """Writes a text file, with the folders above it."""
            self._in_turn(lambda each: each.write([File(path, content.encode())]))
            return f"{path} has {len(content)} characters"

        made = [Tool(each, bounded=True) for each in (bash, read_file, write_file)]
        self.tools = {tool.name: tool for tool in made}

    def running(self) -> Container:
        """The container. Raises ContainerLost where there is none."""
        if self.container is None:
            raise ContainerLost("the episode has no container; reset first")
        return self.container

    def close(self) -> None:
        """Ends the container."""
        if self.container is not None:
            self.container.close()
        self.container = None

    def _in_turn(self, ask: Callable[[Container], Any]) -> Any:
        with self._lock:
            try:
                return ask(self.running())
            except ContainerLost as lost:
                raise ServiceLost(str(lost)) from lost
            except (BadSpec, BadPath) as error:
                raise ValueError(str(error)) from error


def _ended(ran: Ran) -> str:
    said = (ran.stderr or ran.stdout).decode(errors="replace").strip()
    return f"exit code {ran.exit_code}: {said[-300:]}"
