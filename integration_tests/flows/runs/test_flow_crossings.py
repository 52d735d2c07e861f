"""Keys at random, as users cross them: a run is refused by one of its own keys, or it ends and is exported."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.fleet import Fleet
from harness.ledger import audit
from harness.specs import small_spec
from headrace.client import HeadraceError

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


@pytest.fixture(scope="module")
def two_of_each(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("crossed") / "data", "--rollout", "2", "--trainer", "2") as fleet:
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
    spec, keys = crossed(seed, tiny_model, tmp_path)
    try:
        run = two_of_each.submit(spec)
    except HeadraceError as error:
        named = [problem.key for problem in error.problems]
        assert named and all(problem.fix for problem in error.problems), f"{spec}\n{error}"
        assert any(one.startswith(key) or key.startswith(one) for one in named for key in keys), (
            f"{named} of {keys}: {error.problems}"
        )
        return
    if strikes := seed % 3 == 0:
        two_of_each.reach(run, 1)
        two_of_each.kill(f"{random.Random(seed).choice(('trainer', 'rollout'))}-0")
    ended = two_of_each.succeed(run)
    audit(two_of_each, ended)
    assert strikes or not ended.recoveries, "nothing was killed"
    assert (Path(ended.export_path) / "config.json").is_file()
