"""Runs that begin after others: what one begins with, and what becomes of it by what became of the run before. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headrace_schema.problems import Impossible, nearest, problem
from headrace_schema.resources.views import RunView
from headrace_schema.rules.defaults import EXPORT_OF_ANOTHER
from headrace_schema.spec import RunSpec
from headrace_schema.workflow import REWARD_MODEL, trains_robots

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.domain.runs import RunState, of_export
from headrace_coordinator.domain.state import State

KEY = "after"
EXPORT = "export"
"""Directory of a run's exported model, below the run's own."""


def settled_followers(state: State) -> Iterator[list[ev.Event]]:
    """The events of each run that waits for one that has ended, those of the longest wait first."""
    for run in sorted(state.active_runs(), key=lambda run: (run.created_at, run.id)):
        if run.awaited and (events := _settled(state, run)):
            yield events


def _settled(state: State, run: RunState) -> list[ev.Event]:
    name = run.awaited
    live, ended = state.runs.get(name), state.ended.get(name)
    before = live.state if live is not None else ended.state if ended is not None else ""
    if before and before not in run_states.TERMINAL:
        return []
    if before == run_states.SUCCEEDED:
        # Runs lie beside each other; what is archived is not in memory.
        path = live.export_path if live is not None else str(Path(run.directory).parent / name / EXPORT)
        return [ev.RunFollowed(run=run.id, origin=name, path=path)]
    why = f"is {before}" if before else "was deleted"
    if live is not None and before == run_states.FAILED:
        why += f" ({live.reason})"
    return runs.plan_move(run, run_states.CANCELLED, f"run {name}, with whose export it would begin, {why}")


def pipeline(state: State, run: str, follows: Sequence[str]) -> list[str]:
    """Ids of the runs before it, itself, and those after it that have not been archived; none of a run alone."""
    behind = [each for each in state.runs.values() if run in each.follows]
    after = [each.id for each in sorted(behind, key=lambda each: (len(each.follows), each.created_at))]
    return [*follows, run, *after] if follows or after else []


def following(
    spec: RunSpec, newest_first: Sequence[str], look: Callable[[str], RunView]
) -> tuple[RunSpec, list[str]]:
    """The spec with the id of the run that it names and a model of that one's form; and the runs before it, in order.

    Until there is an export, the model is what the first of them began with: its export differs in its weights alone.
    Raises `Impossible`.
    """
    name = spec.after or ""
    if spec.model.path != EXPORT_OF_ANOTHER:
        reason = f"{spec.model.path!r} is given, and the run begins with the export of {name}"
        raise Impossible([problem("model.path", reason, "leave it out")])
    origin = look(_named(name, newest_first))
    if unfit := _unfit(origin, spec):
        raise Impossible([problem(KEY, f"run {origin.id} {unfit[0]}", unfit[1])])
    own, theirs = spec.model.model_dump(), origin.spec["model"]
    given = spec.model.model_fields_set - {"path"}
    beside = {key: value for key, value in theirs.items() if key not in given and key in own}
    known = of_export(origin.export_path) if origin.export_path else {}
    model = type(spec.model).model_validate({**own, **beside, **known})
    before = origin.pipeline[: origin.pipeline.index(origin.id)] if origin.pipeline else []
    return spec.model_copy(update={"after": origin.id, "model": model}), [*before, origin.id]


def _named(name: str, newest_first: Sequence[str]) -> str:
    """The run of this id, else the newest one of this name."""
    if name in newest_first:
        return name
    for each in newest_first:
        if each.rpartition("-")[0] == name:
            return each
    names = list(dict.fromkeys([*newest_first, *(each.rpartition("-")[0] for each in newest_first)]))
    close = nearest(name, names)
    fix = (
        f"did you mean {close}?" if close else "name a run that `headrace run list` shows, or submit it first"
    )
    raise Impossible([problem(KEY, f"there is no run {name}", fix)])


def _unfit(origin: RunView, spec: RunSpec) -> tuple[str, str] | None:
    """Why a run cannot begin with another one's export, and the fix."""
    if origin.suite is not None:
        return "is an evaluation, which trains nothing", "name a run that trains"
    if origin.state in run_states.TERMINAL and origin.state != run_states.SUCCEEDED:
        return f"is {origin.state}: it will export nothing", "name a run that succeeds, or fork it first"
    if not origin.spec.get("export", True) or (
        origin.state == run_states.SUCCEEDED and not origin.export_path
    ):
        return "exports nothing", "set export: true there, or use from_checkpoint"
    if origin.spec["workflow"] == REWARD_MODEL:
        fix = "name its export in reward.scorers: {name: reward_model, options: {path: …}}"
        return "exports a classifier, which generates nothing", fix
    if origin.spec.get("policies"):
        return "exports no model alone", "name its export as model.path"
    robot = trains_robots(origin.spec["workflow"], origin.spec["data"]["source"])
    if robot != spec.trains_robots:
        kind, own = (
            ("a robot policy", "a language model") if robot else ("a language model", "a robot policy")
        )
        return f"exports {kind}, and this run trains {own}", "name another run"
    return None
