"""Prefixes are shared where the model's attention can, and nowhere else; whoever demands them elsewhere is told."""

from __future__ import annotations

from contextlib import contextmanager

import grpc
import pytest
import torch
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import SamplingSection
from headrace_servicekit.rpc.errors import reason_of
from headrace_trainer.backends.fsdp.attending import checking, prefixes
from headrace_trainer.backends.fsdp.attending.prefixes import (
    WIDENED_TOKENS,
    attend_to_trees,
    obstacle_to_trees,
)
from headrace_trainer.backends.fsdp.backend import FsdpBackend
from headrace_trainer.learning import packing
from headrace_trainer.learning.packing import Attends, pack
from headrace_trainer.learning.reading import read_sequence
from headrace_trainer.learning.samples import Sample
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, **HEADS}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A tiny Gemma-2 with random weights: its attention caps its scores, which sdpa does not."""
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, pad_token_id=0, eos_token_id=1, bos_token_id=2, initializer_range=0.5)
    model = Gemma2ForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("models") / "gemma"
    model.save_pretrained(directory)
    return model, {"path": str(directory), "dtype": "float32"}


async def test_a_model_without_sdpa_is_scored_and_trained_sample_by_sample(
    client, make_config, make_settled, settled_digest, gemma
):
    model, section = gemma
    restored = await client.open(make_config(model=section))
    assert restored.figures["shared_prefix"] == 0.0
    group = make_settled(0, version=restored.version)
    sequences = [
        read_sequence(member.trajectory, SamplingSection(), SIZES["vocab_size"]) for member in group.members
    ]
    with torch.no_grad():
        rows = [model(torch.tensor([s.tokens])).logits[0].log_softmax(-1) for s in sequences]
    expected = [
        torch.tensor([float(row[p - 1, s.tokens[p]]) for p in s.trained])
        for row, s in zip(rows, sequences, strict=True)
    ]
    found = (await client.infer([member.trajectory for member in group.members])).sequences
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(list(own.values)), right, rtol=0, atol=1e-4)

    engine = torch.tensor([value for s in sequences for value in s.engine_log_probs])
    await client.begin(0, 1, 1, 2)
    await client.learn(0, 1, [group])
    figures = (await client.commit(0, 1, 1, 2, settled_digest([group]))).figures
    mismatch = float((torch.cat(expected) - engine).abs().mean())
    assert figures["log_prob_mismatch_mean"] == pytest.approx(mismatch, abs=1e-4)


async def test_a_model_with_sdpa_shares_by_itself(client):
    assert (await client.open()).figures["shared_prefix"] == 1.0


async def test_who_demands_it_of_a_model_without_sdpa_is_refused(client, make_config, gemma):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.open(make_config(model=gemma[1], trainer={"shared_prefix": True}))
    assert reason_of(caught.value) == "INVALID"
    assert "trainer.shared_prefix" in caught.value.details() and "eager" in caught.value.details()


def test_a_window_is_no_obstacle_and_chunks_are(make_config):
    config = TrainerConfig.model_validate(make_config())
    own = {**SIZES, "max_position_embeddings": 64, "attn_implementation": "sdpa"}
    assert not obstacle_to_trees(config, MistralConfig(**own, sliding_window=8))
    chunked = LlamaConfig(**own, layer_types=["chunked_attention"] * 2, attention_chunk_size=8)
    assert "chunks of 8 tokens" in obstacle_to_trees(config, chunked)


WINDOWED = {
    "every layer": MistralForCausalLM(
        MistralConfig(
            **SIZES, sliding_window=5, max_position_embeddings=64, eos_token_id=1, initializer_range=0.5
        )
    ),
    "one of two": Qwen3ForCausalLM(
        Qwen3Config(
            **SIZES,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            max_position_embeddings=64,
            eos_token_id=1,
            initializer_range=0.5,
        )
    ),
}


@pytest.mark.parametrize("which", WINDOWED)
@pytest.mark.parametrize("option", [{}, {"gradient_checkpointing": True}])
def test_layers_with_windows_follow_trees_as_their_own_masks_say(
    make_backend, sequences, accumulate, relative_l2, tmp_path, which, option, plain_attention
):
    """Answers behind one prompt, which the last tokens do not see, against the model's own class, one row each."""
    WINDOWED[which].save_pretrained(tmp_path)
    section = {"path": str(tmp_path), "dtype": "float32"}
    groups = [sequences(seed, prompt=9) for seed in range(3)]
    with plain_attention():
        plain = make_backend(model=section, trainer={"shared_prefix": False})
        assert not plain._attention.along
        accumulate(plain, groups, 64, shared=False)
        expected = plain.reduced_gradient(17.0)
    backend = make_backend(model=section, trainer=option)
    assert backend.shares_prefixes and backend._attention.windowed and not backend.notes
    accumulate(backend, groups, 64)
    assert relative_l2(backend.reduced_gradient(17.0), expected) <= 1e-5


