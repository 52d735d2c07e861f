"""All rules of a submission, in one ordered list; here those of what plug-ins instances have, and take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from headrace_schema.from_json_schema import check_options
from headrace_schema.images import VISION_FAMILIES
from headrace_schema.problems import Impossible, choose, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.generating import drafts
from headrace_schema.spec import RunSpec
from headrace_schema.workflow import REASONING
from headrace_servicekit.lease.devices import gpu_uuids
from headrace_servicekit.registry import read_capabilities

from headrace_coordinator.api.submission import local_rules
from headrace_coordinator.api.submission.approximate import OFF_POLICY, SPECULATIVE, drafted, quantised
from headrace_coordinator.api.submission.device_rules import devices, instances
from headrace_coordinator.api.submission.fleet_view import EXTRAS, model_type
from headrace_coordinator.api.submission.submission import Submission

BACKEND_EXTRAS = ("megatron",)
"""Training backends that are an extra of headrace-trainer."""
SIMULATORS = ("metaworld", "maniskill", "libero")
"""Backends of environments that `headrace up --sim` starts from a Python of their own."""
IN_FLIGHT = "inflight_update"
"""Feature of an engine whose answers go on with another version."""
IMAGES = "images"
"""Feature of an engine that takes images in prompts."""
LORA = "lora"
"""Feature of an engine that computes with adapters beside its model."""
LEARNING = ("trainer.", "algorithm.", "optimizer.")
"""Sections that a run reads only where it trains."""
ON_CPU = ("physx_cpu", "cpu")
"""ManiSkill's simulations without a GPU, by its option `sim_backend`."""
Rule = Callable[[Submission], Iterator[KeyProblemView]]
_VERSION = re.compile(r"-v\d+$")


def engine(submission: Submission) -> Iterator[KeyProblemView]:
    """An engine that no instance can run, and needs of the spec that the engine lacks."""
    spec, fleet, name = submission.spec, submission.fleet, submission.engine
    known = fleet.names("rollout", "engines")
    if not known:  # Without a ready instance there are no names to compare with: a problem of its own.
        return
    if name not in known:
        reason = f"no rollout instance has {name!r} among its engines"
        fix = choose(name, known)
        if name in EXTRAS:
            fix = (
                f"install headrace-rollout[{name}] where a rollout instance runs and restart that, or set "
                f"rollout.engine: {' or '.join(sorted(known))}"
            )
        yield problem("rollout.engine", reason, fix)
    elif spec.deterministic and not fleet.offers(name, "deterministic"):
        fit = [other for other in sorted(known) if fleet.offers(other, "deterministic")]
        yield problem(
            "deterministic",
            f"rollout.engine: {name} cannot sample the same tokens again, since its random numbers follow its batches",
            f"set rollout.engine: {' or '.join(fit)}" if fit else "set deterministic: false",
        )
    elif spec.rollout.enable_lora and not fleet.offers(name, LORA):
        fit = [other for other in sorted(known) if fleet.offers(other, LORA)]
        other = f", or set rollout.engine: {' or '.join(fit)}" if fit else ""
        reason = f"rollout.engine: {name} computes with no adapters beside its model"
        yield problem("rollout.enable_lora", reason, f"leave it out: adapters are merged then{other}")
    elif spec.algorithm.max_staleness and spec.install == "in_flight" and not fleet.offers(name, IN_FLIGHT):
        yield problem(
            "rollout.install",
            f"rollout.engine: {name} installs a version between answers only",
            "set rollout.install: abort_and_resume or drain",
        )


def images(submission: Submission) -> Iterator[KeyProblemView]:
    """Data with images in a run some part of which takes none."""
    spec, data = submission.spec, submission.data
    if data is None or isinstance(data, Impossible) or not data.has_images:
        return
    if spec.workflow != REASONING:
        reason = "the data has images, which prompts of its conversations do not carry"
        fix = f"set workflow: {REASONING}, leave the images out, or let the environment show them"
        yield problem("workflow", reason, fix)
    yield from unseen(submission, "the data has images")


def unseen(submission: Submission, there_are: str) -> Iterator[KeyProblemView]:
    """What reads no images of a run that has some."""
    spec, fleet = submission.spec, submission.fleet
    if spec.rollout.enable_lora:
        reason = f"{there_are}, and a vision tower's rows are not those of prompts"
        yield problem("rollout.enable_lora", reason, "leave it out: adapters are merged then")
    engine, known = submission.engine, fleet.names("rollout", "engines")
    if engine in known and not fleet.offers(engine, IMAGES):
        fit = [other for other in sorted(known) if fleet.offers(other, IMAGES)]
        reason = f"{there_are}, and {engine} takes none here"
        yield problem("rollout.engine", reason, f"set rollout.engine: {' or '.join(fit) or 'transformers'}")
    if drafts(spec.rollout.engine_options):
        reason = f"{there_are}, and prompts with images are not drafted for"
        yield problem(SPECULATIVE, reason, "leave it out")
    if spec.trainer.backend != "fsdp":
        reason = f"{there_are}, and {spec.trainer.backend} trains on text alone"
        yield problem(
            "trainer.backend", reason, "set trainer.backend: fsdp, and leave trainer.backend_options out"
        )
    for key, model in (("model.path", spec.model), ("trainer.reference.path", spec.trainer.reference)):
        kind = model_type(model.path) if model is not None else ""
        if kind and kind not in VISION_FAMILIES:
            reason = f"{there_are}, and {kind} is no family whose images are read"
            yield problem(key, reason, f"name a model of {' or '.join(VISION_FAMILIES)}")


