"""The conversations and the agents of one environment inside its child.

Environments are other people's code and may return anything: what is not messages is named, and the environment is
made anew. Agents are other people's programs, one process a sample, ended with all that it started. Each
is given its endpoint, its key and its item, and nothing of this service.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from headrace.common.v1 import common_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace_schema.images import EXTRAS, MARKS, MOST_IMAGE_BYTES, MOST_IMAGES, kind_of, marks_in
from headrace_schema.images import PARTS as KIND_OF
from headrace_schema.references import redacted
from headrace_servicekit.causes import cause_first
from headrace_servicekit.contained.network import CONTAINED_VARIABLE, ENDPOINT_PORT, ENDPOINT_VARIABLE
from headrace_servicekit.image_files import BadImage, image_file
from headrace_servicekit.process.spawn import descendants
from headrace_servicekit.process.worker import exit_description
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.trajectories import keys_of

from headrace_simulator.backends.base import Agent, ConversationEnvironment
from headrace_simulator.child.episodes import Raised, call
from headrace_simulator.values import awaited

MOST_CHARACTERS = 1 << 20
"""Of the messages, and of the tools, that one call returns."""
ROLES = ("system", "user", "assistant", "tool", "developer", "ipython", "function")
OWN = {"to", "by"}
"""Keys of messages of several roles."""
MESSAGE = "{'role': 'user', 'content': 'TEXT'}"
TOLD = "{'role': 'user', 'content': 'TEXT', 'to': 'ROLE'}"
PARTS = "{'type': 'text', 'text': 'TEXT'} or {'type': 'image', 'image': FILE}, or video or audio likewise"
"""Of a content that is a list."""


class Conversations:
    """An environment with the count of its conversation's turns; after `most_turns` it is cut (0: never)."""

    def __init__(self, environment: ConversationEnvironment, most_turns: int) -> None:
        for method in ("reset", "step"):
            if not callable(getattr(environment, method, None)):
                kind = type(environment).__name__
                raise Raised(
                    f"{kind} has no method {method}; a conversation has reset(seed, item) and step(message)"
                )
        self._environment, self._most_turns = environment, most_turns
        self.roles = _roles(getattr(environment, "roles", ()))
        self.images = bool(getattr(environment, "images", False))
        """Its messages may have images."""
        self._turns, self._speaks = 0, ""

    def operate(
        self, operation: simulator_pb2.EnvironmentOperation, outcome: simulator_pb2.EnvironmentOutcome
    ) -> None:
        """Runs a valid operation and writes how it went into the outcome; Raised where the environment failed."""
        if operation.HasField("reset"):
            self._reset(operation.reset, outcome)
        else:
            self._step(operation.turn.content, outcome)

    def _reset(self, reset: simulator_pb2.ResetOperation, outcome: simulator_pb2.EnvironmentOutcome) -> None:
        self._turns = 0
        item = json.loads(reset.options_json or "{}")
        said: Any = call(lambda: awaited(self._environment.reset(reset.seed, item)))
        messages, tools = said if isinstance(said, tuple) and len(said) == 2 else (said, ())
        outcome.messages.extend(self._messages(messages, "reset", ROLES))
        if not outcome.messages:
            raise Raised("reset returned no message, and the model has to answer one")
        self._speaks = outcome.messages[-1].party
        if tools:
            outcome.tools_json = _tools(tools)

    def _step(self, content: str, outcome: simulator_pb2.EnvironmentOutcome) -> None:
        message = {"role": "assistant", "content": content, **({"by": self._speaks} if self.roles else {})}
        said: Any = call(lambda: awaited(self._environment.step(message)))
        if not isinstance(said, tuple) or len(said) not in (3, 4):
            raise Raised(f"step returned {_shown(said)}; return (messages, reward, done)")
        messages, reward, done, info = said if len(said) == 4 else (*said, {})
        self._turns += 1
        given = tuple(role for role in ROLES if role != "assistant")
        outcome.messages.extend(self._messages(messages, "step", given))
        self._reward(reward, outcome)
        outcome.terminated = _flag(done, "done")
        outcome.truncated = not outcome.terminated and self._turns == self._most_turns
        outcome.success = isinstance(info, Mapping) and bool(info.get("success"))
        outcome.executed_length = 1
        if not (outcome.messages or outcome.terminated):
            raise Raised(
                "step returned no message and done is False: return one for the model to answer, or True"
            )
        self._speaks = outcome.messages[-1].party if outcome.messages else ""

    def _reward(self, given: Any, outcome: simulator_pb2.EnvironmentOutcome) -> None:
        """A number is the reward of who spoke; with several roles it may be a number for each of some."""
        if not (self.roles and isinstance(given, Mapping)):
            outcome.reward = _number(given)
            if self.roles:
                outcome.role_rewards[self._speaks] = outcome.reward
            return
        if strange := [each for each in given if each not in self.roles]:
            raise Raised(f"step returned a reward of {_shown(strange[0])}; roles: {', '.join(self.roles)}")
        for role, reward in given.items():
            outcome.role_rewards[role] = _number(reward)
        outcome.reward = sum(outcome.role_rewards.values())

    def _messages(self, given: Any, method: str, roles: Sequence[str]) -> list[common_pb2.ChatMessage]:
        """What a method returned as messages of these roles, checked."""
        parties = self.roles
        form, keys = (TOLD, {"role", "content", "to"}) if parties else (MESSAGE, {"role", "content"})
        if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
            raise Raised(f"{method} returned {_shown(given)}, which is no list of messages such as {form}")
        found = list[common_pb2.ChatMessage]()
        for index, each in enumerate(given):
            where = f"message {index} of what {method} returned"
            if not isinstance(each, Mapping) or not keys <= set(each) or (OWN - keys) & set(each):
                raise Raised(
                    f"{where} is {_shown(each)}; a message is {form}, and beside these what chat templates read"
                )
            role, party = each["role"], each.get("to", "")
            if parties and party not in parties:
                raise Raised(f"{where} is to {_shown(party)}; it may be to {', '.join(parties)}")
            if role not in roles:
                raise Raised(f"{where} has the role {_shown(role)}; it may be {', '.join(roles)}")
            bare = role == "assistant" and each["content"] is None and bool(each.get("tool_calls"))
            content, files = ("", []) if bare else _content(each["content"], where)
            if files and not self.images:
                kind = type(self._environment).__name__
                raise Raised(
                    f"{where} has an image, and {kind} does not say that it shows any: set images = True in its class"
                )
            images = [common_pb2.Image(digest=digest_bytes(file), data=file) for file in files]
            message = common_pb2.ChatMessage(role=role, content=content, party=party, images=images)
            message.keys_json = _keys(each, keys, where)
            found.append(message)
        _check_size(found, method)
        return found


