"""What the fleet as it is cannot satisfy of a spec: checked at submission, so that nothing starts in vain.

Pure but for two reads: a local model directory, and the data source (cached).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace_schema.from_json_schema import check_options
from headrace_schema.problems import Impossible, choose, nearest, problem
from headrace_schema.resources.views import DeviceView, InstanceView, KeyProblemView
from headrace_schema.rules import acting
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.running import APART, SIDES
from headrace_schema.spec import RunSpec
from headrace_servicekit.registry import read_capabilities

from headrace_coordinator.api.submission.engines import engine_problems
from headrace_coordinator.api.submission.tasks import task_problems
from headrace_coordinator.data import Dataset
from headrace_coordinator.domain.devices.places import named_devices
from headrace_coordinator.trackers import tracker_problems

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
LEARNING = ("trainer.", "algorithm.", "optimizer.")
"""Sections that a run reads only where it trains."""
BACKEND_EXTRAS = ("megatron",)
"""Training backends that are an extra of headrace-trainer."""
WEIGHT_SUFFIXES = (".safetensors", ".gguf")


@dataclass(frozen=True)
class FleetView:
    """What there is to run on. Capabilities by kind and facet: trainer → algorithms → {grpo, …}."""

    capabilities: Mapping[str, Mapping[str, frozenset[str]]]
    instances: Mapping[str, int]
    devices: Sequence[str]
    hosts: Mapping[str, set[str]] = field(default_factory=dict)
    """Device → hosts of the instances that see it."""
    simulate: Collection[str] = ()
    """Devices that simulators see."""

    @classmethod
    def of(cls, instances: Iterable[InstanceView], devices: Iterable[DeviceView] | None = None) -> FleetView:
        """The union over ready instances; devices but QUARANTINED ones (none given: the instances' own)."""
        capabilities: dict[str, dict[str, frozenset[str]]] = {}
        counts: dict[str, int] = {}
        own: dict[str, None] = {}
        hosts: dict[str, set[str]] = defaultdict(set)
        simulate: set[str] = set()
        for instance in instances:
            if instance.state not in ("READY", "SILENT"):
                continue
            own |= dict.fromkeys(instance.devices)
            for name in instance.devices:
                hosts[name].add(instance.host)
            if instance.kind == "simulator":
                simulate |= {*instance.devices}
            counts[instance.kind] = counts.get(instance.kind, 0) + 1
            facets = capabilities.setdefault(instance.kind, {})
            for facet, names in instance.capabilities.items():
                facets[facet] = facets.get(facet, frozenset()) | set(names)
        if devices is None:
            return cls(capabilities, counts, list(own), hosts, simulate)
        usable = [device.name for device in devices if device.state != "QUARANTINED"]
        return cls(capabilities, counts, usable, hosts, simulate)

    def names(self, kind: str, facet: str) -> frozenset[str]:
        """Capabilities of one kind and facet."""
        return self.capabilities.get(kind, {}).get(facet, frozenset())


def check(spec: RunSpec, fleet: FleetView, *, trains: bool = True) -> list[KeyProblemView]:
    """Every problem of a spec on this fleet, with the nearest valid value; empty when the run could start.

    A run that does not train needs no trainer.
    """
    found = [
        *engine_problems(spec, fleet),
        *_names(spec, fleet),
        *_options(spec, fleet),
        *task_problems(spec, fleet.names("simulator", "tasks")),
        *check_size(spec, fleet),
        *check_alone(spec),
    ]
    return _asked_for(found, trains)


def check_size(spec: RunSpec, fleet: FleetView) -> list[KeyProblemView]:
    """Those problems that are about numbers of instances and devices."""
    return [*_instances(spec, fleet), *_devices(spec, fleet)]


def check_alone(spec: RunSpec, *, trains: bool = True) -> list[KeyProblemView]:
    """Those problems that no instance mends: of the spec's models, its data and its trackers."""
    found = [
        *_model(spec.model, "model"),
        *(_model(spec.trainer.reference, "trainer.reference") if spec.trainer.reference else ()),
        *_data(spec),
        *tracker_problems(spec.tracking),
    ]
    return _asked_for(found, trains)


def _asked_for(found: list[KeyProblemView], trains: bool) -> list[KeyProblemView]:
    return [each for each in found if trains or not each.key.startswith(LEARNING)]


def _names(spec: RunSpec, fleet: FleetView) -> Iterator[KeyProblemView]:
    wanted = [
        ("trainer.backend", spec.trainer.backend, "trainer", "backends"),
        ("algorithm.name", spec.algorithm.name, "trainer", f"{_registry(spec)}s"),
    ]
    if spec.environment:
        wanted.append(("environment.backend", spec.environment.backend, "simulator", "backends"))
    for part, scorers in spec.reward.sets().items():
        for index, scorer in enumerate(scorers):
            if ".py:" not in scorer.name:  # A user's own file is tried by the reward service.
                wanted.append((f"reward.{part}[{index}].name", scorer.name, "reward", "scorers"))
    for key, name, kind, facet in wanted:
        known = fleet.names(kind, facet)
        # A kind without a ready instance is a problem of its own and has no names to compare with.
        if known and name not in known:
            fix = choose(name, known)
            if key == "trainer.backend" and name in BACKEND_EXTRAS:
                fix = f"install headrace-trainer[{name}] where the trainers run and restart them; {fix}"
            yield problem(key, f"no {kind} instance has {name!r} among its {facet}", fix)


def _registry(spec: RunSpec) -> str:
    """Which of a trainer's registries the algorithm is in."""
    return "episode_algorithm" if spec.environment else "algorithm"


def _options(spec: RunSpec, fleet: FleetView) -> Iterator[KeyProblemView]:
    """By the JSON Schemas that instances register; where there is none, the service checks when the run opens."""
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
            spec.rollout.engine,
            spec.rollout.engine_options,
            "rollout",
            "engine_options",
        ),
    ]
    for part, scorers in spec.reward.sets().items():
        for index, scorer in enumerate(scorers):
            key = f"reward.{part}[{index}].options"
            chosen.append((key, scorer.name, scorer.options, "reward", "scorer_options"))
    for key, name, options, kind, facet in chosen:
        # Instances of two releases may register two schemas: the options must suit one of them.
        schemas = [
            read_capabilities([text]).get(name)
            for text in sorted(fleet.names(kind, facet))
            if text.startswith(f"{name}=")
        ]
        found = [check_options(schema, options, key) for schema in schemas if schema is not None]
        if found and all(found):
            yield from found[0]