def answers(submission: Submission) -> Iterator[KeyProblemView]:
    """Distributions of an evaluation's answers that its engine would sample otherwise than asked."""
    fleet, engine = submission.fleet, submission.engine
    known = fleet.names("rollout", "engines")
    if submission.evaluated is None or (known and engine not in known):
        return
    asked = submission.evaluated.asked.sampling
    if asked.top_p < 1 and (asked.top_k or asked.min_p) and not fleet.offers(engine, "top_p_after_others"):
        reason = f"rollout.engine: {engine} counts top-p over all tokens, not over those that top_k and min_p leave"
        yield problem("sampling.top_p", reason, "set top_p: 1, or top_k: 0 and min_p: 0")
    if asked.repetition_penalty != 1 and not fleet.offers(engine, "penalty_counts_prompt"):
        reason = f"rollout.engine: {engine} counts no tokens of the prompt for it"
        yield problem("sampling.repetition_penalty", reason, "set 1")


def names(submission: Submission) -> Iterator[KeyProblemView]:
    """Backends, algorithms and scorers that no instance has."""
    spec, fleet = submission.spec, submission.fleet
    wanted = [
        ("trainer.backend", spec.trainer.backend, "trainer", "backends"),
        ("algorithm.name", spec.algorithm.name, "trainer", f"{_registry(spec)}s"),
    ]
    wanted += [
        (f"policies.{name}.algorithm.name", policy.algorithm.name, "trainer", "algorithms")
        for name, policy in spec.policies.items()
        if policy.algorithm is not None
    ]
    if spec.environment:
        wanted.append(("environment.backend", spec.environment.backend, "simulator", "backends"))
    for part, scorers in spec.reward.sets().items():
        for index, scorer in enumerate(scorers):
            if ".py:" not in scorer.name:  # A user's own file: the scorer check tries it.
                wanted.append((f"reward.{part}[{index}].name", scorer.name, "reward", "scorers"))
    for key, name, kind, facet in wanted:
        known = fleet.names(kind, facet)
        # A kind without a ready instance is a problem of its own and has no names to compare with.
        if known and name not in known:
            fix = choose(name, known)
            if key == "trainer.backend" and name in BACKEND_EXTRAS:
                fix = f"install headrace-trainer[{name}] where the trainers run and restart them; {fix}"
            if key == "environment.backend" and name in SIMULATORS:
                fix = (
                    f"start the fleet with headrace up --sim {name} (once: make simulators SIM={name}); {fix}"
                )
            yield problem(key, f"no {kind} instance has {name!r} among its {facet}", fix)


def _registry(spec: RunSpec) -> str:
    """Which of a trainer's registries the algorithm is in."""
    return "episode_algorithm" if spec.workflow == "embodied" else "algorithm"


def staleness(submission: Submission) -> Iterator[KeyProblemView]:
    """An algorithm that is right on policy only, in a run whose samples may be of older versions.

    Trainers of a release that registers no features check it when the run opens.
    """
    spec, fleet, registry = submission.spec, submission.fleet, _registry(submission.spec)
    listed, known = fleet.names("trainer", f"{registry}_features"), fleet.names("trainer", f"{registry}s")
    if not spec.algorithm.max_staleness or not listed:
        return
    for key, algorithm in spec.algorithms.items():
        if algorithm.name in known and f"{algorithm.name}:{OFF_POLICY}" not in listed:
            fit = sorted(each.partition(":")[0] for each in listed if each.endswith(f":{OFF_POLICY}"))
            yield problem(
                "algorithm.max_staleness",
                f"{algorithm.name} is right on samples of the newest version only",
                f"set it to 0, or {key}.name to one of {', '.join(fit)}",
            )


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
            f"{_registry(spec)}_options",
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
        # Instances of two releases may register two schemas: the options must suit one of them.
        schemas = [
            read_capabilities([text]).get(name)
            for text in sorted(fleet.names(kind, facet))
            if text.startswith(f"{name}=")
        ]
        found = [check_options(schema, given, key) for schema in schemas if schema is not None]
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
    engine,
    images,
    answers,
    names,
    staleness,
    options,
    tasks,
    simulated_on_gpus,
    instances,
    devices,
)
"""What another fleet would satisfy."""
LOCAL: tuple[Rule, ...] = (
    local_rules.models,
    local_rules.engine_heads,
    quantised,
    drafted,
    local_rules.data,
    local_rules.trackers,
    local_rules.fork,
    local_rules.suite_limit,
    local_rules.heldout_answers,
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
