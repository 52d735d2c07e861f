"""`backend_options.compile`: the step of a backend that compiles nothing, and what cannot be compiled is refused."""

from __future__ import annotations

import shutil

import pytest
import torch
from headrace_modelkit.presets.tiny import write_tiny_moe
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp import sharding
from headrace_trainer.backends.fsdp.checks import COMPILE, check_run
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import Refusal

pytestmark = pytest.mark.timeout(600)
BUDGETS = (64, 200)
"""Of the micro-batches of two groups: rows of other lengths."""


@pytest.fixture
def gradients(make_backend, sequences, accumulate, monkeypatch):
    """Of a backend whose layers `compiler` compiles and of a plain one; and how many graphs were made."""

    def run(compiler: str, **trainer):
        made: list[int] = []
        plain = torch.compile

        def counted(function, **options):
            def backend(graph, inputs):
                made.append(len(graph.graph.nodes))
                return torch._dynamo.lookup_backend(compiler)(graph, inputs)

            return plain(function, backend=backend, **options)

        monkeypatch.setattr(sharding.torch, "compile", counted)
        found = []
        for wanted in (True, False):
            torch._dynamo.reset()
            backend = make_backend(trainer={"backend_options": {"compile": wanted}, **trainer})
            for seed, budget in enumerate(BUDGETS):
                accumulate(backend, [sequences(seed)], budget)
            found.append(backend.reduced_gradient(17.0))
        return *found, len(made)

    return run


def test_layers_are_compiled_where_the_run_asks_for_it_alone(make_backend, monkeypatch):
    """The quick twin: tracing a layer takes a minute on a busy core, so that steps are nightly."""
    compiled: list[bool] = []
    monkeypatch.setattr(
        sharding.torch, "compile", lambda forward, *, dynamic: compiled.append(dynamic) or forward
    )
    make_backend()
    assert not compiled
    backend = make_backend(trainer={"backend_options": {"compile": True}})
    layers = backend._sharded.model.config.num_hidden_layers
    assert compiled == [True] * layers, "for rows of any length"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "trainer",
    [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 4}}],
    ids=["whole", "recomputed", "adapters"],
)
def test_a_compiled_step_is_the_plain_one(gradients, relative_l2, trainer):
    own, expected, made = gradients("aot_eager", **trainer)
    assert made > 0, "layers were compiled"
    assert relative_l2(own, expected) <= 1e-5


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_what_inductor_makes_is_the_same_step(gradients, relative_l2):
    own, expected, made = gradients("inductor")
    assert made > 0
    assert relative_l2(own, expected) <= 1e-5


def refusal(make_config, **sections) -> Refusal:
    config = TrainerConfig.model_validate(make_config(**sections))
    with pytest.raises(Refusal) as caught:
        check_run(FsdpOptions(compile=True), config, build_algorithm(config.algorithm))
    assert caught.value.reason == "INVALID" and caught.value.message.startswith(COMPILE)
    return caught.value


def test_what_cannot_be_compiled_is_refused_with_its_key(make_config, monkeypatch, tmp_path):
    write_tiny_moe(tmp_path / "experts")
    assert "has experts" in refusal(make_config, model={"path": str(tmp_path / "experts")}).message
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler" in refusal(make_config).message
