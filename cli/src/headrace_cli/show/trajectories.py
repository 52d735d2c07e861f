"""Trajectories, conversations and episodes as tables and lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from headrace_cli.output import table
from headrace_cli.show.runs import WIDE

if TYPE_CHECKING:
    from headrace.client import Trajectory
    from rich.console import RenderableType


def trajectories_list(
    trajectories: Sequence[Trajectory], width: int, *, whole: bool = False
) -> RenderableType:
    """Prompts, answers and rewards: a table on a wide terminal, two lines a trajectory on a narrow one.

    `whole`: everything that was read and said, uncut.
    """
    if whole:
        return _whole_trajectories(trajectories)
    if width >= WIDE and not any(item.messages for item in trajectories):
        return _trajectories_table(trajectories)
    return _trajectory_lines(trajectories, width)


def _trajectories_table(trajectories: Sequence[Trajectory]) -> RenderableType:
    rows = [
        (item.step, item.prompt_ordinal, item.sample_index, f"{item.reward:.3f}", _middle_cut(item.prompt),
         _answer(item), item.reference, item.finish_reason, item.tokens)
        for item in trajectories
    ]  # fmt: skip
    return table(
        (">step", ">prompt", ">sample", ">reward", "prompt", "answer", "reference", "end", ">tokens"),
        rows,
    )


def _whole_trajectories(trajectories: Sequence[Trajectory]) -> RenderableType:
    """Of each what the model read, with what it sampled in bold; then its messages and rewards."""
    from rich.console import Group
    from rich.text import Text

    parts = []
    for item in trajectories:
        parts.append(Text(_head(item), style="bold"))
        if not item.read:
            parts += [Text("-- prompt"), Text(_printable(item.prompt))]
        for number, branch in enumerate(item.read, 1):
            parts.append(
                Text(
                    f"-- as the model read it{f', branch {number}' if len(item.read) > 1 else ''}",
                    style="dim",
                )
            )
            text = Text()
            for place, part in enumerate(branch):
                text.append(_printable(part), style="bold" if place % 2 else "")
            parts.append(text)
        for message in item.messages:
            turn = "" if message.tokens is None else f", {message.tokens} tokens"
            reward = "" if message.reward is None else f", reward {message.reward:.4g}"
            party = f" ({message.party})" if message.party else ""
            parts.append(Text(f"-- {_escaped(message.role + party)}{turn}{reward}", style="dim"))
            parts.append(Text(_printable(message.content)))
        if not item.messages:
            parts += [Text("-- answer", style="dim"), Text(_printable(item.completion))]
        if item.reference:
            parts += [Text("-- reference", style="dim"), Text(_printable(item.reference))]
    return Group(*parts)


def _head(item: Trajectory) -> str:
    what = "actions" if _episode(item) else "tokens"
    by = f", version {item.versions[-1][0]}" if item.messages and item.versions else ""
    place = f"step {item.step}, prompt {item.prompt_ordinal}, sample {item.sample_index}"
    return f"{place}: reward {item.reward:.3f}, {item.tokens} {what}, {item.finish_reason}{by}"


def _printable(text: str) -> str:
    """Text with its lines, in which nothing else steers a terminal."""
    return "\n".join(map(_escaped, text.split("\n")))


def _trajectory_lines(trajectories: Sequence[Trajectory], width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts = []
    for item in trajectories:
        parts.append(Text(_head(item)[:width], style="bold"))
        if item.messages:
            parts += [Text(line) for line in _conversation_lines(item, width)]
            if item.figures:
                said = ", ".join(f"{_escaped(name)} {value:g}" for name, value in item.figures.items())
                parts.append(Text(f"  its agent: {said}"[:width]))
            continue
        reference = f" (reference {item.reference})" if item.reference else ""
        said = f"{_middle_cut(item.prompt)} → {_answer(item)}{reference}"
        parts.append(Text("  " + (said if len(said) <= width - 2 else said[: width - 3] + "…")))
    return Group(*parts)


ROLE = 9
"""Columns of the longest role, assistant."""
MESSAGE_LINES = 6
"""Lines of one message at most."""


def _conversation_lines(item: Trajectory, width: int) -> Iterator[str]:
    """Who said what; of the policy's turns their tokens, reward and calls."""
    room = width - ROLE - 4
    for message in item.messages:
        said = wrap(_escaped(message.content), room) or ["(nothing)"]
        if len(said) > MESSAGE_LINES:
            said = [*said[: MESSAGE_LINES - 1], f"… {len(message.content)} characters"]
        who = message.role
        if message.party:
            who = message.party if message.tokens is not None else f"→{message.party}"
        for role, line in zip((who, *[""] * len(said)), said, strict=False):
            yield f"  {_escaped(role)[:ROLE]:<{ROLE}}  {line}"
        for call in message.calls:
            what = (
                f"broken call: {call.problem}" if call.problem else f"calls {call.name} {call.arguments_json}"
            )
            yield f"  {'':<{ROLE}}  {_escaped(what)}"[:width]
        if message.tokens is not None:
            reward = "" if message.reward is None else f", reward {message.reward:.4g}"
            loss = "no loss" if item.masked else "with loss"
            yield f"  {'':<{ROLE}}  [{message.tokens} tokens {loss}{reward}]"


def _escaped(text: str) -> str:
    """Text in which nothing steers a terminal."""
    return repr(text)[1:-1]


def _episode(item: Trajectory) -> dict[str, Any] | None:
    """What the rollout says of an episode; None for an answer in words."""
    try:
        found = json.loads(item.completion)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"return", "success", "steps"} <= found.keys() else None


def _answer(item: Trajectory) -> str:
    """An answer on one line; an episode in words."""
    if (episode := _episode(item)) is None:
        return repr(item.completion)[1:-1]
    if episode.get("error"):
        return f"episode lost: {episode['error']}"
    ended = {None: "ended", True: "succeeded", False: "did not succeed"}[episode["success"]]
    return f"episode {ended} after {episode['steps']} steps, return {episode['return']:.4g}"


def _middle_cut(text: str, characters: int = 40) -> str:
    """The text on one line, without its middle where it is longer."""
    flat = " ".join(text.split())
    half = characters // 2
    return flat if len(flat) <= characters else f"{flat[:half].rstrip()}…{flat[-half:].lstrip()}"
