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


def trajectories_list(trajectories: Sequence[Trajectory], width: int) -> RenderableType:
    """Prompts, answers and rewards: a table on a wide terminal, two lines a trajectory on a narrow one."""
    if width >= WIDE and not any(item.messages for item in trajectories):
        return _trajectories_table(trajectories)
    return _trajectory_lines(trajectories, width)


def _trajectories_table(trajectories: Sequence[Trajectory]) -> RenderableType:
    rows = [
        (item.step, item.prompt_ordinal, item.sample_index, f"{item.reward:.3f}", _tail(item.prompt),
         _answer(item), item.reference, item.finish_reason, item.tokens)
        for item in trajectories
    ]  # fmt: skip
    return table(
        (">step", ">prompt", ">sample", ">reward", "prompt ends", "answer", "reference", "end", ">tokens"),
        rows,
    )


def _trajectory_lines(trajectories: Sequence[Trajectory], width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts = []
    for item in trajectories:
        what = "actions" if _episode(item) else "tokens"
        head = f"step {item.step}, prompt {item.prompt_ordinal}, sample {item.sample_index}"
        by = f", version {item.versions[-1][0]}" if item.messages and item.versions else ""
        line = f"{head}: reward {item.reward:.3f}, {item.tokens} {what}, {item.finish_reason}{by}"
        parts.append(Text(line[:width], style="bold"))
        if item.messages:
            parts += [Text(line) for line in _conversation_lines(item, width)]
            if item.figures:
                said = ", ".join(f"{_escaped(name)} {value:g}" for name, value in item.figures.items())
                parts.append(Text(f"  its agent: {said}"[:width]))
            continue
        reference = f" (reference {item.reference})" if item.reference else ""
        said = f"{_tail(item.prompt)} → {_answer(item)}{reference}"
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


def _tail(text: str, characters: int = 40) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= characters else "…" + flat[-characters:]
