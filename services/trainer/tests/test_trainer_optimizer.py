"""The optimizer step equals plain PyTorch on an unsharded model; schedules."""

from __future__ import annotations

import math

import pytest
import torch
from headrace_modelkit.loading import load_model
from headrace_schema.generating import ModelSection
from headrace_schema.learning import OptimizerSection
from headrace_trainer.schedules import learning_rate


def test_steps_equal_plain_adamw_with_clipping(make_backend, sequences, accumulate):
    settings = {"lr": 1e-3, "beta2": 0.9, "weight_decay": 0.1, "grad_clip": 0.05}
    backend = make_backend(optimizer=settings)
    model = load_model(ModelSection.model_validate(backend._config.model.model_dump()))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.9),
        weight_decay=0.1,
    )
    for step in range(3):
        groups = [sequences(seed) for seed in range(3 * step, 3 * step + 3)]
        accumulate(backend, groups, 64)
        report = backend.commit(13.0, 1e-3)
        for sequence in [s for group in groups for s in group]:
            log_probs = model(torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
            taken = torch.stack([log_probs[p - 1, sequence.tokens[p]] for p in sequence.trained])
            (-sequence.advantage * taken.sum() / 13.0).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-4)
        adamw.step()
        adamw.zero_grad()
    own = dict(backend.weights())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(own[name], parameter.detach(), atol=2e-6, rtol=1e-4)


def test_a_non_finite_gradient_changes_nothing(make_backend, sequences, accumulate):
    backend = make_backend()
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    accumulate(backend, [sequences(1)], 512)
    next(iter(backend._sharded.parameters.values())).to_local().data.fill_(float("nan"))
    report = backend.commit(float("nan"), 1e-3)
    assert not report.finite and not math.isfinite(report.grad_norm)
    assert backend.optimizer_steps == 0
    assert sum(not torch.equal(before[name], tensor) for name, tensor in backend.weights()) == 1


def test_schedules():
    base = OptimizerSection(lr=1.0)
    assert [learning_rate(base, step, 10) for step in (0, 9)] == [1.0, 1.0]
    linear = OptimizerSection.model_validate({"lr": 1.0, "schedule": {"name": "linear", "warmup_steps": 2}})
    rates = [learning_rate(linear, step, 10) for step in (0, 1, 2, 6, 10, 12)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0, 0.0])
    schedule = {"name": "cosine", "final_fraction": 0.1, "total_steps": 4}
    cosine = OptimizerSection.model_validate({"lr": 1.0, "schedule": schedule})
    assert [learning_rate(cosine, step, 99) for step in (0, 2, 4)] == pytest.approx([1.0, 0.55, 0.1])
