"""What a user may change of a run while it works, and why not. Pure: answers with the events of a change."""

from __future__ import annotations

import copy

from headrace_schema.problems import explain, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules.learning import model_ranks
from headrace_schema.sections.learning import TrainerSection
from headrace_schema.spec import RunSpec
from pydantic import ValidationError

from headrace_coordinator.api.control import Refused
from headrace_coordinator.api.submission.admission import FleetView, check_size
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.domain.devices.scheduling import plan_regroup
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.domain.state import State

KEY = "trainer.ranks"


def plan_ranks(state: State, run: RunState, ranks: int, fleet: FleetView, now: float) -> list[ev.Event]:
    """The event with which a run's trainer group should get `ranks` ranks; nothing when that is wanted already.

    Raises Refused: CONFLICT by the run's state or what others hold, INVALID for what never fits this run.
    """
    if run.state in run_states.TERMINAL or run.intent == run_states.CANCEL:
        raise Refused("CONFLICT", f"run {run.id} is {run.state}; nothing can change it any more")
    if run.evaluation is not None:
        raise _invalid(problem(KEY, "an evaluation trains nothing", "set it on a run that trains"))
    if len(run.sizes) > 1:
        reason = "the run takes and gives back ranks by itself, as its trainer.min_ranks and max_ranks say"
        raise _invalid(problem(KEY, reason, "scale the trainers, or submit a run without them"))
    if ranks == (run.wanted_ranks or run.ranks):
        return []
    if ranks != run.ranks:
        _check_fits(state, run, ranks, fleet, now)
    reason = f"{KEY}: {ranks} is wanted"
    return [ev.RanksWanted(at=now, run=run.id, ranks=ranks, author="user", reason=reason)]


def _check_fits(state: State, run: RunState, ranks: int, fleet: FleetView, now: float) -> None:
    spec = _changed(run, ranks)
    if run.grant is None:
        if problems := check_size(spec, fleet):
            raise _invalid(*problems)
        return
    missing = plan_regroup(state, run.id, ranks, "", now)
    if isinstance(missing, str):
        more = f"; start more with `headrace scale trainer={fleet.instances.get('trainer', 0) + ranks - run.ranks}`"
        raise Refused(
            "CONFLICT", f"{KEY}: {ranks} needs {missing}{more if 'trainer instance' in missing else ''}"
        )


def _changed(run: RunState, ranks: int) -> RunSpec:
    """The spec as if it had been submitted with so many ranks; raises Refused INVALID."""
    algorithm = run.spec["algorithm"]
    prompts: int = algorithm["prompts_per_step"]
    if run.spec.get("deterministic"):
        raise _invalid(problem(KEY, "a deterministic run keeps its ranks", "submit a run with other ones"))
    model = model_ranks(TrainerSection.model_validate(run.spec["trainer"]))
    if ranks % model == 0 and prompts % (ranks // model):
        fitting = ", ".join(str(n * model) for n in range(1, prompts + 1) if prompts % n == 0)
        reason = f"{ranks} ranks cannot share the {prompts} groups of a step evenly"
        raise _invalid(problem(KEY, reason, f"use one of: {fitting}"))
    spec = copy.deepcopy(run.spec)
    spec["trainer"]["ranks"] = ranks
    try:
        return RunSpec.model_validate(spec)
    except ValidationError as error:
        raise _invalid(*explain(error, RunSpec)) from error


def _invalid(*problems: KeyProblemView) -> Refused:
    return Refused("INVALID", f"the run cannot have {KEY} changed like this", list(problems))
