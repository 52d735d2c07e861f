"""Measures what a spec's stages cost on a fleet, from the first steps of its runs and from short ones, and stores it.

Every run keeps the seconds of its steps, so measuring costs a run nothing. One file holds the profile of all specs
whose stages cost alike. The cost model is the planner's (`headrace_planner.profiling.measured`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_schema.spec import RunSpec
from headrace_schema.yaml_text import write_yaml
from pydantic import ValidationError

from headrace_cli.errors import CommandError, user_error

if TYPE_CHECKING:
    from headrace.client import Client, Run, Step, Trajectory
    from headrace_planner.profiling.measured import MeasuredStep

COST_NOTHING = {
    *(
        "name",
        "steps",
        "seed",
        "deterministic",
        "export",
        "optimizer",
        "placement",
        "evaluation",
        "checkpoint",
    ),
    *("tracking", "scheduling", "limits", "from_checkpoint"),
}
"""Sections that do not change what an answer costs in any stage."""
STARTED_FROM = {"algorithm": {"prompts_per_step"}, "trainer": {"warmup"}, "data": {"heldout", "heldout_seed"}}
"""Keys that may differ too: the batch is what points are measured over."""
FIRST_STEPS = 10
"""Steps of a run that count, after the first one, which pays for the start."""
LOOKED_AT = 50
"""Newest runs of the fleet that are looked at."""
BATCHES = (1, 2, 3)
"""Multiples of the spec's batch in the short runs: points that separate a fixed cost from an answer's."""
RUN_S = 1800.0
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
    made: list[Run] = []
    placement: str = spec.placement.mode
    if placement == "auto":
        placement = "disaggregated" if spec.algorithm.max_staleness else "collocated"
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
            "placement.mode": placement,
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
    from headrace_planner.profiling.measured import MeasuredStep, profile_document

    steps, groups, devices = list[MeasuredStep](), [], set()
    for run in runs:
        listed = [step for step in client.metrics(run.id) if 1 < step.step <= FIRST_STEPS + 1]
        steps += map(_measured, listed)
        devices |= {device for step in listed for device in step.devices}
        groups += _lengths(client.trajectories(run.id))
    if not steps:
        raise user_error("profile", "no run of this spec has made two steps", "measure it without --stored")
    kinds = sorted({device.rpartition("/")[2].partition(":")[0] for device in devices})
    hosts = sorted({device.rpartition("/")[0] for device in devices if "/" in device})
    about = (
        f"{spec.model.path}, {spec.model.dtype}, {spec.rollout.engine}; {len(devices)} {'/'.join(kinds)} "
        f"{'of ' + ', '.join(hosts) if hosts else ''}; {len(steps)} steps of {', '.join(run.id for run in runs)}; "
        "memory is not measured"
    )
    services = {name: stage.service for name, stage in spec.graph.stages.items()}
    return profile_document(services, kinds[0] if kinds else "cpu", steps, groups, " ".join(about.split()))


def _lengths(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Lengths by group: of a step's prompt."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for each in trajectories:
        groups[each.step, each.prompt_ordinal].append(each.tokens)
    return list(groups.values())


def _measured(step: Step) -> MeasuredStep:
    """A step; beside environments a policy's part of generate is its seconds on the device that computed longest."""
    from headrace_planner.profiling.measured import MeasuredStep

    seconds = dict(step.stage_s)
    if acted := [stages["act"] for stages in step.devices.values() if "act" in stages]:
        seconds["generate"] = max(acted)
    devices = {
        stage: {device for device, stages in step.devices.items() if stage in stages}
        for stage in ("generate", "learn")
    }
    return MeasuredStep(
        items=step.trained + step.dropped,
        seconds=seconds,
        devices={stage: len(found) for stage, found in devices.items()},
        in_turns=bool(devices["generate"] & devices["learn"]),
    )


def costs_alike(spec: RunSpec) -> str:
    """A digest of everything in a spec that decides what its stages cost."""
    document = spec.model_dump(mode="json", exclude={**dict.fromkeys(COST_NOTHING, True), **STARTED_FROM})
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]


def profile_file(folder: Path, spec: RunSpec, kind: str) -> Path:
    """The file of a spec's profile on devices of a kind."""
    model = re.sub(r"[^A-Za-z0-9.]+", "-", spec.model.path).strip("-.").rpartition("-")[2] or "model"
    return folder / f"{model}-{kind}-{costs_alike(spec)}.yaml"


def stored_profile(folder: Path, document: dict[str, Any]) -> Path | None:
    """The newest stored profile of a valid run spec; None where there is none."""
    digest = costs_alike(RunSpec.model_validate(document))
    found = sorted(folder.glob(f"*-{digest}.yaml"), key=lambda file: file.stat().st_mtime)
    return found[-1] if found else None


def store(file: Path, document: dict[str, Any]) -> None:
    """Writes a profile in one piece."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}")
    aside.write_text(write_yaml(document), encoding="utf-8")
    aside.replace(file)