def _keys(message: Mapping[str, Any], own: set[str], where: str) -> str:
    """What else chat templates read of a message, such as `tool_call_id`, as JSON."""
    others = {key: each for key, each in message.items() if key not in own or key == "content"}
    if strange := [key for key in others if not isinstance(key, str)]:
        raise Raised(f"{where} has the key {_shown(strange[0])}; keys are texts")
    try:
        keys = keys_of(redacted(others))
        keys.encode()
    except ValueError as error:
        raise Raised(f"{where} has keys that are not JSON: {error}") from error
    return keys


def _roles(given: Any) -> tuple[str, ...]:
    """The roles that an environment says it has; none: one speaks with it."""
    fix = "roles are two names or more, such as ('speaker', 'guesser')"
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise Raised(f"its roles are {_shown(given)}; {fix}")
    found = tuple(given)
    if found and (
        len({*found}) < max(2, len(found)) or not all(each and isinstance(each, str) for each in found)
    ):
        raise Raised(f"its roles are {list(map(str, found))}; {fix}")
    return found


def _check_size(messages: Sequence[common_pb2.ChatMessage], method: str) -> None:
    if sum(len(each.content) + len(each.keys_json) for each in messages) > MOST_CHARACTERS:
        raise Raised(
            f"the messages of one {method} are longer than {MOST_CHARACTERS} characters; shorten them"
        )
    files = [image.data for each in messages for image in each.images]
    if len(files) > MOST_IMAGES:
        raise Raised(f"the messages of one {method} have {len(files)} images; {MOST_IMAGES} are read")
    if (size := sum(map(len, files))) > MOST_IMAGE_BYTES:
        raise Raised(
            f"the images of one {method} have {size:,} bytes, and {MOST_IMAGE_BYTES:,} travel: make them smaller, or "
            "give JPEG files"
        )


