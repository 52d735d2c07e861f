"""Seeded run specs: every kind of run that the simulated fleet can serve."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.spec import RunSpec

from headrace_simulation.regroupers import regroups

SHARED = 1
"""Seeds with this rest by 8 have runs that share their devices: as with STAGED, none that once found a bug."""
STAGED = 3
"""Seeds with this rest by 8 have two reward stages: none that once found a bug has it, which it would not again."""
BESIDE = 13
"""Seeds with this rest by 16 move devices beside a trainer group that has some of its own: none found a bug before."""
KEPT = 7
"""Seeds with this rest by 16 have runs whose sides stay loaded while they take turns: none found a bug before."""
AHEAD = (9, 11)
"""Seeds with one of these rests by 16 have runs with answers of older versions: none found a bug before."""
ON_GPUS = 19
"""Seeds with this rest by 32 have hosts with GPUs, and runs whose ranks are on the rollouts' too: none found a bug."""
UNREADABLE = "unreadable"
ROBOTS = 0.15
"""Share of runs with a robot policy."""
LEASED = 5
"""Seeds with this rest by 8 have simulators that hold leases, where a run has a robot policy."""
DEVICES_A_HOST = 6
"""Enough for the largest spec side by side: three rollouts and three trainers."""
MIDDLE = {"min_pass_rate": 0.2, "max_pass_rate": 0.8}
REFILLS: list[dict[str, int | bool]] = [
    *[{}] * 3,
    *({"drop_equal": True, "max_refill": most} for most in (0, 1, 3)),
    {"max_refill": 1},
]
"""Options of the simulated algorithm, which are what its trainer answers."""


def random_spec(rng: random.Random, seed: int, name: str = "simulated") -> RunSpec:
    """A spec that some fleet of at most three instances of a kind can run."""
    ranks = rng.choice([1, 1, 1, 2, 2, 3])
    return RunSpec.model_validate(
        _with_helpers(
            seed,
            {
                "name": name,
                "steps": rng.randint(3, 7),
                "seed": seed,
                "deterministic": rng.random() < 0.2,
                "export": rng.random() < 0.5,
                "model": {"path": "simulated"},
                "data": {
                    "source": "copy_digits",
                    "options": {"digits": 1},
                    "heldout": 2,
                    "curriculum": random.Random(f"{seed}/curriculum").choice([None, None, MIDDLE]),
                },
                "algorithm": {
                    "group_size": rng.randint(2, 4),
                    "prompts_per_step": ranks * rng.choice([1, 2]) if ranks > 1 else rng.choice([2, 4]),
                    "options": {
                        **random.Random(f"{seed}/refill").choice(REFILLS),
                        "greedy_first": random.Random(f"{seed}/greedy").random() < 0.2,
                    },
                },
                "rollout": {"instances": rng.choice([1, 1, 2, 3])},
                "trainer": {"ranks": ranks},
                **_stages(seed),
                "placement": _placement(rng.choice(["collocated", "disaggregated"]), ranks, seed, name),
                "checkpoint": {
                    "enabled": rng.random() < 0.8,
                    "interval_steps": rng.randint(1, 3),
                    "keep": rng.choice([1, 3]),
                },
                "evaluation": {"every": rng.choice([0, 2])},
                "scheduling": {
                    "priority": rng.choice([0, 0, 0, 1, 5]),
                    "weight": rng.choice([0.5, 1.0, 1.0, 2.0]),
                    "quantum_s": rng.choice([0.5, *[rng.uniform(5.0, 30.0)] * 3]),
                },
                "limits": {
                    "max_drop_rate": 0.9,
                    "recoveries": rng.choice([2, *[50] * 15]),
                    "in_flight_bytes": rng.choice([200, 10**7]),
                },
            },
        )
    )