@pytest.fixture
def plain_attention(monkeypatch):
    """Within it a model attends as its class does."""

    @contextmanager
    def within():
        with monkeypatch.context() as patched:
            patched.setattr(checking, "obstacle_to_trees", lambda *_: "it is to be plain")
            yield

    return within


def test_a_window_that_a_model_does_not_follow_is_found_as_it_is_loaded(make_backend, tmp_path, monkeypatch):
    WINDOWED["every layer"].save_pretrained(tmp_path)
    monkeypatch.setattr(prefixes, "window_of", lambda *_: None)
    backend = make_backend(model={"path": str(tmp_path), "dtype": "float32"})
    assert not backend.shares_prefixes and "log-probs are off" in backend.notes[0]


def _answers(prompt: int, answer: int, count: int = 4) -> list[Sample]:
    """Sequences that share `prompt` tokens and no other."""
    trained = list(range(prompt, prompt + answer))
    return [
        Sample([*range(3, 3 + prompt), *[3 + index] * answer], trained, [-1.0] * answer, [0.5] * answer, 1.0)
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("rows", "attends", "form"),
    [
        ([_answers(2, 12)], Attends.CHEAPEST, "paths"),
        ([_answers(2, 12)], Attends.MASK, "mask"),
        ([_answers(2, 12)], Attends.SEGMENTS, "segments"),
        ([_answers(24, 4)], Attends.CHEAPEST, "mask"),  # a tree of 36 nodes against four paths of 27
        ([_answers(510, 4)], Attends.CHEAPEST, "segments"),
        ([_answers(2, 200)], Attends.CHEAPEST, "paths"),
        ([_answers(4, 4)[:1], _answers(9, 9)[:1]], Attends.CHEAPEST, "causal"),
        ([_answers(4, 4)[:1], _answers(9, 9)[:1]], Attends.MASK, "causal"),
        ([_answers(4, 4)[:1], _answers(9, 9)[:1]], Attends.SEGMENTS, "segments"),
    ],
)
def test_attention_takes_the_form_that_computes_less(rows, attends, form):
    batch = pack(rows, shared=True, attends=attends)
    forms = {"mask": batch.mask_R1LL, "paths": batch.paths, "segments": batch.segments}
    assert [name for name, value in forms.items() if value is not None] == (
        [] if form == "causal" else [form]
    )


@pytest.mark.parametrize("option", [{}, {"gradient_checkpointing": True}])
def test_all_forms_of_attention_give_the_plain_gradient(
    make_backend, sequences, accumulate, relative_l2, monkeypatch, option
):
    groups = [sequences(seed) for seed in range(3)]
    plain = make_backend(trainer={"shared_prefix": False})
    accumulate(plain, groups, 4096, shared=False)
    expected = plain.reduced_gradient(17.0)
    for form in ("paths", "mask_R1LL", "segments"):
        monkeypatch.setattr(packing, "_cheaper", lambda *_, form=form: form == "paths")
        monkeypatch.setattr(packing, "SHORT_NODES", 0 if form == "segments" else 512)
        monkeypatch.setattr(packing, "_segments_win", lambda *_: True)
        backend = make_backend(trainer=option)
        assert getattr(backend._pack(groups), form) is not None
        accumulate(backend, groups, 4096)
        assert 0 < relative_l2(backend.reduced_gradient(17.0), expected) <= 1e-5


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "a row a sample"])
def test_rows_one_after_another_give_the_plain_gradient(
    make_backend, sequences, accumulate, relative_l2, monkeypatch, shared
):
    """What runs on a GPU: no row is padded, and none sees another."""
    groups = [sequences(seed) for seed in range(3)]
    found = []
    for attends in (Attends.SEGMENTS, Attends.CHEAPEST):
        monkeypatch.setattr(FsdpBackend, "_attends", attends)
        backend = make_backend(trainer={"shared_prefix": shared})
        batch = backend._pack([[sequence] for group in groups for sequence in group])
        assert (batch.segments is not None) is (attends is Attends.SEGMENTS)
        accumulate(backend, groups, 64, shared=shared)
        found.append(backend.reduced_gradient(17.0))
    assert 0 < relative_l2(*found) <= 1e-5


@pytest.mark.parametrize(("length", "dtype"), [(9, torch.float32), (WIDENED_TOKENS + 1, torch.bfloat16)])
def test_short_sequences_of_a_bf16_model_are_attended_to_in_fp32(length, dtype):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
    assert attend_to_trees([model])
    module = model.model.layers[0].self_attn
    own = [torch.randn(2, heads, length, 8).bfloat16() for heads in (2, 1, 1)]
    found, _ = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation](module, *own, None)
    expected = scaled_dot_product_attention(
        *(tensor.to(dtype) for tensor in own), is_causal=True, enable_gqa=True
    )
    assert torch.equal(found, expected.transpose(1, 2).bfloat16())
