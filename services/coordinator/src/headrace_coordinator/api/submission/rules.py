"""All rules of a submission, in one ordered list; here those of what plug-ins instances have, and take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from headrace_schema.from_json_schema import check_options
from headrace_schema.problems import choose, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules.table import conflicts
from headrace_servicekit.lease.devices import gpu_uuids
from headrace_servicekit.registry import read_capabilities

from headrace_coordinator.api.submission import local_rules
from headrace_coordinator.api.submission.device_rules import devices, instances, published
from headrace_coordinator.api.submission.fleet_view import EXTRAS
from headrace_coordinator.api.submission.submission import Submission
from headrace_coordinator.trackers import tracker_problems

BACKEND_EXTRAS = ("megatron",)
"""Training backends that are an extra of headrace-trainer."""
SIMULATORS = ("metaworld", "maniskill", "libero", "verifiers", "web")
"""Backends of environments that `headrace up --sim` starts from a Python of their own."""
LEARNING = ("trainer.", "algorithm.", "optimizer.")
"""Sections that a run reads only where it trains."""
ON_CPU = ("physx_cpu", "cpu")
"""ManiSkill's simulations without a GPU, by its option `sim_backend`."""
Rule = Callable[[Submission], Iterator[KeyProblemView]]
_VERSION = re.compile(r"-v\d+$")


def names(submission: Submission) -> Iterator[KeyProblemView]:
    """Engines, backends, algorithms and scorers that no instance has."""
    spec, fleet = submission.spec, submission.fleet
    wanted = [
        *([("rollout.engine", submission.engine, "rollout", "engines")] if spec.generates else []),
        ("trainer.backend", spec.trainer.backend, "trainer", "backends"),
        ("algorithm.name", spec.algorithm.name, "trainer", f"{submission.registry}s"),
    ]
    wanted += [
        (f"policies.{name}.algorithm.name", policy.algorithm.name, "trainer", "algorithms")
        for name, policy in spec.policies.items()
        if policy.algorithm is not None
    ]
    if spec.environment:
        key = "agent.backend" if spec.agent is not None and spec.agent.backend else "environment.backend"
        wanted.append((key, spec.environment.backend, "simulator", "backends"))
    for part, scorers in spec.reward.sets().items():
        for index, scorer in enumerate(scorers):
            if ".py:" not in scorer.name:  # A user's own file: the scorer check tries it.
                wanted.append((f"reward.{part}[{index}].name", scorer.name, "reward", "scorers"))
    for key, name, kind, facet in wanted:
        known = fleet.names(kind, facet)
        # A kind without a ready instance is a problem of its own and has no names to compare with.
        if known and name not in known:
            fix = choose(name, known)
            if key == "rollout.engine" and name in EXTRAS:
                fix = f"install headrace-rollout[{name}] where a rollout instance runs and restart that, or set "
                fix += f"rollout.engine: {' or '.join(sorted(known))}"
            if key == "trainer.backend" and name in BACKEND_EXTRAS:
                fix = f"install headrace-trainer[{name}] where the trainers run and restart them; {fix}"
            if kind == "simulator" and name in SIMULATORS:
                fix = (
                    f"start the fleet with headrace up --sim {name} (once: make simulators SIM={name}); {fix}"
                )
            yield problem(key, f"no {kind} instance has {name!r} among its {facet}", fix)


def options(submission: Submission) -> Iterator[KeyProblemView]:
    """Options that do not fit the JSON Schemas that instances register.

    Where there is no schema, the service checks when the run opens.
    """
    spec, fleet = submission.spec, submission.fleet
    chosen = [
        (
            "algorithm.options",
            spec.algorithm.name,
            spec.algorithm.options,
            "trainer",
            f"{submission.registry}_options",
        ),
        (
            "trainer.backend_options",
            spec.trainer.backend,
            spec.trainer.backend_options,
            "trainer",
            "backend_options",
        ),
        (
            "rollout.engine_options",
            submission.engine,
            spec.rollout.engine_options,
            "rollout",
            "engine_options",
        ),
    ]
    for name, policy in spec.policies.items():
        if policy.algorithm is not None:
            key, given = f"policies.{name}.algorithm.options", policy.algorithm.options
            chosen.append((key, policy.algorithm.name, given, "trainer", "algorithm_options"))
    for part, scorers in spec.reward.sets().items():
        for index, scorer in enumerate(scorers):
            key = f"reward.{part}[{index}].options"
            chosen.append((key, scorer.name, scorer.options, "reward", "scorer_options"))
    for key, name, given, kind, facet in chosen:
        # The options must suit one of the schemas.
        found = [check_options(schema, given, key) for schema in fleet.schemas(kind, facet, name)]
        if found and all(found):
            yield from found[0]


