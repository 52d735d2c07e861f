"""Mode transfers over the published measurements: stages measured in one mode predict the iteration of another.

Only the planner's public functions compute; this module says which published number goes where. It knows no timing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headrace_planner import (
    Cycle,
    DeviceKind,
    Edge,
    Granularity,
    Leaf,
    Lengths,
    Node,
    Point,
    Profile,
    Share,
    Split,
    Sync,
    Workflow,
    embodied,
    fit,
    predict,
)

DATA = Path(__file__).parent / "data"
MEASUREMENTS = DATA / "published_measurements.json"
ASSUMPTIONS = DATA / "planner_assumptions.json"
GROUP = 16
Values = Mapping[str, float]


@dataclass(frozen=True)
class Setting:
    """What a prediction is made from; see `predict`."""

    tree: Node
    workflow: Workflow
    profiles: list[Profile]
    cluster: Mapping[str, DeviceKind]
    items: float
    sync: Sync = Sync()  # noqa: RUF009


@dataclass(frozen=True)
class Case:
    """One transfer: where its inputs come from, what is predicted from, what was published for it.

    `beside`: the iterations published for other modes of the same work, in seconds, for the ranking.
    `counted`: false where the ranking alone counts, with the reason in `note`.
    """

    name: str
    inputs: str
    measured: float
    setting: Callable[[Values], Setting]
    beside: Mapping[str, float]
    counted: bool = True
    note: str = ""

    def predict(self, values: Values) -> float:
        """Predicted seconds of the iteration."""
        made = self.setting(values)
        return predict(made.tree, made.workflow, made.profiles, made.cluster, made.items, made.sync)

    def error(self, values: Values) -> float:
        """Relative error of the prediction."""
        return self.predict(values) / self.measured - 1

    def rank_right(self, values: Values) -> bool:
        """Whether the predicted mode stands to each other mode as the measured one does."""
        found = self.predict(values)
        return all((found < other) == (self.measured < other) for other in self.beside.values())


def load(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def values_of(assumptions: Mapping[str, Any]) -> dict[str, float]:
    """The one value of each assumption."""
    return {name: entry["value"] for name, entry in assumptions.items() if name != "_about"}


def over_range(case: Case, assumptions: Mapping[str, Any]) -> tuple[float, float, str]:
    """Lowest and highest prediction when one assumption at a time goes to an end of its range, and which moves most."""
    base = values_of(assumptions)
    found = {name: [case.predict({**base, name: end}) for end in assumptions[name]["range"]] for name in base}
    widest = max(found, key=lambda name: max(found[name]) - min(found[name]))
    everything = [value for pair in found.values() for value in pair]
    return min(everything), max(everything), widest


def cases(data: Mapping[str, Any]) -> Iterator[Case]:
    """Every transfer that the file allows: stage seconds of one mode, the iteration of another, equal GPUs and work."""
    yield from _moe(data)
    yield from _ppo(data)
    yield from _maniskill(data)


def tail(data: Mapping[str, Any], values: Values, mean: float, limit: float) -> Lengths:
    """The one published distribution of finish times, as a shape with a case's mean length and limit."""
    shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "max": 1.0}
    published = tuple((share, data["rollout_cdf_7B_64gpu_s"][name]) for name, share in shares.items())
    return _scaled(published, values["group_correlation"], mean, limit)


@cache
def _scaled(
    published: tuple[tuple[float, float], ...], correlation: float, mean: float, limit: float
) -> Lengths:
    shape = Lengths.from_quantiles(dict(published), correlation, GROUP)
    # An answer much longer than any seen is not assumed, however high the limit is.
    return shape.scaled(mean, min(limit, shape.stretch * mean * 1.000001))


def decoding(lengths: Lengths, knee: float) -> Profile:
    """A generator's law: its decode step takes twice as long with `knee` sequences a device as with none."""
    return Profile("generate", fixed_s=knee, item_s=1.0, lengths=lengths)


def learning(values: Values, stage: str = "learn") -> Profile:
    """A trainer's law."""
    return Profile(stage, item_s=1.0, scaling_loss=values["learn_scaling_loss"])


# --- MoE 30B at 32 GPUs: three systems, three modes

MOE_SEQUENCES, MOE_LIMIT, MOE_DEVICES = 1536, 20480, 32


