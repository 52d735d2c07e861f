"""Keys at random, as users cross them: a run is refused by one of its own keys, or it ends and is exported."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.fleet import RUN_S, Fleet
from harness.ledger import audit
from harness.specs import small_spec
from harness.waiting import wait_for
from headrace.client import HeadraceError, Run

pytestmark = [
    pytest.mark.nightly,  # Each crossing that failed once has a test of its own.
    pytest.mark.timeout(3600),
]
SEEDS = range(*map(int, os.environ.get("CROSSINGS", "0:40").split(":")))
SAMPLED = (
    *("grpo", "ppo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "dr_grpo", "opo", "remax", "kl_cov"),
    *("gmpo", "sapo", "gpg", "passk_grpo", "reinforce", "reinforce_pp_baseline", "clip_cov"),
)
GIVEN = {
    "supervised": ("sft",),
    "preference": ("dpo", "ipo", "simpo", "orpo"),
    "reward_model": ("bradley_terry",),
}
ANY: dict[str, tuple[Any, ...]] = {
    "model__dtype": ("bfloat16",),
    "optimizer__name": ("adamw_8bit", "muon"),
    "optimizer__schedule": ({"name": "cosine", "warmup_steps": 1},),
    "optimizer__weight_decay": (0.1,),
    "trainer__ranks": (2,),
    "trainer__lora": (
        {"rank": 4},
        {"rank": 4, "targets": ["q_proj", "v_proj"]},
        *({"rank": 4, "quantization": form} for form in ("nf4", "int8", "fp8")),
    ),
    "trainer__gradient_checkpointing": (True, False),
    "trainer__shared_prefix": (True, False),
    "trainer__micro_batch_tokens": (32, 64),
    "trainer__backend_options": (
        *(
            {"shard": "weights"},
            {"offload": "optimizer"},
            {"offload_activations": True},
            {"context_parallel": 2},
        ),
        {"compile": True},
    ),
    "checkpoint__interval_steps": (0, 2),
    "deterministic": (True,),
    "evaluation__every": (1, 2),
    "tracking__ratios": (True,),
    "data__heldout": (0,),
    "limits__in_flight_bytes": (4096,),
}
OF_SAMPLED: dict[str, tuple[Any, ...]] = {
    "algorithm__max_staleness": (1, 2),
    "algorithm__truncated": ("mask",),
    "algorithm__group_size": (1, 3),
    "sampling__temperature": (0.7,),
    "sampling__stages": ([{"until_step": 2, "max_new_tokens": 2}],),
    "sampling__stop": (["7"],),
    "trainer__warmup": ({"steps": 0},),
    "trainer__helpers": (1,),
    "trainer__reference": ({},),
    "trainer__draft": ({"form": "eagle3"},),
    "rollout__instances": (2,),
    "rollout__helpers": (1,),
    "rollout__chunk_tokens": (1,),
    "rollout__enable_lora": (True,),
    "rollout__install": ("in_flight", "drain", "abort_and_resume"),
    "weights__transports": (["grpc"], ["delta", "grpc"]),
    "weights__publish": ("ranks",),
    "weights__lora": ("adapter", "merged"),
    "placement__mode": ("disaggregated", "hybrid", "auto"),
    "placement__memory": ("offloaded", "resident"),
    "placement__flow": ("pipelined", "sequential"),
    "placement__share": (True,),
    "data__curriculum": ({},),
}


# What acts: an algorithm, the head that it needs, and options that only it has.
ACTING: dict[str, tuple[str, dict[str, tuple[Any, ...]]]] = {
    "ppo": ("gaussian", {"epochs": (2,), "minibatch_size": (8,), "target_kl": (0.01,)}),
    "grpo": ("gaussian", {}),
    "sac": ("squashed", {"temperature": (0.1,), "target_entropy": (-2.0,), "critics": (3,)}),
    "rlpd": ("squashed", {"critics": (3,)}),
    "crossq": ("squashed", {"norm_warmup": (10,)}),
    "td3_bc": ("deterministic", {"bc_alpha": (None,), "target_noise": (0.1,)}),
    "iql": ("gaussian", {"expectile": (0.9,)}),
    "recap": ("gaussian", {"better_share": (0.5,), "dropped_share": (0.0,)}),
    "success_cloning": ("squashed", {"weigh": ("return",), "inverse_temperature": (0.5,)}),
}
REPLAYED: dict[str, tuple[Any, ...]] = {
    "draws": ("prioritised", "recent"),
    "capacity": (96,),
    "updates_per_action": (2.0, 0.1),
    "learning_starts": (0, 40),
    "reward_scale": (0.1,),
}
EMBODIED: dict[str, tuple[Any, ...]] = {
    "model__policy__activation": ("relu",),
    "model__policy__normalizer": (None,),
    "environment__horizon": (4,),
    "environment__vectorized": (True,),
    "environment__processes": (2,),
    "environment__alternating": (2,),
    "environment__count": (2, 3),
    "environment__max_episode_steps": (5, 16),
    "environment__stop_on_success": (False,),
    "environment__variants": ({"heavy": {"g": 12.0}, "light": {"g": 8.0}},),
    "algorithm__group_size": (2,),
    "algorithm__max_staleness": (1, 2),
    "optimizer__name": ("adamw_8bit", "muon"),
    "optimizer__grad_clip": (0.1,),
    "trainer__ranks": (2,),
    "trainer__micro_batch_tokens": (8,),
    "trainer__backend_options": ({"shard": "weights"}, {"compile": True}),
    "rollout__instances": (2,),
    "weights__transports": (["grpc"], ["delta", "grpc"]),
    "weights__publish": ("ranks",),
    "placement__mode": ("disaggregated", "hybrid", "auto"),
    "placement__flow": ("pipelined", "sequential"),
    "checkpoint__interval_steps": (0, 2),
    "evaluation__every": (1, 2),
    "deterministic": (True,),
    "data__heldout": (0, 3),
    "limits__in_flight_bytes": (4096,),
}


def acting(seed: int) -> tuple[dict[str, Any], set[str]]:
    """A spec of a robot policy, and the keys that a refusal may name."""
    drawn = random.Random(seed)
    algorithm = drawn.choice(sorted(ACTING))
    head, own = ACTING[algorithm]
    replays = algorithm not in ("ppo", "grpo")
    own = own | (REPLAYED if replays else {})
    options = {
        key: drawn.choice(own[key]) for key in drawn.sample(sorted(own), min(len(own), drawn.randint(0, 2)))
    }
    if replays:
        options |= {"batch_size": 16}
    if algorithm in ("sac", "rlpd", "crossq", "td3_bc", "iql"):
        options |= {"critic_hidden": [8]}
    if algorithm == "rlpd":
        options["demonstrations_share"] = 0.0
    spec: dict[str, Any] = {
        "name": f"acts-{seed}",
        "workflow": "embodied",
        "steps": 4,
        "export": True,
        "model": {
            "policy": {"kind": "mlp", "head": head, "hidden": [8], "conditioned": algorithm == "recap"}
        },
        "environment": {"tasks": ["Pendulum-v1"], "count": 4, "max_episode_steps": 8},
        "data": {"heldout": 2, "options": {"starts": 64}},
        "algorithm": {
            "name": algorithm,
            "group_size": 2 if algorithm == "grpo" else 1,
            "prompts_per_step": 4,
            "options": options,
        },
        "checkpoint": {"interval_steps": 2},
    }
    keys = drawn.sample(sorted(EMBODIED), drawn.randint(2, 5))
    for key in keys:
        *sections, last = key.split("__")
        section = spec
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = drawn.choice(EMBODIED[key])
    if spec["algorithm"].get("max_staleness"):
        spec.setdefault("placement", {}).setdefault("mode", "disaggregated")
        keys.append("placement__mode")
    told = {key.replace("__", ".") for key in keys} | {f"algorithm.options.{key}" for key in options}
    return spec, told | {"algorithm.name", "workflow"}


@pytest.fixture(scope="module")
def two_of_each(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(
        tmp_path_factory.mktemp("crossed") / "data", "--rollout", "2", "--trainer", "2", "--simulator", "2"
    ) as fleet:
        yield fleet


def crossed(seed: int, model: Path, folder: Path) -> tuple[dict[str, Any], set[str]]:
    """A spec, and the keys that a refusal may name."""
    drawn = random.Random(seed)
    workflow = drawn.choice(("reasoning", "reasoning", "reasoning", *GIVEN))
    axes = ANY | (OF_SAMPLED if workflow == "reasoning" else {})
    keys = drawn.sample(sorted(axes), drawn.randint(2, 5))
    chosen = {key: drawn.choice(axes[key]) for key in keys}
    if "algorithm__max_staleness" in chosen:
        chosen.setdefault("placement__mode", "disaggregated")
    if "context_parallel" in chosen.get("trainer__backend_options", ()):
        chosen["trainer__ranks"] = 2
    if "trainer__reference" in chosen:
        chosen["trainer__reference"] = {"path": str(model), "dtype": "float32"}
    name = drawn.choice(SAMPLED if workflow == "reasoning" else GIVEN[workflow])
    spec = small_spec(model, name=f"crossed-{seed}", export=True, **chosen)
    spec["algorithm"]["name"] = name
    if workflow != "reasoning":
        spec["workflow"] = workflow
        for key in ("sampling", "rollout", "reward"):
            del spec[key]
        del spec["trainer"]["warmup"], spec["algorithm"]["group_size"]
    if workflow in ("preference", "reward_model"):
        file = folder / "pairs.jsonl"
        rows = [{"prompt": f"{at}=", "chosen": f"{at}", "rejected": f"{at + 1}"} for at in range(100, 140)]
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        spec["data"] = spec["data"] | {"source": "jsonl", "options": {"path": str(file), "form": "dpo"}}
        spec["data"]["prompt"] = {"chat": False}
    told = {key.replace("__", ".") for key in chosen} | {"algorithm.name", "workflow"}
    return spec, told


@pytest.mark.parametrize("seed", SEEDS)
def test_a_crossing_is_refused_by_its_keys_or_ends(two_of_each, tiny_model, tmp_path, seed):
    ended = made(two_of_each, seed, *crossed(seed, tiny_model, tmp_path), ("trainer", "rollout"))
    assert ended is None or (Path(ended.export_path) / "config.json").is_file()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_crossing_of_a_robot_policy_is_refused_by_its_keys_or_ends(two_of_each, seed):
    ended = made(two_of_each, seed, *acting(seed), ("trainer", "rollout", "simulator"))
    assert ended is None or any(Path(ended.export_path).iterdir())


def made(
    fleet: Fleet, seed: int, spec: dict[str, Any], keys: set[str], struck: tuple[str, ...]
) -> Run | None:
    """The run once it has ended, with a kill where the seed says so; None where one of `keys` refused it."""
    try:
        run = fleet.submit(spec)
    except HeadraceError as error:
        named = [problem.key for problem in error.problems]
        assert named and all(problem.fix for problem in error.problems), f"{spec}\n{error}"
        assert any(one.startswith(key) or key.startswith(one) for one in named for key in keys), (
            f"{named} of {keys}: {error.problems}"
        )
        return None
    began = wait_for(lambda: begun(fleet, run), f"{run.id} to make a step", RUN_S)
    if began.state == "FAILED" and not began.step:  # refused by a worker that opened it
        assert any(began.reason.startswith(f"OpenRun: {key}:") for key in keys), f"{began.reason}\nof {keys}"
        return None
    if strikes := seed % 3 == 0:
        fleet.kill(f"{random.Random(seed).choice(struck)}-0")
    ended = fleet.succeed(run)
    audit(fleet, ended)
    assert strikes or not ended.recoveries, "nothing was killed"
    return ended


def begun(fleet: Fleet, run: Run) -> Run | None:
    """The run once it has committed a step, or has ended."""
    now = fleet.client.get(run.id)
    return now if now.step or now.ended else None
