"""`backend_options.compile` gives the step of an uncompiled backend. Inductor is for the nightly."""

from __future__ import annotations

import shutil

import pytest
import torch
from headrace_trainer.backends.fsdp import sharding


def gradients(make_backend, groups, accumulate, monkeypatch, compiler: str):
    """Of a compiled backend and a plain one, through micro-batches of two shapes; how often a layer was compiled."""
    compiled: list[int] = []
    plain = torch.compile

    def counted(function, **options):
        def backend(graph, inputs):
            compiled.append(len(graph.graph.nodes))
            return torch._dynamo.lookup_backend(compiler)(graph, inputs)

        return plain(function, backend=backend, **options)

    monkeypatch.setattr(sharding.torch, "compile", counted)
    found = []
    for wanted in (True, False):
        torch._dynamo.reset()
        backend = make_backend(trainer={"backend_options": {"compile": wanted}})
        for group in groups:
            accumulate(backend, [group], 64)
        found.append(backend.reduced_gradient(17.0))
    return *found, compiled


def test_a_compiled_step_is_the_plain_one(make_backend, sequences, accumulate, relative_l2, monkeypatch):
    groups = [sequences(seed) for seed in range(2)]
    own, expected, compiled = gradients(make_backend, groups, accumulate, monkeypatch, "aot_eager")
    assert compiled, "layers were compiled"
    assert relative_l2(own, expected) <= 1e-5


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_the_same_step(make_backend, sequences, accumulate, relative_l2, monkeypatch):
    groups = [sequences(seed) for seed in range(2)]
    own, expected, compiled = gradients(make_backend, groups, accumulate, monkeypatch, "inductor")
    assert compiled
    assert relative_l2(own, expected) <= 1e-5