def _with_helpers(seed: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Some helpers for a run that may have any."""
    if seed % 16 == BESIDE:
        return _with_both(seed, fields)
    instances: int = fields["rollout"]["instances"]
    placement = fields["placement"]
    shared = placement.get("share", False)
    if instances > 1 and placement["mode"] == "collocated" and not fields["deterministic"] and not shared:
        helpers = random.Random(f"{seed}/helpers").choice([0, 1, instances - 1])
        fields["trainer"]["helpers"] = helpers
    return fields


def _with_both(seed: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Helpers on the rollouts' devices, and on the trainer group's own."""
    own, ranks = random.Random(f"{seed}/beside"), fields["trainer"]["ranks"]
    fields["deterministic"], fields["placement"]["mode"] = False, "disaggregated"
    fields["trainer"] |= {"helpers": own.choice([0, 1, 1]), "micro_batch_tokens": own.choice([8, 16])}
    instances = max(fields["rollout"]["instances"], 1 + fields["trainer"]["helpers"])
    fields["rollout"] = {"instances": instances, "helpers": own.choice([0, 1, ranks])}
    return fields


def robots(spec: RunSpec, seed: int) -> RunSpec:
    """The same run with a robot policy in place of a language model, in some seeds."""
    own = random.Random(f"{seed}/robots/{spec.name}")
    if own.random() > ROBOTS:
        return spec
    fields = spec.model_dump(mode="json")
    return RunSpec.model_validate(
        fields
        | {
            "workflow": "embodied",
            "model": {"policy": {"kind": "mlp"}},
            "environment": {"tasks": own.choice([["reach"], ["reach", "push"]]), "count": own.choice([6, 9])},
            "data": {"heldout": 2, "options": {"starts": 10}, "curriculum": fields["data"]["curriculum"]},
            "algorithm": fields["algorithm"] | {"options": {}},
            "reward": {"scorers": [{"name": "episode"}]},
            "trainer": {"ranks": spec.trainer.ranks},
            "rollout": fields["rollout"] | {"helpers": 0},
            **({"placement": leased_simulators(spec, seed)} if seed % 8 == LEASED else {}),
        }
    )


def leased_simulators(spec: RunSpec, seed: int) -> dict[str, Any]:
    """Devices for rollouts, simulators and trainers of a robot's run, on hosts of DEVICES_A_HOST."""
    found: list[dict[str, Any]] = [
        {"rollout,simulator,trainer": "all"},
        {"rollout": "0-2", "simulator": "3-5", "trainer": "all"},
        {"rollout,trainer": "0-3", "simulator": "4-5"},
    ]
    if spec.rollout.instances <= 2 and spec.trainer.ranks <= 2:
        found.append({"rollout": "0-1", "simulator": "2-3", "trainer": "4-5"})
        found.append({"rollout,simulator": "0-3", "trainer": "4-5"})
    if spec.rollout.instances <= 2 and spec.trainer.ranks == 1:
        found.append({"mode": "hybrid", "rollout": "0-1", "simulator": "2", "trainer": "3-5"})
    return random.Random(f"{seed}/leased").choice(found)


def ahead(spec: RunSpec, seed: int, *, always: bool) -> RunSpec:
    """The same run with answers of older versions, in some seeds."""
    if not (always or seed % 16 in AHEAD):
        return spec
    own, fields = random.Random(f"{seed}/{spec.name}/ahead"), spec.model_dump(mode="json")
    ways = ["in_flight", "in_flight", "drain", "abort_and_resume"]
    placement = {key: fields["placement"][key] for key in ("flow", "simulator")}
    if spec.placement.mode in ("disaggregated", "hybrid"):
        placement = fields["placement"] | {"share": False}
    elif spec.placement.rollout or spec.placement.trainer:
        placement = {}
    fields["algorithm"]["max_staleness"] = own.choice([0, 1, 1, 2, 3, 4])
    if not fields["algorithm"]["max_staleness"]:
        return spec
    fields["rollout"] |= {"helpers": 0, "install": None if spec.environment else own.choice(ways)}
    fields["trainer"] |= {"helpers": 0}
    fields["data"] |= {"curriculum": None}
    return RunSpec.model_validate(fields | {"deterministic": False, "placement": placement})


def scarce(specs: Sequence[RunSpec], most: int) -> int:
    """So few devices that a run misses each one that stays in quarantine; `most` where a spec names devices."""
    if any(spec.placement.rollout or spec.placement.trainer or spec.placement.simulator for spec in specs):
        return most
    apart = ("disaggregated", "hybrid")
    sides = [
        (spec.rollout.instances, max(spec.trainer.ranks, spec.trainer.max_ranks or 0), spec.placement.mode)
        for spec in specs
    ]
    asked = [engines + ranks if mode in apart else max(engines, ranks) for engines, ranks, mode in sides]
    return min(most, max(asked))


def ranged(spec: RunSpec, seed: int) -> RunSpec:
    """The same run, whose trainer group may change by itself, in some of the seeds whose users change groups."""
    own, ranks = random.Random(f"{seed}/{spec.name}/range"), spec.trainer.ranks
    fixed = spec.deterministic or spec.placement.mode == "hybrid"
    if fixed or not regroups(seed) or own.random() < 0.3:
        return spec
    fields = spec.model_dump(mode="json")
    fewest, most = own.choice([1, ranks]), ranks + own.choice([0, 1, 2])
    devices = spec.placement.trainer
    if devices and "all" not in devices:
        most = min(most, len(devices))  # A spec that names fewer devices than ranks is refused.
    fields["trainer"] |= {"min_ranks": fewest, "max_ranks": most}
    return RunSpec.model_validate(fields)


def spanning(spec: RunSpec, seed: int) -> RunSpec:
    """The same run, whose ranks on the rollouts' GPUs sleep while these generate."""
    own, fields = random.Random(f"{seed}/{spec.name}/spanning"), spec.model_dump(mode="json")
    ranks = own.choice([2, 3])
    named = {"rollout": "0-1", "trainer": own.choice(["2", "0-2"])} if ranks == 3 else {}
    fields["placement"] = {"mode": "hybrid", **named}
    fields["rollout"] |= {"instances": min(2, spec.rollout.instances), "helpers": 0, "install": None}
    fields["trainer"] |= {"ranks": ranks, "min_ranks": None, "max_ranks": None, "helpers": 0}
    fields["algorithm"] |= {"prompts_per_step": ranks * own.choice([1, 2]), "max_staleness": 0}
    return RunSpec.model_validate(fields)


def random_evaluation(rng: random.Random, seed: int, origin: str = "") -> EvaluationSpec:
    """An evaluation of the simulated model, or of the newest checkpoint of the run `origin`."""
    samples = rng.randint(1, 4)
    return EvaluationSpec.model_validate(
        {
            "name": "eval",
            "seed": seed,
            "model": None if origin else {"path": "simulated"},
            "checkpoint": {"run": origin} if origin else None,
            "suite": {
                "name": "items",
                "options": {"source": "copy_digits", "options": {"digits": 2}},
                "limit": rng.choice([1, 7, 40, None]),
            },
            "sampling": {"temperature": 1.0 if samples > 1 else 0.0},
            "samples": samples,
            "modes": [f"avg@{samples}", f"pass@{samples}"] if samples > 1 else [],
            "rollout": {"instances": 1},
            "scheduling": {"priority": rng.choice([0, 0, 1, 5]), "quantum_s": rng.choice([0.5, 10.0])},
            "limits": {"recoveries": rng.choice([2, *[50] * 9])},
        }
    )


def _stages(seed: int) -> dict[str, Any]:
    """For some seeds a second reward stage, behind the first one or beside it; groups of equal rewards stay equal."""
    if seed % 8 != STAGED:
        return {"reward": {"scorers": [{"name": "exact"}]}}
    own = random.Random(f"{seed}/stages")
    services = {"generate": "rollout", "score": "reward", "judge": "reward", "learn": "trainer"}
    pieces = own.choice(["trajectory", "group"])
    second: dict[str, Any] = {
        "source": own.choice(["generate", "score"]),
        "target": "judge",
        "granularity": pieces,
    }
    if second["source"] == "score" and own.random() < 0.7:
        second["at_least"] = 1.0
    edges = [{"source": "generate", "target": "score"}, second]
    edges += [{"source": stage, "target": "learn"} for stage in ("score", "judge")]
    return {
        "reward": {"scorers": [{"name": "exact"}], "stages": {"judge": [{"name": "exact"}]}},
        "workflow": {
            "stages": {name: {"service": service} for name, service in services.items()},
            "edges": edges,
        },
    }


def _placement(mode: str, ranks: int, seed: int, name: str) -> dict[str, str | int]:
    if seed % 8 == SHARED:
        # One run in five keeps its devices to itself, whatever the others do.
        return {"mode": mode, "share": random.Random(f"{seed}/{name}/share").random() < 0.8}
    own = random.Random(f"{seed}/placement")
    if own.random() < 0.35:
        mode = "auto"
    flow = own.choice(["pipelined", "pipelined", "sequential"])
    if mode != "auto" and ranks == 1 and seed % 8 == STAGED:
        mode = "hybrid"
    fields: dict[str, str | int] = {
        "mode": mode,
        "flow": flow,
        "measure_steps": 1,
        "replan": own.choice(["auto", "propose"]),
    }
    if seed % 16 == KEPT and mode == "collocated":
        fields["memory"] = "resident"
    return fields


def forked(origin: RunSpec, run: str, step: int | None, name: str, more: int) -> RunSpec:
    """The spec of a run that goes on from a checkpoint of `run` for `more` steps beyond its last."""
    fields = origin.model_dump(mode="json") | {
        "name": name,
        "steps": origin.steps + more,
        "from_checkpoint": {"run": run, "step": step},
    }
    return RunSpec.model_validate(fields)


def unreadable(spec: RunSpec, name: str) -> RunSpec:
    """A spec whose model no trainer can read: the run fails as soon as it starts."""
    model = spec.model.model_copy(update={"path": UNREADABLE, "policy": None})
    return spec.model_copy(update={"name": name, "model": model, "from_checkpoint": None})