def tasks(submission: Submission) -> Iterator[KeyProblemView]:
    """Tasks of a run with environments that no simulator has; none where no simulator lists its tasks.

    A task's name behind the "/" of SUITE/TASK, a version, a user's own file and a name behind a module's are known to
    the backend alone: it says what is wrong with them when the run opens. So are sizes of actions and observations.
    """
    environment = submission.spec.environment
    if environment is None:
        return
    known: set[str] = set()
    for text in submission.fleet.names("simulator", "tasks"):
        known |= {*map(str, read_capabilities([text]).get(environment.backend, ()))}
    for index, task in enumerate(environment.tasks if known else ()):
        name = environment.variant_of(task)[0]
        if ":" in name or _has(name, known):
            continue
        reason = f"no simulator instance has the task {name!r} of {environment.backend}"
        yield problem(f"environment.tasks[{index}]", reason, choose(name, known))


def simulated_on_gpus(submission: Submission) -> Iterator[KeyProblemView]:
    """A simulator that computes on a GPU alone, where no instance of simulators sees one."""
    environment, fleet = submission.spec.environment, submission.fleet
    if environment is None or not fleet.instances.get("simulator") or gpu_uuids(fleet.simulate):
        return
    chosen = environment.options.get("sim_backend")
    if environment.backend == "isaaclab":
        reason = "Isaac Lab simulates on a GPU, and no simulator instance sees one"
        yield problem("environment.backend", reason, "start one with --devices auto on a host with a GPU")
    elif environment.backend == "maniskill" and (chosen or environment.vectorized) and chosen not in ON_CPU:
        key = "environment.options.sim_backend" if chosen else "environment.vectorized"
        reason = (
            "ManiSkill simulates many environments in a process on a GPU, and no simulator instance sees one"
        )
        fix = "start one with --devices auto on a host with a GPU, or set sim_backend: physx_cpu without vectorized"
        yield problem(key, reason, fix)


def _has(name: str, known: set[str]) -> bool:
    suite, _, index = name.partition("/")
    if index.isdecimal() and any(each.startswith(f"{suite}/") for each in known):
        return name in known  # of a suite that is listed by index, such as LIBERO's
    stem = _stem(name)
    return any(_stem(each) == stem for each in known)


def _stem(name: str) -> str:
    return _VERSION.sub("", name.partition("/")[0])


OF_FLEET: tuple[Rule, ...] = (
    names,
    lambda submission: conflicts(submission.resolved),
    options,
    tasks,
    simulated_on_gpus,
    instances,
    devices,
    published,
)
"""What another fleet would satisfy."""
LOCAL: tuple[Rule, ...] = (
    local_rules.models,
    local_rules.engine_model,
    local_rules.data,
    lambda submission: iter(tracker_problems(submission.spec.tracking)),
    local_rules.fork,
    local_rules.answers,
)
"""What no instance mends."""
RULES = (*OF_FLEET, *LOCAL)
WITHOUT_INSTANCES = tuple(rule for rule in RULES if rule not in (simulated_on_gpus, instances, devices))
"""What can be asked where no fleet runs; a facet of which nothing is known is not judged."""


def problems_of(submission: Submission, rules: tuple[Rule, ...] = RULES) -> list[KeyProblemView]:
    """Every problem of a submission, with the nearest valid value; empty when the run could start.

    An evaluation trains nothing and needs no trainer.
    """
    found = [each for rule in rules for each in rule(submission)]
    trains = submission.evaluated is None
    return [each for each in found if trains or not each.key.startswith(LEARNING)]