def _instances(spec: RunSpec, fleet: FleetView) -> Iterator[KeyProblemView]:
    reply = spec.reply.instances if spec.reply and spec.placement.reply else 0
    wanted = [
        ("rollout.instances", "rollout", spec.rollout.instances),
        *([("reply.instances", "rollout", spec.rollout.instances + reply)] if reply else []),
        ("trainer.ranks", "trainer", spec.trainer.ranks),
        ("reward.scorers", "reward", 1),
        *([("environment", "simulator", 1)] if spec.environment else []),
    ]
    for key, kind, count in wanted:
        ready = fleet.instances.get(kind, 0)
        if count <= ready:
            continue
        more = f"start more with `headrace scale {kind}={count}` (containers: `docker compose up -d --scale`)"
        reason = f"{count} {kind} instances are wanted and {ready} are ready"
        if key == "reply.instances":
            if spec.rollout.instances > ready:
                continue  # Said of rollout.instances.
            reason = f"{count} rollout instances are wanted, {reply} of them to reply, and {ready} are ready"
            yield problem(key, reason, f"{more}, or remove placement.reply: each rollout then replies itself")
            continue
        yield problem(key, reason, f"the nearest valid value is {ready}; or {more}" if ready else more)


def _devices(spec: RunSpec, fleet: FleetView) -> Iterator[KeyProblemView]:
    placement = spec.placement
    shown = {device.rpartition("/")[2] for device in fleet.devices}
    meant: dict[str, list[str]] = {}
    for key in SIDES:
        names: list[str] = getattr(placement, key)
        meant[key] = named_devices(names, fleet.devices, fleet.hosts)
        for index, name in enumerate(names):
            if not named_devices([name], fleet.devices, fleet.hosts):
                fix = choose(
                    name, shown, extra="" if shown else "wait until an instance has registered devices"
                )
                yield problem(f"placement.{key}[{index}]", f"there is no device {name!r}", fix)
    apart = placement.mode in APART
    if apart and (both := sorted({*meant["rollout"]} & {*meant["trainer"]})):
        yield problem(
            "placement.trainer",
            f"{', '.join(both)} generates too; {placement.mode} placement needs disjoint devices",
            "name other devices, or set placement.mode: collocated",
        )
        return
    if any(name.startswith("gpu:") for name in shown):
        yield from _on_gpus(spec)
    if placement.simulator:
        yield from _simulators(spec, fleet, meant)
        return
    if placement.reply:
        yield from _repliers(spec, meant)
        return
    generate = max(len(meant["rollout"]), spec.rollout.instances)
    learn = max(len(meant["trainer"]), spec.trainer.ranks)
    needed, there = generate + learn if apart else max(generate, learn), len(fleet.devices)
    if needed > there:
        parts = f"{generate} to generate {'and' if apart else 'in turns with'} {learn} to learn"
        yield problem(
            "placement.mode",
            f"{placement.mode} placement needs {needed} devices ({parts}) and there are {there}",
            _fitting(spec.rollout.instances, spec.trainer.ranks, there, apart=apart),
        )


