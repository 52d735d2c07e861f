"""The conversation in which a model solves a coding task by itself: a shell, an edit tool, and tests at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace_servicekit.tool_calls import beside_calls
from headrace_simulator.backends.base import Message
from headrace_simulator.backends.base import Tool as ToolSchema
from headrace_simulator.backends.conversation.calls import (
    AnyTool,
    Content,
    Limits,
    ServiceLost,
    Tool,
    answers,
)
from typing_extensions import override

from headrace_containers.provider import Container, ContainerLost, EngineLost
from headrace_containers.tasks.options import CodingOptions, Tasks
from headrace_containers.tasks.task import Start, Task
from headrace_containers.tasks.verifying import begin, judge, settled

RIGHT = 1.0
"""A task of this reward is solved."""
_SHELL = 'exec 2>&1; if command -v bash >/dev/null; then exec bash -c "$0"; else exec sh -c "$0"; fi'
_MOST_BYTES = 1 << 20
_EDIT_S = 20.0


class Hands:
    """What a model does in a container; each returns what the model reads."""

    def __init__(self, container: Container, most_characters: int) -> None:
        self._container, self._most = container, most_characters

    def bash(self, command: str, left_s: float) -> str:
        """Runs a command in a new shell in the working directory, and returns its output and its exit code."""
        ran = self._container.exec(("sh", "-c", _SHELL, command), timeout_s=left_s, most_bytes=_MOST_BYTES)
        text = shortened(ran.stdout.decode(errors="replace"), self._most)
        if ran.ended == "time":
            return f"{text}\n(killed after {left_s:.0f} s)".strip()
        return text if not ran.exit_code else f"{text}\n(exit code {ran.exit_code})".strip()

    def edit(self, path: str, old: str, new: str, left_s: float) -> str:
        """Replaces a text in a file; it has to be there once. An empty `old` makes the file anew."""
        if not old:
            return self._write(path, new, "made")
        ran = self._container.exec(
            ("cat", "--", path), timeout_s=min(left_s, _EDIT_S), most_bytes=_MOST_BYTES
        )
        if ran.exit_code or ran.left_out:
            why = ran.stderr.decode(errors="replace").strip() or "it is larger than a megabyte"
            return f"error: {path} cannot be read: {why}"
        text = ran.stdout.decode(errors="surrogateescape")
        if (count := text.count(old)) != 1:
            return f"error: {path} has the old text {count} times; give one that it has once"
        return self._write(path, text.replace(old, new), "changed")

    def _write(self, path: str, text: str, done: str) -> str:
        script = 'mkdir -p "$(dirname "$0")" && cat > "$0"'
        ran = self._container.exec(
            ("sh", "-c", script, path), stdin=text.encode(errors="surrogateescape"), timeout_s=_EDIT_S
        )
        return (
            f"error: {ran.stderr.decode(errors='replace').strip()}" if ran.exit_code else f"{path} is {done}"
        )


class InTurn(Tool):
    """A tool whose calls run one after the other: a container takes one command at a time."""

    @override
    def begin(self, arguments: Any, left_s: float) -> Callable[[float], Content]:
        given = self._checked(arguments)

        def answer(left_s: float) -> Content:
            try:
                return str(self._function(**given, left_s=max(1.0, left_s)))
            except ContainerLost as error:
                raise ServiceLost(str(error)) from error

        return answer


class Coding:
    """One task at a time."""

    def __init__(self, options: CodingOptions, start: Start) -> None:
        self._options, self._start, self._tasks = options, start, Tasks(options)
        self._task: Task | None = None
        self._container: Container | None = None
        self._tools: dict[str, AnyTool] = {}
        self._turns = 0

    def reset(self, seed: int, item: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[ToolSchema]]:
        """A fresh container, and the task's instruction."""
        self.close()
        given: Mapping[str, Any] = item.get("metadata") or {}
        task = self._tasks.named(str(given.get("name", "")), str(given.get("digest", "")))
        self._task = settled(self._start, task)
        self._container, self._turns = begin(self._start, self._task), 0
        hands = Hands(self._container, self._options.most_characters)
        self._tools = {
            tool.name: tool for tool in (InTurn(hands.bash, bounded=True), InTurn(hands.edit, bounded=True))
        }
        system = [{"role": "system", "content": self._options.system}] if self._options.system else []
        schemas = [] if self._options.parser == "line" else [tool.schema for tool in self._tools.values()]
        return [*system, {"role": "user", "content": self._task.instruction}], schemas

    def step(
        self, message: Message
    ) -> tuple[Sequence[Message], float, bool] | tuple[Sequence[Message], float, bool, Mapping[str, Any]]:
        """Carries out what the model asks for; a turn that asks for nothing, and the last one, end the task."""
        self._turns += 1
        try:
            told = self._told(str(message["content"]))
        except (ContainerLost, ServiceLost) as error:
            if isinstance(error.__cause__ or error, EngineLost):
                raise
            sys.stderr.write(f"{error}\n")
            self.close()
            return [], 0.0, True, {"success": False}
        if told and self._turns < self._options.turns:
            return told, 0.0, False
        reward = self._judged()
        return told, reward, True, {"success": reward >= RIGHT}

    def _told(self, said: str) -> list[Message]:
        options = self._options
        assert self._container is not None
        if options.parser == "line":
            hands = Hands(self._container, options.most_characters)
            return [{"role": "user", "content": hands.bash(said, options.deadline_s)}]
        _, calls = beside_calls(options.parser, said, self._tools)
        limits = Limits(options.deadline_s, options.most_calls, 4 * options.most_characters)
        found = answers(calls, self._tools, limits)
        ids = [call.id or f"call{self._turns:03}{at:02}" for at, call in enumerate(calls)]
        return [
            {"role": "tool", "content": each.content, "tool_call_id": id, "name": call.name or "unknown"}
            for call, each, id in zip(calls, found, ids, strict=False)
        ]

    def _judged(self) -> float:
        assert self._task is not None and self._container is not None
        container, self._container = self._container, None
        judged = judge(self._start, self._task, container)
        if not judged.rewards:
            sys.stderr.write(f"{self._task.name}: no reward: {judged.said[-500:]}\n")
        return judged.reward

    def close(self) -> None:
        """Ends the container, if there is one."""
        container, self._container = self._container, None
        if container is not None:
            container.close()


def shortened(text: str, most: int) -> str:
    """A text, or its two ends where it is longer than `most` characters.

    >>> shortened("abcdefghij", 4)
    'ab\\n(6 characters are left out)\\nij'
    """
    if len(text) <= most:
        return text
    half = max(1, most // 2)
    return f"{text[:half]}\n({len(text) - 2 * half} characters are left out)\n{text[-half:]}"
