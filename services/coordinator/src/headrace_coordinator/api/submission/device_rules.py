"""Whether the fleet has the instances and the devices that a spec asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from headrace_schema.gpu_defaults import (
    GIB,
    SPAN,
    SPANNING,
    engine_weights,
    fitting_spans,
    frozen_bytes,
    room,
)
from headrace_schema.learner_size import published_bytes
from headrace_schema.model_size import model_size, text_config
from headrace_schema.problems import choose, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules import acting
from headrace_schema.sections.generating import HOSTS, engine_gpus, engine_hosts
from headrace_schema.sections.running import SIDES
from headrace_schema.spec import RunSpec

from headrace_coordinator.api.submission.fleet_view import FleetView, gpus_of
from headrace_coordinator.api.submission.submission import Submission
from headrace_coordinator.domain.devices.demand import devices_each
from headrace_coordinator.domain.devices.placement import Placement, placement_of
from headrace_coordinator.domain.devices.places import named_devices


def instances(submission: Submission) -> Iterator[KeyProblemView]:
    """Numbers of instances that are not ready."""
    spec, fleet = submission.spec, submission.fleet
    wanted = [
        ("rollout.instances", "rollout", spec.rollout.instances if spec.generates else 0),
        ("trainer.ranks", "trainer", spec.trainer.ranks),
        ("reward.scorers", "reward", 1 if spec.is_scored else 0),
        *([("environment", "simulator", 1)] if spec.environment else []),
    ]
    for key, kind, count in wanted:
        ready = fleet.instances.get(kind, 0)
        spread = len(fleet.rollout_hosts)
        if kind == "rollout" and (over := engine_hosts(spec.rollout.engine_options)) > max(spread, 1):
            reason = f"an engine over {over} hosts is wanted, and rollout instances are ready on {spread}"
            fix = f"set {spread}, or start rollouts on more (`headrace join`)"
            yield problem(HOSTS, reason, fix)
            continue
        if count <= ready:
            continue
        more = f"start more with `headrace scale {kind}={count}` (containers: `docker compose up -d --scale`)"
        reason = f"{count} {kind} instances are wanted and {ready} are ready"
        yield problem(key, reason, f"the nearest valid value is {ready}; or {more}" if ready else more)


def devices(submission: Submission) -> Iterator[KeyProblemView]:
    """Named devices that do not exist, sides that overlap, and numbers of devices that are not there."""
    spec, fleet = submission.settled, submission.fleet
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
    ahead, gpus = spec.algorithm.max_staleness > 0, any(name.startswith("gpu:") for name in shown)
    resolved = placement_of(placement, ahead=ahead, gpus=gpus)
    apart = resolved.apart and not resolved.spans
    if apart and (both := sorted({*meant["rollout"]} & {*meant["trainer"]})):
        yield problem(
            "placement.trainer",
            f"{', '.join(both)} generates too; {placement.mode} placement needs disjoint devices",
            "name other devices, or set placement.mode: collocated",
        )
        return
    each = devices_each(spec, fleet.devices)
    if gpus:
        yield from _on_gpus(spec, resolved, meant)
        yield from _weights(spec, fleet)
    if each > 1 and (wrong := list(_engines(spec, fleet, meant, each))):
        yield from wrong
        return
    if placement.reward or placement.simulator:
        yield from _beside(spec, fleet, meant, apart=apart)
    if placement.reward or (placement.simulator and placement.joint is None):
        return
    generate = max(len(meant["rollout"]), spec.rollout.instances * each)
    learn = max(len(meant["trainer"]), spec.trainer.ranks)
    needed, there = generate + learn if apart else max(generate, learn), len(fleet.devices)
    if needed > there:
        parts = f"{generate} to generate {'and' if apart else 'in turns with'} {learn} to learn"
        yield problem(
            "placement.mode",
            f"{placement.mode} placement needs {needed} devices ({parts}) and there are {there}",
            _fitting(
                spec.rollout.instances * each, spec.trainer.ranks, there, apart=apart, each=each, ahead=ahead
            ),
        )


def _engines(
    spec: RunSpec, fleet: FleetView, meant: Mapping[str, Sequence[str]], each: int
) -> Iterator[KeyProblemView]:
    """Problems of rollout instances that need more devices than the fleet can give (engines over GPUs, own devices)."""
    key, fewer = SPAN, f"use a smaller {SPAN}"
    if spec.engines > 1:
        key = next(_own_devices(spec))
        fewer = f"set {key}: false"
    most = max(fleet.rollouts_see, default=len(fleet.devices))
    if each > most:
        reason = f"{each} devices are wanted for a rollout instance, and one sees {most} at most"
        more = "let one see more (CUDA_VISIBLE_DEVICES, --gpus, --devices)"
        if spec.engines > 1:
            yield problem(key, reason, f"{fewer}; or {more}")
        else:
            yield problem(SPAN, reason, _smaller(spec, fleet, each, most, more))
        return
    instances, named = spec.rollout.instances, meant["rollout"]
    if named and len(named) < instances * each:
        reason = f"{instances} rollout instances of {each} devices need {instances * each}, and {len(named)} are named"
        yield problem("placement.rollout", reason, f"name more devices, or {fewer}")
    if spec.rollout.helpers:
        reason = f"a helper decodes on a rank's one GPU, and the engine spans {each}"
        yield problem("rollout.helpers", reason, f"set rollout.helpers: 0, or leave {SPAN} out")


def _smaller(spec: RunSpec, fleet: FleetView, each: int, most: int, more: str) -> str:
    """What to set where an instance sees `most` of the `each` devices that it is to hold."""
    hosts = engine_hosts(spec.rollout.engine_options)
    ways = [f"the nearest valid value is {most * hosts}"] if most else []
    wider = [n for n in range(hosts + 1, len(fleet.rollout_hosts) + 1) if most * n >= each * hosts]
    fitting = [n for n in wider if each * hosts % n == 0]
    if fitting and spec.rollout.engine == "vllm":
        ways.append(f"set {HOSTS}: {fitting[0]} and rollout.instances: {fitting[0]}")
    return "; or ".join([*ways, more])


def _own_devices(spec: RunSpec) -> Iterator[str]:
    """Keys that give a model devices of its own in each rollout instance."""
    roles = spec.environment.roles if spec.environment else {}
    yield from (f"environment.roles.{name}.own_devices" for name, role in roles.items() if role.own_devices)
    yield from (f"policies.{name}.own_devices" for name, each in spec.policies.items() if each.own_devices)


def _weights(spec: RunSpec, fleet: FleetView) -> Iterator[KeyProblemView]:
    """An engine whose weights alone, or with frozen models beside it, are more than it takes of its GPUs."""
    size, gpus, options = (
        model_size(text_config(spec.model)),
        gpus_of(spec, fleet),
        spec.rollout.engine_options,
    )
    engine, each = spec.rollout.engine, engine_gpus(options)
    if size is None or not gpus.memory_bytes:
        return
    weights, taken = size.weight_bytes(options.get("quantization")), room(engine, options, gpus)
    frozen = frozen_bytes(spec, options)
    if frozen and weights <= each * taken < (all_ := engine_weights(spec, options, size)[0]):
        key, largest = max(frozen.items(), key=lambda item: item[1])
        reason = f"this model's {largest / GIB:.1f} GiB are on the policy's devices too: weights of "
        reason += f"{all_ / GIB:.1f} GiB in all on {each} x {taken / GIB:.1f} GiB"
        ways = "own_devices: true beside it, " if key.startswith("environment.") else ""
        yield problem(
            key, reason, f"take a smaller model, {ways}GPUs with more memory, or more of them ({SPAN})"
        )
    if weights <= each * taken or engine not in SPANNING:
        return
    reason = f"weights of {weights / GIB:.1f} GiB are wanted on {each} GPU{'s' if each > 1 else ''}, of each of which "
    reason += f"the engine takes {taken / GIB:.1f} of {gpus.memory_bytes / GIB:.0f} GiB"
    fitting = [span for span in fitting_spans(engine, options, size, gpus) if span > 1]
    fix = (
        f"set one of {', '.join(map(str, fitting))}"
        if fitting
        else "take GPUs with more memory, or a smaller model"
    )
    yield problem(SPAN, reason, fix)


def published(submission: Submission) -> Iterator[KeyProblemView]:
    """Versions of the weights for which a host that publishes or takes them has no room."""
    spec, fleet = submission.spec, submission.fleet
    size = model_size(text_config(spec.model))
    if size is None or spec.trains_robots or submission.evaluated is not None:
        return
    if not spec.generates and not spec.trainer.helpers:  # nobody takes them, and none is kept
        return
    needed = published_bytes(spec, size)
    for kind in ("trainer", "rollout"):
        parts = spec.trainer.ranks if kind == "trainer" and spec.weights.publish == "ranks" else 1
        on_host = max(Counter(host for hosts in fleet.hosts.values() for host in hosts).values(), default=1)
        own = needed * min(on_host, parts) // parts
        there = fleet.weights_bytes.get(kind, own)
        if own > there:
            reason = f"a {kind}'s host keeps versions of its weights of {own / GIB:.1f} GiB in all, and the smallest "
            reason += f"of these file systems holds {there / GIB:.1f}"
            fix = "enlarge it (HEADRACE_WEIGHTS_SIZE of compose, modelGiB of the chart, or --shm-dir on a larger tmpfs)"
            yield problem(
                "model.path", reason, fix if parts > 1 else f"{fix}, or train adapters (trainer.lora)"
            )


def _beside(
    spec: RunSpec, fleet: FleetView, meant: Mapping[str, Sequence[str]], *, apart: bool
) -> Iterator[KeyProblemView]:
    """Problems of the devices of simulators and of scorers: who sees them, and who would have them at the same time."""
    placement = spec.placement
    for key, side, sees in (
        (acting.SIMULATOR, "simulator", fleet.simulate),
        (acting.REWARD, "reward", fleet.score),
    ):
        there = [device for device in fleet.devices if device in sees]
        names: list[str] = getattr(placement, side)
        for index, name in enumerate(names):
            known = named_devices([name], fleet.devices, fleet.hosts)
            if known and not named_devices([name], there, fleet.hosts):
                fix = f"name a device that one sees, or start {side} instances with --devices auto"
                yield problem(f"{key}[{index}]", f"no {side} instance sees {name!r}", fix)
        both = {*named_devices(names, there, fleet.hosts)} & {*meant["trainer"]}
        if apart and both:
            yield acting.overlaps_trainer(key, sorted(both), placement.mode)
    simulates = {*meant["simulator"]} & {*fleet.simulate}
    act = {*meant["rollout"], *simulates}
    if placement.joint is None and simulates and len(act) <= spec.rollout.instances:
        yield acting.too_few_to_simulate(len(act), spec.rollout.instances)
    for side in ("rollout", "simulator"):
        if both := {*meant["reward"]} & {*meant[side]}:
            yield acting.scores_beside(sorted(both), side)


def _on_gpus(
    spec: RunSpec, placement: Placement, meant: Mapping[str, Sequence[str]]
) -> Iterator[KeyProblemView]:
    if not placement.spans:
        return
    fix = "or placement.mode: disaggregated, with trainer.helpers on the rollouts' GPUs"
    if spec.algorithm.max_staleness:
        reason = "on GPUs the ranks of a hybrid placement sleep while answers are made"
        yield problem("algorithm.max_staleness", reason, f"set 0, {fix}")
    others = {device for side in ("rollout", "simulator", "reward") for device in meant[side]}
    if meant["trainer"] and spec.trainer.ranks <= len({*meant["trainer"]} - others):
        reason = "on GPUs a rank computes on one, and these ranks have as many that nobody else has"
        most = len({*meant["trainer"]} | others)
        yield problem("trainer.ranks", reason, f"set one for each GPU ({most}), {fix}")


def _fitting(
    rollouts: int, ranks: int, devices: int, *, apart: bool, each: int = 1, ahead: bool = False
) -> str:
    """What of a run would fit on `devices`; `rollouts`: the devices of its engines, `each` of one.

    `ahead`: it has `max_staleness` above 0, which turns have not.
    """
    ways = []
    if apart and max(rollouts, ranks) <= devices:
        strict = "algorithm.max_staleness: 0 and " if ahead else ""
        ways.append(f"set {strict}placement.mode: collocated")
    most = max(1, devices - ranks if apart else devices)
    fewer = [f"rollout.instances: {max(1, most // each)}"] if rollouts > most >= each else []
    left = max(1, devices - min(rollouts, most) if apart else devices)
    fewer += [f"trainer.ranks: {left}"] if ranks > left else []
    enough = devices >= 2 if apart else devices >= 1
    if fewer and enough:
        ways.append(f"take {', '.join(fewer)}")
    return ", or ".join(ways) or "start the fleet with more devices (`headrace up --devices`)"


def size_problems(spec: RunSpec, fleet: FleetView) -> list[KeyProblemView]:
    """Problems of the numbers of instances and devices alone."""
    submission = Submission(spec, fleet)
    return [*instances(submission), *devices(submission)]
