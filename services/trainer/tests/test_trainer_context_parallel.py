"""Ranks of fsdp that divide their rows compute what one rank computes: log-probs, gradients, commits; with Gloo."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from backend_cases import config, part, walk_cases
from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_modelkit.presets.tiny_vision import write_tiny_vision
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp import checks
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import Refusal
from headrace_trainer.trainer import Trainer
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.timeout(600)
SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
KEY = "trainer.backend_options.context_parallel"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Four query heads and two key heads: over four ranks the latter are repeated."""
    torch.manual_seed(3)
    directory = tmp_path_factory.mktemp("models") / "llama"
    save_model(LlamaForCausalLM(LlamaConfig(**SIZES)), character_tokenizer(), directory)
    return directory


@pytest.fixture(scope="module")
def walk(model, tmp_path_factory):
    """Walks through cases of so many ranks, of which so many divide a row; rows are trees of a group."""
    folder = tmp_path_factory.mktemp("cases")

    def go(ranks: int, divided: dict[str, int]) -> dict[str, SimpleNamespace]:
        cases = {
            name: {
                "config": config(model, ranks, {"context_parallel": count}, backend="fsdp"),
                "saved": "",
                "grouped": True,
            }
            for name, count in divided.items()
        }
        return walk_cases(folder, ranks, cases)

    return go


@pytest.fixture(scope="module")
def one(walk):
    """One rank that has whole rows."""
    return walk(1, {"one": 1})["one"]


def check_equal(found: SimpleNamespace, one: SimpleNamespace, relative_l2, replicas: int) -> None:
    """Gradient before clipping, two commits, figures and log-probs are those of one rank."""
    for kind, bound in (("gradient", 1e-5), ("weights", 1e-5), ("moments", 1e-4)):
        assert relative_l2(part(found.tensors, kind), part(one.tensors, kind)) < bound, kind
    assert found.norms[:2] == pytest.approx(one.norms[:2], rel=1e-4)
    for own, expected in zip(found.sums[:2], one.sums[:2], strict=True):
        assert own == pytest.approx(expected, rel=1e-3, abs=1e-4), "figures count each token once"
    assert found.held and found.refused
    shares, [whole] = found.log_probs[0], one.log_probs[0]
    assert len(shares) == replicas, "ranks of a replica learn from the same rows"
    for own, expected in zip([values for share in shares for values in share], whole, strict=True):
        assert own[0] == pytest.approx(expected[0], abs=1e-5)


def test_two_ranks_that_divide_rows_compute_what_one_computes(walk, one, relative_l2):
    check_equal(walk(2, {"two": 2})["two"], one, relative_l2, replicas=1)


@pytest.mark.nightly
def test_so_do_two_pairs_and_four_ranks_which_are_more_than_the_key_heads(walk, one, relative_l2):
    found = walk(4, {"two pairs": 2, "four": 4})
    check_equal(found["two pairs"], one, relative_l2, replicas=2)
    check_equal(found["four"], one, relative_l2, replicas=1)


@pytest.mark.nightly  # quick: test_a_vision_language_model_divides_rows_of_text_alone
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_ranks_divide_the_texts_of_a_vision_language_model(family, tmp_path, relative_l2):
    write_tiny_vision(tmp_path / family, family=family, initializer_range=0.2)
    found = {}
    for ranks in (1, 2):
        own = config(tmp_path / family, ranks, {"context_parallel": ranks}, backend="fsdp") | {"sees": False}
        cases = {"it": {"config": own, "saved": "", "grouped": True}}
        (folder := tmp_path / str(ranks)).mkdir()
        found[ranks] = walk_cases(folder, ranks, cases)["it"]
    check_equal(found[2], found[1], relative_l2, replicas=1)


@pytest.fixture
def refusal_of(tmp_path, make_config, model):
    """The refusal with which a run does not open."""

    def find(divided: int, **sections) -> Refusal:
        trainer = {"ranks": 2, "backend_options": {"context_parallel": divided}} | sections.pop("trainer", {})
        sections = {"model": {"path": str(model)}} | sections
        settings = TrainerConfig.model_validate(make_config(trainer=trainer, **sections))
        with pytest.raises(Refusal) as caught:
            Trainer(lambda: None, lambda: True).open_run("runs/one", settings, tmp_path)
        assert caught.value.message.startswith(caught.value.metadata["key"])
        return caught.value

    return find


def test_heads_that_ranks_do_not_divide_are_refused_as_the_run_opens(refusal_of):
    refusal = refusal_of(3, trainer={"ranks": 3})
    assert refusal.metadata["key"] == KEY and "4 attention heads" in refusal.message


def test_a_vision_language_model_divides_rows_of_text_alone(refusal_of, make_config, tmp_path):
    write_tiny_vision(tmp_path / "gemma", family="gemma3")
    refusal = refusal_of(2, model={"path": str(tmp_path / "gemma")})
    assert refusal.metadata["key"] == KEY and "vision-language model" in refusal.message
    settings = make_config(model={"path": str(tmp_path / "gemma")}, sees=False)
    checks.check_run(
        FsdpOptions(context_parallel=2),
        TrainerConfig.model_validate(settings),
        build_algorithm(TrainerConfig.model_validate(settings).algorithm),
    )


def test_a_model_with_attention_of_its_own_is_refused(refusal_of, tmp_path):
    gemma = Gemma2Config(**SIZES, head_dim=16, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    save_model(Gemma2ForCausalLM(gemma), character_tokenizer(), tmp_path / "gemma")
    refusal = refusal_of(2, model={"path": str(tmp_path / "gemma")})
    assert refusal.metadata["key"] == KEY and "eager" in refusal.message
