"""Measures what a spec's stages cost on a fleet: from the first steps of its runs, and from short ones.

Measuring costs a run nothing: every run keeps the seconds of its steps. Knows no cost model; see
planner/profiling/measured.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace_schema.spec import RunSpec
from pydantic import ValidationError

from headrace_cli.errors import CommandError, mistake
from headrace_cli.profiles import costs_alike

if TYPE_CHECKING:
    from headrace.client import Client, Run, Step, Trajectory
    from headrace_planner.profiling.measured import MeasuredStep

FIRST_STEPS = 10
"""Steps of a run that count, after the first one, which pays for the start."""
LOOKED_AT = 50
"""Newest runs of the fleet that are looked at."""
BATCHES = (1, 2, 3)
"""Short runs have so many times the spec's batch: points that tell a fixed cost from an answer's."""
RUN_S = 1800.0
OWN_TURN = "own turn"
"""Of a step's generate: the policy's answers, where another one replies on devices of its own."""
Say = Callable[[str], None]


def runs_alike(client: Client, spec: RunSpec) -> list[Run]:
    """Runs of the fleet that cost what `spec` costs, newest first."""
    wanted, found = costs_alike(spec), []
    for listed in list(client.list())[:LOOKED_AT]:
        run = client.get(listed.id)
        try:
            alike = costs_alike(RunSpec.model_validate(run.spec)) == wanted
        except ValidationError:
            continue  # It was submitted to another release.
        if alike and run.step > 1:
            found.append(run)
    return found


def short_runs(client: Client, spec: RunSpec, steps: int, say: Say) -> list[Run]:
    """Runs one after the other, each with another batch, of one step to start and `steps` that count."""
    made = []
    for factor in BATCHES:
        overrides = {
            "name": "profile",
            "steps": steps + 1,
            "export": False,
            "checkpoint.enabled": False,
            "evaluation.every": 0,
            "evaluation.baseline_prefill": None,
            "data.heldout": 0,
            "algorithm.prompts_per_step": factor * spec.algorithm.prompts_per_step,
            "placement.mode": "collocated" if spec.placement.mode == "auto" else spec.placement.mode,
        }
        run = client.submit(spec.model_dump(mode="json"), overrides)
        say(f"{run.id}: {steps} steps of {factor * spec.slots_per_step} answers")
        ended = client.wait(run.id, RUN_S)
        if ended.state != "SUCCEEDED":
            reason = f"{run.id} ended as {ended.state}: {ended.reason}"
            raise CommandError(f"no profile: {reason}", reason="FAILED_PRECONDITION")
        made.append(client.get(run.id))
    return made


def measured_document(client: Client, spec: RunSpec, runs: Sequence[Run]) -> dict[str, Any]:
    """The profile that some runs measured; CommandError where none of them has a step that counts."""
    from headrace_planner.profiling.measured import profile_document

    steps, groups, devices = [], [], set()
    for run in runs:
        listed = [step for step in client.metrics(run.id) if 1 < step.step <= FIRST_STEPS + 1]
        counted = [step for step in listed if (OWN_TURN in step.stage_s) == bool(spec.placement.reply)]
        steps += [_measured(step, spec.graph.reply_stage) for step in counted]
        devices |= {device for step in counted for device in step.devices}
        groups += _lengths(client.trajectories(run.id))
    if not steps:
        raise mistake("profile", "no run of this spec has made two steps", "measure it without --stored")
    kinds = sorted({device.rpartition("/")[2].partition(":")[0] for device in devices})
    hosts = sorted({device.rpartition("/")[0] for device in devices if "/" in device})
    about = (
        f"{spec.model.path}, {spec.model.dtype}, {spec.rollout.engine}; {len(devices)} {'/'.join(kinds)} "
        f"{'of ' + ', '.join(hosts) if hosts else ''}; {len(steps)} steps of {', '.join(run.id for run in runs)}; "
        "memory is not measured"
    )
    stages = spec.graph.stages.items()
    # Where each rollout replies itself, both policies are measured together.
    services = {
        name: stage.service
        for name, stage in stages
        if name != spec.graph.reply_stage or spec.placement.reply
    }
    return profile_document(services, kinds[0] if kinds else "cpu", steps, groups, " ".join(about.split()))


def _lengths(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Lengths by group: of a step's prompt."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for each in trajectories:
        groups[each.step, each.prompt_ordinal].append(each.tokens)
    return list(groups.values())


def _measured(step: Step, reply: str) -> MeasuredStep:
    """A step; where a policy takes turns its part of generate is its seconds on the device that computed longest.

    That is so with environments, and with a policy on other devices, at the stage `reply`.
    """
    from headrace_planner.profiling.measured import MeasuredStep

    seconds = dict(step.stage_s)
    for part in ("act", OWN_TURN):
        if acted := [stages[part] for stages in step.devices.values() if part in stages]:
            seconds["generate"] = max(acted)
    devices = {
        stage: {device for device, stages in step.devices.items() if stage in stages}
        for stage in ("generate", "learn", *([reply] if reply else []))
    }
    return MeasuredStep(
        items=step.trained + step.dropped,
        seconds=seconds,
        devices={stage: len(found) for stage, found in devices.items()},
        in_turns=bool(devices["generate"] & devices["learn"]),
    )
