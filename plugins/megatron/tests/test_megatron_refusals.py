"""What the megatron backend refuses when a run opens: with the key, the numbers and the fix."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from headrace_megatron.checks import plan_memory
from headrace_megatron.layout import Layout
from headrace_megatron.plugin import MegatronOptions
from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends import BACKENDS, build_backend, choose_backend
from headrace_trainer.errors import Refusal
from headrace_trainer.memory import Room, Rooms
from headrace_trainer.trainer import Trainer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

INSTALLED = find_spec("megatron") is not None
needs_megatron = pytest.mark.skipif(
    not INSTALLED, reason="megatron-core is not installed: make test-megatron"
)
OPTIONS = "trainer.backend_options"
LLAMA = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture
def refusal_of(make_config, tmp_path):
    """The refusal with which a run does not open."""

    def find(ranks=1, options=None, **sections) -> Refusal:
        trainer = {"backend": "megatron", "ranks": ranks, "backend_options": options or {}}
        trainer |= sections.pop("trainer", {})
        config = TrainerConfig.model_validate(make_config(trainer=trainer, **sections))
        with pytest.raises(Refusal) as caught:
            Trainer(lambda: None, lambda: True).open_run("runs/one", config, tmp_path)
        assert caught.value.message.startswith(caught.value.metadata["key"])
        return caught.value

    return find


@pytest.mark.skipif(INSTALLED, reason="megatron-core is installed")
def test_without_megatron_core_a_trainer_offers_fsdp_alone_and_says_what_to_install(refusal_of):
    assert BACKENDS.installed() == ["fsdp"]
    refusal = refusal_of()
    assert refusal.metadata["key"] == "trainer.backend"
    assert "install headrace-trainer[megatron]" in refusal.message


def test_a_trainer_starts_without_importing_megatron():
    imports = "import sys, headrace_trainer.service, headrace_megatron.checks"
    words = f"{imports}; print('megatron' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    ("ranks", "sizes", "replicas"), [(8, (2, 2, 1), [0, 0, 1, 1] * 2), (8, (2, 1, 2), [0] * 4 + [1] * 4)]
)
def test_ranks_of_one_model_are_one_replica(ranks, sizes, replicas):
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    layout = Layout.of(MegatronOptions(**dict(zip(names, sizes, strict=True))), ranks)
    assert [layout.replica(rank) for rank in range(ranks)] == replicas
    assert layout.replicas == 2


@needs_megatron
@pytest.mark.parametrize(
    ("ranks", "options", "key", "words"),
    [
        (3, {"tensor_parallel": 2}, "trainer.ranks", "3 ranks are no multiple of the 2"),
        (
            4,
            {"tensor_parallel": 4},
            f"{OPTIONS}.tensor_parallel",
            "2 key and value heads (model.path) cannot be divided into 4; the nearest lower value that divides "
            "them is 2",
        ),
        (3, {"pipeline_parallel": 3}, f"{OPTIONS}.pipeline_parallel", "2 layers"),
        (
            2,
            {"pipeline_parallel": 2, "virtual_stages": 2},
            f"{OPTIONS}.virtual_stages",
            "1 layers of a stage (model.path) cannot be divided into 2; the nearest lower value that divides them "
            "is 1",
        ),
        (1, {"tensor": 2}, f"{OPTIONS}.tensor", "tensor_parallel"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(refusal_of, ranks, options, key, words):
    refusal = refusal_of(ranks, options)
    assert refusal.metadata["key"] == key
    assert words in refusal.message


@needs_megatron
@pytest.mark.parametrize("family", ["gpt2", "windowed", "biased", "yarn"])
def test_models_that_megatron_would_compute_otherwise_are_refused(refusal_of, tmp_path, family):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    made = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=64, n_layer=1, n_head=4)),
        "windowed": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA, **window)),
        "biased": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, attention_bias=True)),
        "yarn": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, rope_parameters=yarn)),
    }
    save_model(made[family](), character_tokenizer(), tmp_path / "model")
    path = {"path": str(tmp_path / "model"), "dtype": "float32"}
    words = {"gpt2": "gpt2 model", "windowed": "16 tokens", "biased": "biases", "yarn": "yarn"}[family]
    refusal = refusal_of(model=path)
    assert refusal.metadata["key"] == "model.path"
    assert words in refusal.message and "fsdp" in refusal.message
    if family != "gpt2":  # whose vocabulary is the same, and a reference is looked at alike
        options = {"kl_loss_coef": 0.1}
        refusal = refusal_of(trainer={"reference": path}, algorithm={"options": options})
        assert refusal.metadata["key"] == "trainer.reference.path"


@needs_megatron
def test_a_group_whose_ranks_do_not_divide_is_refused_as_it_is_built(make_config, trainer_group):
    section = {"backend": "megatron", "ranks": 2, "backend_options": {"tensor_parallel": 2}}
    config = TrainerConfig.model_validate(make_config(trainer=section))
    algorithm = build_algorithm(config.algorithm)
    choose_backend(config.trainer).check(config, algorithm)
    with pytest.raises(Refusal, match="1 ranks are no multiple of the 2"):
        build_backend(config, algorithm, trainer_group)


@pytest.mark.parametrize(
    ("options", "parts_kept"),
    [
        ({}, 1.0),
        ({"pipeline_micro_batches": 4}, 1 / 4),
        ({"pipeline_parallel": 2}, 2 / 8 / 2),  # two of eight parts, of half of the layers
        ({"pipeline_parallel": 2, "pipeline_micro_batches": 1}, 1 / 2),
        (
            {"pipeline_parallel": 2, "virtual_stages": 2},
            5 / 8 / 4,
        ),  # 1F1B round the stages: five of them, of a quarter
        ({"tensor_parallel": 2, "context_parallel": 2}, 1 / 4),
    ],
)
def test_the_plan_counts_the_activations_of_the_parts_that_the_first_stage_keeps(
    make_config, tmp_path, options, parts_kept
):
    save_model(
        LlamaForCausalLM(LlamaConfig(**LLAMA | {"num_hidden_layers": 8})), character_tokenizer(), tmp_path
    )
    model = {"path": str(tmp_path), "dtype": "float32"}
    plans = []
    for own, again in (({}, False), (options, False), (options, True)):
        trainer = {"backend": "megatron", "ranks": 8, "backend_options": own, "gradient_checkpointing": again}
        config = TrainerConfig.model_validate(make_config(model=model, trainer=trainer))
        algorithm, known = build_algorithm(config.algorithm), MegatronOptions(**own)
        plan = plan_memory(config, algorithm, known, Layout.of(known, 8), on_gpu=False)
        plans.append(plan.host["activations"])
    assert plans[1] == pytest.approx(plans[0] * parts_kept, rel=0.02)
    assert 0 < plans[2] < plans[1] or not options


@needs_megatron
def test_it_moves_elsewhere_and_back_in_the_middle_of_a_step(
    trainer_group, make_config, accumulate, sequences, relative_l2
):
    config = TrainerConfig.model_validate(make_config(trainer={"backend": "megatron"}))
    backend = build_backend(config, build_algorithm(config.algorithm), trainer_group)
    backend.load_initial()
    backend.commit(1.0, 0.0)
    found = []
    for moves in (False, True):
        accumulate(backend, [sequences(2)], 512, shared=False)
        if moves:
            backend.move(torch.clone)
        accumulate(backend, [sequences(3)], 512, shared=False)
        found.append(backend.reduced_gradient(7.0))
    assert all(value.equal(found[1][name]) for name, value in found[0].items())
    planned = backend.memory_plan(Rooms(Room("host memory", 0, 0), None))
    assert sum(planned.host.values()) > 4 * sum(value.nbytes for value in found[0].values())