def _content(given: Any, where: str) -> tuple[str, list[bytes]]:
    """The text of a content, with marks where its images stand, and their files."""
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        return _text(given, where), []
    text, files = "", list[bytes]()
    for index, part in enumerate(given):
        at = f"part {index} of {where}"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            said = _text(part.get("text"), at)
            text += said
        elif isinstance(kind, str) and kind in KIND_OF:
            text, files = text + MARKS[KIND_OF[kind]], [*files, _image(part, kind, at)]
        else:
            shown = _shown(part) if kind is None else f"of type {_shown(kind)}"
            raise Raised(f"{at} is {shown}; a part is {PARTS}")
    if len(marks := marks_in(text, {kind_of(file) for file in files})) != len(files):
        raise Raised(
            f"{where} has the text {MARKS[marks[0]]} beside such files, for one of which it stands; write it otherwise"
        )
    return text, files


def _image(part: Mapping[str, Any], kind: str, where: str) -> bytes:
    value = part.get(kind)
    if isinstance(value, Mapping):
        value = value.get("url")
    try:
        return image_file(value, KIND_OF[kind])
    except BadImage as error:
        raise Raised(f"{where} has {error.what} {error}") from error
    except ImportError as error:
        raise Raised(
            f"{where} has {kind}, and {error}: pip install 'headrace-simulator[{EXTRAS[KIND_OF[kind]]}]'"
        ) from error


def _text(content: Any, where: str) -> str:
    if not isinstance(content, str):
        raise Raised(f"{where} has the content {_shown(content)}; it has to be a str")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise Raised(
            f"{where} is no text that can be sent ({error}); decode bytes with errors='replace'"
        ) from error
    return str(redacted(content))  # what a tool prints of its secrets is no part of a trajectory