def _repliers(spec: RunSpec, meant: Mapping[str, Sequence[str]]) -> Iterator[KeyProblemView]:
    replies, mode = meant["reply"], spec.placement.mode
    if both := sorted({*replies} & {*meant["rollout"]}):
        yield acting.overlaps_rollout(both)
    if mode in APART and (both := sorted({*replies} & {*meant["trainer"]})):
        yield acting.overlaps_trainer(acting.REPLY, both, mode)
    if spec.reply is not None and replies and len(replies) < spec.reply.instances:
        yield acting.too_few_to_reply(len(replies), spec.reply.instances)


def _simulators(
    spec: RunSpec, fleet: FleetView, meant: Mapping[str, Sequence[str]]
) -> Iterator[KeyProblemView]:
    there = [device for device in fleet.devices if device in fleet.simulate]
    simulates = named_devices(spec.placement.simulator, there, fleet.hosts)
    both_sides = {*meant["rollout"], *simulates}
    for index, name in enumerate(spec.placement.simulator):
        if named_devices([name], fleet.devices, fleet.hosts) and not named_devices(
            [name], there, fleet.hosts
        ):
            fix = "name a device that one sees, or start simulators with --devices auto"
            yield problem(f"placement.simulator[{index}]", f"no simulator instance sees {name!r}", fix)
    if spec.placement.mode in APART and (both := sorted({*simulates} & {*meant["trainer"]})):
        yield acting.overlaps_trainer(acting.SIMULATOR, both, spec.placement.mode)
    if simulates and len(both_sides) <= spec.rollout.instances:
        yield acting.too_few_to_simulate(len(both_sides), spec.rollout.instances)


def _on_gpus(spec: RunSpec) -> Iterator[KeyProblemView]:
    placement = spec.placement
    if placement.mode == "hybrid":
        yield problem(
            "placement.mode",
            "hybrid gives one rank several devices, and on GPUs a rank computes on one",
            "set placement.mode: disaggregated, or collocated with trainer.helpers",
        )
    elif placement.memory == "resident" and placement.mode in ("collocated", "auto"):
        reason = "an engine takes the memory that it finds on a GPU, and leaves a trainer no room beside it"
        yield problem("placement.memory", reason, "set placement.memory: offloaded")