def _moe(data: Mapping[str, Any]) -> Iterator[Case]:
    parts = data["moe_32gpu_latency_s"]
    mode = {"Slime": "disaggregated", "Slime_colocate": "collocated", "RLinf_temporal": "collocated"}
    totals = {name: parts[name]["total"] for name in mode} | {
        "RLinf_spatial": parts["RLinf_spatial"]["train_end"]
    }
    modes = {**mode, "RLinf_spatial": "pipelined"}
    for source in mode:
        for target in modes:
            if modes[source] != modes[target]:
                yield Case(
                    f"MoE 30B at 32: {source} → {target}",
                    "rollout {rollout:g}, train {train:g}, others {others:g}".format(**parts[source]),
                    totals[target],
                    _moe_prediction(data, source, modes[source], modes[target]),
                    {source: totals[source]},
                )


def _moe_prediction(
    data: Mapping[str, Any], source: str, mode: str, target: str
) -> Callable[[Values], Setting]:
    part = data["moe_32gpu_latency_s"][source]
    rates = data["moe_qwen3_30b_a3b_tokens_per_s"]
    mean = (
        rates["RLinf_temporal"]["32"] * data["moe_32gpu_latency_s"]["RLinf_temporal"]["total"] / MOE_SEQUENCES
    )
    edges = (Edge("generate", "learn", Granularity.GROUP),)
    workflow = Workflow("moe", ("generate", "learn"), edges, (("learn", "generate"),), GROUP)
    measured_on = MOE_DEVICES // (1 if mode == "collocated" else 2)

    def setting(values: Values) -> Setting:
        lengths = tail(data, values, mean, MOE_LIMIT)
        law = decoding(lengths, values["decode_knee"] * values["sparse_knee_factor"])
        generate = law.measured_as(part["rollout"], MOE_SEQUENCES, measured_on)
        learn = learning(values).measured_as(part["train"], MOE_SEQUENCES, measured_on)
        tree, sync = _moe_tree(target, part["others"], int(values["chunks"]))
        return Setting(
            tree, workflow, [generate, learn], {"gpu": DeviceKind(MOE_DEVICES)}, MOE_SEQUENCES, sync
        )

    return setting


def _moe_tree(mode: str, others: float, chunks: int) -> tuple[Node, Sync]:
    """The target's tree. A pipeline's published end is its last training chunk, so that `others` is not in it."""
    if mode == "collocated":
        both = Leaf("generate", "gpu", MOE_DEVICES), Leaf("learn", "gpu", MOE_DEVICES)
        return Share(both), Sync(same_s=others)
    half = MOE_DEVICES // 2
    sides = Leaf("generate", "gpu", half), Leaf("learn", "gpu", half)
    return (
        (Split(*sides, chunks=chunks), Sync())
        if mode == "pipelined"
        else (Split(*sides), Sync(between_s=others))
    )


# --- PPO 7B at 32 GPUs: collocated → 4:1:1:1:1

PPO_LIMIT, PPO_DEVICES = 12288, 32


def _ppo(data: Mapping[str, Any]) -> Iterator[Case]:
    parts = data["ppo_7B_32gpu_latency_s"]
    for source in ("temporal", "veRL"):
        yield Case(
            f"PPO 7B at 32: {source} (collocated) → spatial (pipelined)",
            "rollout {rollout:g}, inference {inference:g}, train {train:g}".format(**parts[source]),
            parts["spatial_end_times"]["train"],
            _ppo_prediction(data, source),
            {source: parts[source]["total"]},
        )


