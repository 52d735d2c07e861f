"""The optimizer step equals plain PyTorch on an unsharded model; schedules."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from headrace_modelkit.loading import load_model
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import OptimizerSection
from headrace_trainer.learning.passes import learning_rate
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
)


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
            (-sequence.advantages[0] * taken.sum() / 13.0).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-4)
        adamw.step()
        adamw.zero_grad()
    own = dict(backend.weights())
    for name, parameter in model.named_parameters():
        # Adam divides a gradient by its own size, so the float noise of the smallest ones shows in steps of 1e-3.
        torch.testing.assert_close(own[name], parameter.detach(), atol=5e-6, rtol=1e-4)


def test_a_non_finite_gradient_changes_nothing(make_backend, sequences, accumulate):
    backend = make_backend()
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    accumulate(backend, [sequences(1)], 512)
    next(iter(backend._sharded.parameters.values())).to_local().data.fill_(float("nan"))
    report = backend.commit(float("nan"), 1e-3)
    assert not report.finite and not math.isfinite(report.grad_norm)
    assert backend.optimizer_steps == 0
    assert sum(not torch.equal(before[name], tensor) for name, tensor in backend.weights()) == 1


SCHEDULES = {
    ("constant", 0.0): get_constant_schedule_with_warmup,
    ("linear", 0.0): get_linear_schedule_with_warmup,
    ("linear", 0.1): partial(get_polynomial_decay_schedule_with_warmup, lr_end=0.2, power=1.0),
    ("cosine", 0.0): get_cosine_schedule_with_warmup,
    ("cosine", 0.1): partial(get_cosine_with_min_lr_schedule_with_warmup, min_lr_rate=0.1),
}


@pytest.mark.parametrize("warmup", [0, 1, 3, 9])
@pytest.mark.parametrize("kind", SCHEDULES, ids=str)
def test_schedules_equal_those_of_transformers(kind, warmup):
    name, final = kind
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    total = {} if name == "constant" else {"num_training_steps": 10}
    theirs = SCHEDULES[kind](adamw, num_warmup_steps=warmup, **total)
    schedule = {"name": name, "warmup_steps": warmup, "final_fraction": final}
    config = OptimizerSection.model_validate({"lr": 2.0, "schedule": schedule})
    for step in range(11):
        assert learning_rate(config, step, 10) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), step
        adamw.step()
        theirs.step()


def test_a_schedule_stays_at_its_final_rate_and_may_end_before_the_run():
    schedule = {"name": "cosine", "final_fraction": 0.1, "total_steps": 4}
    cosine = OptimizerSection.model_validate({"lr": 1.0, "schedule": schedule})
    assert [learning_rate(cosine, step, 99) for step in (0, 2, 4, 9)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