def _fitting(rollouts: int, ranks: int, devices: int, *, apart: bool) -> str:
    """What of a run would fit on so many devices."""
    ways = []
    if apart and max(rollouts, ranks) <= devices:
        ways.append("set placement.mode: collocated")
    most = max(1, devices - ranks if apart else devices)
    fewer = [f"rollout.instances: {min(rollouts, most)}"] if rollouts > most else []
    left = max(1, devices - min(rollouts, most) if apart else devices)
    fewer += [f"trainer.ranks: {left}"] if ranks > left else []
    enough = devices >= 2 if apart else devices >= 1
    if fewer and enough:
        ways.append(f"take {', '.join(fewer)}")
    return ", or ".join(ways) or "start the fleet with more devices (`headrace up --devices`)"


def _model(model: ModelSection, section: str) -> Iterator[KeyProblemView]:
    if model.policy is not None:
        return  # A new robot policy: the services that build it say what is wrong with it.
    given, file = model.path, model.gguf_file
    path = Path(given).expanduser()
    try:
        local = given.startswith(("./", "../", "/", "~")) or path.exists()
        if not local:
            if not HUB_ID.fullmatch(given):
                reason = f"{given!r} is neither a local directory nor a Hugging Face id (owner/name)"
                yield problem(f"{section}.path", reason, "write ./DIRECTORY, /DIRECTORY or owner/name")
        elif not path.is_dir():
            what = "is a file, not a directory" if path.exists() else "does not exist"
            yield problem(f"{section}.path", f"{given} {what}", _neighbour(path))
        elif file is not None:
            if not (path / file).is_file():
                files = [entry.name for entry in path.glob("*.gguf")]
                yield problem(f"{section}.gguf_file", f"{given} holds no file {file}", choose(file, files))
        elif not _holds_a_model(path):
            yield _incomplete(path, given, section)
    except (OSError, ValueError) as error:
        yield problem(f"{section}.path", f"{given!r} cannot be read: {error}", "name a readable directory")


def _holds_a_model(path: Path) -> bool:
    if (path / "policy.json").is_file():
        return (path / "model.safetensors").is_file()
    return (path / "config.json").is_file() and any(
        entry.suffix in WEIGHT_SUFFIXES or entry.name.endswith(".safetensors.index.json")
        for entry in path.iterdir()
    )


def _incomplete(path: Path, given: str, section: str) -> KeyProblemView:
    gguf = sorted(entry.name for entry in path.glob("*.gguf"))
    if gguf:
        return problem(
            f"{section}.gguf_file", f"{given} holds GGUF weights", f"set {section}.gguf_file: {gguf[0]}"
        )
    missing = "safetensors weights" if (path / "config.json").is_file() else "config.json"
    reason = f"{given} is no model directory: it has no {missing}"
    inside = sorted(entry.parent.name for entry in path.glob("*/config.json"))
    fix = f"did you mean {path / inside[0]}?" if inside else "name a directory in Hugging Face format"
    return problem(f"{section}.path", reason, fix)


def _neighbour(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    close = nearest(path.name, names) if folder == path.parent else None
    if close:
        return f"did you mean {folder / close}?"
    return f"name a directory that the coordinator's host has; the nearest that exists is {folder}"


def _data(spec: RunSpec) -> Iterator[KeyProblemView]:
    try:
        data = Dataset.open(spec.data, spec.seed)
        if spec.evaluation.baseline_prefill is not None:
            data.check_template(spec.evaluation.baseline_prefill, "evaluation.baseline_prefill")
    except Impossible as error:
        yield from error.problems
        return
    answers = spec.workflow != "embodied" and spec.trainer.warmup.steps
    if answers and (unanswered := data.unanswered()):
        reason = f"{unanswered} of {data.train_size} training items have no answer to learn from"
        yield problem(
            "trainer.warmup.steps", reason, "give every item an answer, or set trainer.warmup.steps: 0"
        )