def _ppo_prediction(data: Mapping[str, Any], source: str) -> Callable[[Values], Setting]:
    part = data["ppo_7B_32gpu_latency_s"][source]
    tokens = (
        data["ppo_qwen25_tokens_per_s"]["7B"]["temporal"]["32"]
        * data["ppo_7B_32gpu_latency_s"]["temporal"]["total"]
    )
    pairs = [("infer", "infer_critic"), ("learn", "learn_critic")]
    edges = [Edge("generate", name) for name in pairs[0]] + [Edge(a, b) for a in pairs[0] for b in pairs[1]]
    workflow = Workflow("ppo", ("generate", *pairs[0], *pairs[1]), tuple(edges))

    def setting(values: Values) -> Setting:
        items, chunks = values["ppo_sequences"], int(values["chunks"])
        lengths = tail(data, values, tokens / items, PPO_LIMIT)
        profiles = [decoding(lengths, values["decode_knee"]).measured_as(part["rollout"], items, PPO_DEVICES)]
        for stages, name, loss in zip(pairs, ("inference", "train"), ("infer", "learn"), strict=True):
            # Actor and critic have one size and one share each of the published time.
            for stage in stages:
                law = Profile(stage, item_s=1.0, scaling_loss=values[f"{loss}_scaling_loss"])
                profiles.append(law.measured_as(part[name] / 2, items, PPO_DEVICES))
        half = PPO_DEVICES // 8
        sides = [Split(Leaf(actor, "gpu", half), Leaf(critic, "gpu", half)) for actor, critic in pairs]
        tree = Split(Split(Leaf("generate", "gpu", PPO_DEVICES // 2), sides[0], chunks), sides[1], chunks)
        return Setting(tree, workflow, profiles, {"gpu": DeviceKind(PPO_DEVICES)}, items)

    return setting


# --- ManiSkill at 16 GPUs: hybrid, disaggregated, collocated

ENVIRONMENTS, ROBOT_DEVICES = 256, 16


def _maniskill(data: Mapping[str, Any]) -> Iterator[Case]:
    parts = data["maniskill_16gpu_latency_s"]
    totals = {name: part["rollout"] + part["train"] for name, part in parts.items()}
    for source in parts:
        for target in parts:
            if source == target:
                continue
            counted = (source, target) == ("hybrid", "spatial")
            note = "" if counted else "ranking alone: a neighbour's memory is not given"
            yield Case(
                f"ManiSkill at 16: {source} → {target}",
                "rollout {rollout:g}, train {train:g}".format(**parts[source]),
                totals[target],
                _robot_prediction(data, source, target),
                {source: totals[source]},
                counted,
                note,
            )


def _robot_prediction(data: Mapping[str, Any], source: str, target: str) -> Callable[[Values], Setting]:
    part, curves = data["maniskill_16gpu_latency_s"][source], data["component_profile"]
    names = {"generate": "generation_s_by_batch", "simulate": "simulator_s_by_envs"}

    def setting(values: Values) -> Setting:
        laws = [fit(Profile(stage, item_s=1.0), _points(curves[name])) for stage, name in names.items()]
        cluster, workflow = {"gpu": DeviceKind(ROBOT_DEVICES)}, embodied()
        before, after = (_robot_cycle(mode, values) for mode in (source, target))
        # The published rollout is of both stages: their laws' ratio stays, the horizon comes from the measurement.
        alone = Workflow("rollout", ("generate", "simulate"), workflow.edges[:2])
        one_turn = predict(before[0], alone, laws, cluster, ENVIRONMENTS)
        rollout = [
            law.measured_as(law.seconds(ENVIRONMENTS, 1) * part["rollout"] / one_turn, ENVIRONMENTS, 1)
            for law in laws
        ]
        slower = {"temporal": values["neighbour_slowdown"]}
        train = part["train"] * slower.get(target, 1) / slower.get(source, 1)
        learn = learning(values).measured_as(train, ENVIRONMENTS, before[1])
        place = Leaf("learn", "gpu", after[1])
        tree = Split(after[0], place) if target == "spatial" else Share((after[0], place))
        return Setting(tree, workflow, [*rollout, learn], cluster, ENVIRONMENTS)

    return setting


def _points(curve: Mapping[str, float]) -> list[Point]:
    return [Point(int(items), 1, seconds) for items, seconds in curve.items()]


def _robot_cycle(mode: str, values: Values) -> tuple[Cycle, int]:
    """(generate ⇄ simulate in a mode, GPUs that learn)."""
    if mode == "temporal":
        both = Leaf("generate", "gpu", ROBOT_DEVICES), Leaf("simulate", "gpu", ROBOT_DEVICES)
        return Cycle(*both, shared=True), ROBOT_DEVICES
    learn = int(values["maniskill_learn_devices"]) if mode == "spatial" else ROBOT_DEVICES
    half = (ROBOT_DEVICES - learn if mode == "spatial" else ROBOT_DEVICES) // 2
    sides = Leaf("generate", "gpu", half), Leaf("simulate", "gpu", half)
    return Cycle(*sides, batches=int(values["cycle_batches"])), learn
