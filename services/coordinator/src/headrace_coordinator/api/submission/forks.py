"""Whether a spec can continue from a checkpoint of another run (`from_checkpoint`): checked at submission.

Pure. Model and optimizer are the trainer's to compare, when it reads the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_schema.problems import nearest, problem
from headrace_schema.resources.views import KeyProblemView, RunView
from headrace_schema.spec import RunSpec

BATCH_SHAPE = ("group_size", "prompts_per_step")
"""Keys of `algorithm` that say which prompts a step has: with others, step N would not begin where the origin ended."""


def unknown_origin(run: str, known: Sequence[str]) -> KeyProblemView:
    """The problem of a run that does not exist; `known` are ids, of which the nearest is named."""
    close = nearest(run, known)
    fix = f"did you mean {close}?" if close else "name a run that `headrace run list` shows"
    return problem("from_checkpoint.run", f"there is no run {run}", fix)


def check_fork(
    spec: RunSpec, origin: RunView, steps: Sequence[int], *, saving: bool = False
) -> list[KeyProblemView]:
    """Problems of a fork from `origin`; `steps` are those of its checkpoints, newest first.

    `saving`: it has saved some and goes on. With `checkpoint.keep: 1` the one that is known is deleted before the
    next one is: a fork that names no step begins with whichever is there when it starts.
    """
    if not steps and saving and spec.from_checkpoint and spec.from_checkpoint.step is None:
        return _batch_shape(spec, origin)
    if not steps:
        return [problem("from_checkpoint.run", f"run {origin.id} has no checkpoint", _how_to_get_one(origin))]
    found = _batch_shape(spec, origin)
    wanted = spec.from_checkpoint.step if spec.from_checkpoint else None
    if wanted is not None and wanted not in steps:
        close = min(steps, key=lambda step: abs(step - wanted))
        reason = f"run {origin.id} has no checkpoint of step {wanted}"
        fix = f"the nearest is {close}; it has checkpoints of steps {_listed(steps)}"
        return [*found, problem("from_checkpoint.step", reason, fix)]
    start = steps[0] if wanted is None else wanted
    if spec.steps <= start:
        earlier = [step for step in steps if step < spec.steps]
        instead = f", or an earlier checkpoint: {_listed(earlier)}" if earlier else ""
        reason = f"{spec.steps} steps leave nothing to do after the checkpoint of step {start}"
        found.append(problem("steps", reason, f"the nearest valid value is {start + 1}{instead}"))
    return found


def _batch_shape(spec: RunSpec, origin: RunView) -> list[KeyProblemView]:
    return [
        problem(
            f"algorithm.{key}",
            f"{mine} is not the {theirs} of run {origin.id}, so its steps would have other prompts",
            f"set it to {theirs}",
        )
        for key in BATCH_SHAPE
        if (mine := getattr(spec.algorithm, key)) != (theirs := origin.spec["algorithm"][key])
    ]


def _how_to_get_one(origin: RunView) -> str:
    if origin.ended:
        return "name a run that has one"
    return f"wait until it has one, or make one with: headrace run pause {origin.id}"


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(str(step) for step in sorted(set(steps)))
