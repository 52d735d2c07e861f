"""Products in fp8, emulated on a CPU: a step close to bfloat16's, what takes part, its room in the plan, refusals."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from headrace_modelkit.logprobs import Head
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp import float8
from headrace_trainer.backends.fsdp.checks import check_run
from headrace_trainer.backends.fsdp.layouts.sizes import FP32, Sizes
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import Refusal

EMULATED = pytest.mark.skipif(find_spec("torchao") is None, reason="sh ci/test_float8.sh has torchao")
FP8 = {"micro_batch_tokens": 512, "backend_options": {"fp8": True}}
PLAIN = {"micro_batch_tokens": 512}


@pytest.fixture
def bf16(tiny_directory):
    return {"path": str(tiny_directory), "dtype": "bfloat16"}


@EMULATED
def test_a_step_is_close_to_one_in_bfloat16_and_is_none(
    make_backend, bf16, sequences, accumulate, relative_l2
):
    groups = [sequences(seed) for seed in (1, 2)]
    found = []
    for trainer in (PLAIN, FP8):
        backend = make_backend(model=bf16, trainer=trainer)
        log_probs = [each["old_log_probs"] for each in backend.infer([groups[0]], ["old_log_probs"])]
        accumulate(backend, groups, 256)
        found.append(
            (
                torch.tensor([own for each in log_probs for own in each]),
                backend.reduced_gradient(1.0),
                backend,
            )
        )
    (plain_K, gradient, _), (own_K, own, backend) = found
    off = float((own_K - plain_K).abs().mean())
    assert 1e-4 < off < 0.01 * float(plain_K.abs().mean())
    assert own.keys() == gradient.keys() and 0.005 < relative_l2(own, gradient) < 0.15
    model = backend._sharded.model
    kinds = {type(each).__name__ for layer in model.model.layers for each in layer.modules()}
    assert "Float8Linear" in kinds and "Linear" not in kinds
    assert (
        type(model.get_output_embeddings()) is torch.nn.Linear
        and Head.of(model).weight_VD.dtype != torch.float8_e4m3fn
    )


@EMULATED
def test_steps_in_fp8_learn_as_those_in_bfloat16_do(make_backend, bf16, sequences):
    after = []
    for trainer in (PLAIN, FP8):
        backend = make_backend(model=bf16, trainer=trainer)
        first = dict(backend.weights())
        first = {name: own.clone() for name, own in first.items()}
        for step in range(4):
            assert backend.micro([sequences(step)])
            assert backend.commit(1.0, 1e-3).finite
        after.append(torch.cat([(own - first[name]).flatten() for name, own in backend.weights()]))
    assert torch.nn.functional.cosine_similarity(*after, dim=0) > 0.9


def test_the_plan_counts_the_copies_of_one_layer(make_config, bf16):
    def sizes(trainer):
        config = TrainerConfig.model_validate(make_config(model=bf16, trainer=trainer))
        return Sizes.of(config, build_algorithm(config.algorithm))

    found, plain = sizes(FP8), sizes(PLAIN)
    weight = max(own for own in (64 * 128, 64 * 256))
    assert plain.widened == 0 and found.widened * FP32 > weight + 512 * 64
    assert found.units == plain.units


def opened(make_config, options=None, **sections):
    config = TrainerConfig.model_validate(make_config(**sections))
    check_run(FsdpOptions(fp8=True, **(options or {})), config, build_algorithm(config.algorithm))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({}, "needs an NVIDIA GPU of compute capability 9.0"),
        ({"deterministic": True}, "does not go with deterministic"),
        ({"trainer": {"lora": {}}}, "does not go with trainer.lora"),
        ({"model": {"dtype": "float32"}}, "does not go with model.dtype: float32"),
    ],
)
def test_it_is_refused_where_it_cannot_be_had(sections, words, make_config, bf16):
    """This host has no GPU."""
    given = {"model": bf16 | sections.pop("model", {}), **sections}
    with pytest.raises(Refusal, match=rf"^trainer.backend_options.fp8: .*{words}.*leave") as caught:
        opened(make_config, **given)
    assert caught.value.reason == "INVALID"


@pytest.mark.parametrize(
    ("capability", "has", "words"),
    [
        ((8, 9), True, "the trainer's has 8.9"),
        ((9, 0), False, r"pip install 'headrace-trainer\[fp8\]'"),
        ((9, 0), True, ""),
    ],
)
def test_an_older_gpu_or_a_host_without_torchao_is_named(
    capability, has, words, make_config, bf16, monkeypatch
):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(float8, "find_spec", lambda name: has or None)
    if not words:
        opened(make_config, model=bf16)
        return
    with pytest.raises(Refusal, match=words):
        opened(make_config, model=bf16)