def _tools(given: Any) -> str:
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise Raised(f"reset returned the tools {_shown(given)}; give a list of JSON objects")
    for index, each in enumerate(given):
        if not isinstance(each, Mapping):
            raise Raised(f"tool {index} of what reset returned is {_shown(each)}; give a JSON object")
    try:
        text = json.dumps(redacted(list(given)), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Raised(f"the tools that reset returned are not JSON: {error}") from error
    if len(text) > MOST_CHARACTERS:
        raise Raised(f"the tools that reset returned are longer than {MOST_CHARACTERS} characters")
    return text


def _number(reward: Any) -> float:
    try:
        value = float(reward)
    except (TypeError, ValueError) as error:
        raise Raised(f"step returned the reward {_shown(reward)}; return a number") from error
    if not math.isfinite(value):
        raise Raised(f"step returned a reward of {value}, which is not finite")
    return value


def _flag(done: Any, name: str) -> bool:
    if not isinstance(done, bool | np.bool_):
        raise Raised(f"step returned {name} as {_shown(done)}; return True or False")
    return bool(done)


def _shown(value: Any) -> str:
    kind = type(value).__name__
    return (
        f"{redacted(str(value))[:80]!r} ({kind})"
        if isinstance(value, str | int | float)
        else f"an object of {kind}"
    )


MOST_FIGURES, LONGEST_NAME = 32, 64
"""Of what an agent says of itself."""
_END_S = 5.0


class Agents:
    """An agent and its process, if one runs."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._process = agent, 0

    def operate(
        self, operation: simulator_pb2.EnvironmentOperation, outcome: simulator_pb2.EnvironmentOutcome
    ) -> None:
        """Runs a valid operation and writes how it went into the outcome; Raised where the agent failed."""
        if operation.HasField("reset"):
            self._start(operation.reset)
        elif not operation.HasField("await_agent"):
            raise Raised("a turn, and an agent takes none: it speaks with the policy by itself")
        elif operation.await_agent.kill:
            self._end()
            outcome.terminated = True
        else:
            self._await(operation.await_agent.wait.ToNanoseconds() / 1e9, outcome)

    def _start(self, reset: simulator_pb2.ResetOperation) -> None:
        self._end()
        given = json.loads(reset.options_json or "{}")
        missing = {"item", "base_url", "api_key", "session"} - set(given)
        if missing:
            raise Raised(
                f"a start without {', '.join(sorted(missing))}; the rollout gives an agent's endpoint"
            )
        self._process = call(lambda: self._agent.run(reset.seed, given["item"], _variables(given)))

    def _await(self, wait_s: float, outcome: simulator_pb2.EnvironmentOutcome) -> None:
        if not self._process:
            raise Raised("no agent that could be waited for: start one first")
        if not _ended_within(self._process, wait_s):
            return
        _, status = os.waitpid(self._process, 0)
        self._process = 0
        self._end()
        found = call(self._agent.result)
        if error := found.get("error"):
            raise Raised(f"an error: the agent {error}")
        if code := os.waitstatus_to_exitcode(status):
            said = found.get("last_words", "")
            what = cause_first(said, f"the agent's process {exit_description(code)}")
            raise Raised(f"an error: {what}")
        outcome.terminated, outcome.executed_length = True, 1
        outcome.reward = found.get("reward", 0.0)
        outcome.success, outcome.success_reported = bool(found.get("success")), "success" in found
        said = {"figures": _figures(found["figures"])} if "figures" in found else {}
        outcome.info_json = json.dumps({"rewarded": "reward" in found, **said})

    def _end(self) -> None:
        """Kills the agent and whatever it has started: this process is the parent of all that it left behind."""
        self._process, until = 0, time.monotonic() + _END_S
        while (left := descendants([os.getpid()])[1:]) and time.monotonic() < until:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.001)


def _figures(given: Any) -> dict[str, float]:
    """The numbers that an agent says of itself, checked."""
    if not isinstance(given, Mapping) or len(given) > MOST_FIGURES:
        raise Raised(
            f"the agent returned figures that are no mapping of at most {MOST_FIGURES} names to numbers"
        )
    if strange := [each for each in given.items() if not _is_figure(*each)]:
        name, value = strange[0]
        raise Raised(
            f"the agent returned the figure {_shown(name)} as {_shown(value)}; figures are finite numbers"
        )
    return {name: float(value) for name, value in given.items()}


def _is_figure(name: Any, value: Any) -> bool:
    number = isinstance(value, int | float) and math.isfinite(value)
    return isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and number


def _ended_within(process: int, wait_s: float) -> bool:
    watched = os.pidfd_open(process)
    try:
        ready, _, _ = select.select([watched], [], [], wait_s)
    finally:
        os.close(watched)
    return bool(ready)


def _variables(given: Mapping[str, Any]) -> dict[str, str]:
    """What an agent finds its endpoint by, under the names that clients read."""
    url = urlsplit(given["base_url"])
    outside, contained = url.netloc, CONTAINED_VARIABLE in os.environ
    url = url._replace(netloc=f"127.0.0.1:{ENDPOINT_PORT}") if contained else url
    around = ",".join(filter(None, (os.environ.get("NO_PROXY", ""), url.hostname)))
    return {
        "OPENAI_BASE_URL": url.geturl(),
        "OPENAI_API_BASE": url.geturl(),
        ENDPOINT_VARIABLE: outside,
        "OPENAI_API_KEY": given["api_key"],
        "HEADRACE_SESSION": given["session"],
        "NO_PROXY": around,
        "no_proxy": around,
    }
