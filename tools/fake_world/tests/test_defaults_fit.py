"""What a run leaves to its GPUs is what the trainer's own plan has room for, in the layout that is foreseen."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from headrace_schema.gpu_defaults import longest_sequence
from headrace_schema.learner_size import Learner, fit, ladder
from headrace_schema.model_size import model_size
from headrace_schema.openings import TrainerConfig
from headrace_schema.rules.learning import model_ranks
from headrace_schema.spec import RunSpec
from headrace_trainer.backends.fsdp.layouts.planned import ATTENTION
from headrace_trainer.backends.fsdp.layouts.sizes import Sizes
from headrace_trainer.layouts import layout_on
from headrace_trainer.workloads import run_kind

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace_fake_world.models import MODELS, write_model

HOST, ON_HOST = 2 * 10**12, 8
LORA = {"lora": {"rank": 16}}
QUICK = [
    ("qwen2.5-0.5b", 24, 1, 8192, {}),
    ("qwen2.5-1.5b", 80, 8, 1024, LORA),
    ("qwen2.5-7b", 80, 8, 1024, {}),
    ("qwen2.5-7b", 80, 8, 8192, {}),
    ("qwen3-30b-a3b", 80, 32, 16384, {}),
    ("llama-3-70b", 80, 32, 1024, {}),
]
CHEAPER = [
    ("qwen2.5-7b", 80, 8, 8192, {"lora": {"rank": 16, "quantization": "nf4"}}),
    ("qwen2.5-7b", 24, 1, 1024, {"lora": {"rank": 16, "quantization": "nf4"}}),
    ("qwen2.5-7b", 80, 8, 65_536, {"backend_options": {"offload_activations": True}}),
    ("qwen2.5-7b", 80, 8, 126_976, {"backend_options": {"context_parallel": 4}}),
    ("qwen2.5-7b", 80, 4, 8192, {"optimizer": "adamw_8bit"}),
    ("qwen2.5-7b", 80, 4, 8192, {"optimizer": "muon"}),
]
ALL = [
    each
    for each in itertools.product(MODELS, (40, 80, 141), (1, 8, 32), (1024, 16384), ({}, LORA))
    if each not in QUICK
]


def run(path: Path, ranks: int, longest: int, *, optimizer: str = "adamw", **trainer) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"path": str(path)},
            "data": {"source": "copy_digits"},
            "sampling": {"max_new_tokens": longest},
            "algorithm": {"name": "grpo", "group_size": 8, "prompts_per_step": 64},
            "optimizer": {"name": optimizer},
            "trainer": {"ranks": ranks, **trainer},
            "placement": {"mode": "collocated"},
            "reward": {"scorers": [{"name": "exact"}]},
        }
    )


def holds(tmp_path, name, gigabytes, ranks, longest, trainer) -> None:
    path, memory = write_model(tmp_path, name), gigabytes * 10**9
    spec, size = run(path, ranks, longest, **trainer), model_size(MODELS[name])
    assert size is not None
    found = fit(spec, size, memory, min(ranks, ON_HOST), longest_sequence(spec))
    if not found.tokens:
        return  # The trainer says at its start what it lacks.
    config = TrainerConfig.of(run(path, ranks, longest, micro_batch_tokens=found.tokens, **trainer))
    planned = layout_on(config, memory, HOST, ON_HOST)
    assert "problem" not in planned and sum(planned["device"].values()) * 1.1 <= memory
    rungs = [*dict.fromkeys(map(str, ladder(spec, ranks, min(ranks, ON_HOST))))]
    own = planned["layout"].removesuffix(", offload_activations: true")
    taken = next(each for each in rungs if named(each) == named(own))
    assert rungs.index(taken) <= rungs.index(found.layout), f"{own} costs more than {found.layout}"
    (rung, *_) = [
        each
        for each in ladder(spec, ranks, min(ranks, ON_HOST))
        if str(each) == taken and f"shard_ranks: {each.shard_ranks}" in own
    ]
    # What attention gave is kept where there is room beside all that is reckoned.
    without = sum(size for part, size in planned["device"].items() if part != ATTENTION)
    reckoned = Learner.of(spec, size).bytes_of(rung, ranks, found.tokens // model_ranks(spec.trainer))
    assert -0.15 < reckoned / without - 1 < 0.25, (own, planned["device"])


def named(layout: str) -> set[str]:
    return {part for part in layout.split(", ") if not part.startswith("shard_ranks")}


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_trainers_plan_has_room_for_what_is_chosen(case, tmp_path):
    holds(tmp_path, *case)


@pytest.mark.parametrize("ranks", [8, 32])
def test_a_mixture_of_experts_has_micro_batches_that_its_gathers_hide_behind(ranks, tmp_path):
    name = "qwen3-30b-a3b"
    spec, size = run(write_model(tmp_path, name), ranks, 8192), model_size(MODELS[name])
    assert size is not None
    found = fit(spec, size, 80 * 10**9, ON_HOST, longest_sequence(spec))
    assert found.tokens >= 16384 and "gathers of all experts hide behind so many" in found.why


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*CHEAPER, *ALL], ids=str)
def test_the_trainers_plan_has_room_for_what_is_chosen_of_all_sizes(case, tmp_path):
    holds(tmp_path, *case)


@pytest.mark.parametrize("name", MODELS)
def test_a_tokens_activations_are_those_that_the_trainer_measures(name, tmp_path):
    """64 bytes a unit of width at 7B, where 34 were reckoned with before; a mixture of experts keeps 85."""
    config = TrainerConfig.of(run(write_model(tmp_path, name), 1, 1024, micro_batch_tokens=2048))
    sizes, size = Sizes.of(config, run_kind(config).policies[""].check()), model_size(MODELS[name])
    assert size is not None and size.layers == len(sizes.units) - 1
    assert size.kept_bytes == pytest.approx(sizes.units[0].kept / 2048, rel=0.03)
    assert size.parameters == pytest.approx(sizes.learned, rel=0.002)
