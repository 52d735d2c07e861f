"""Runs from submission to the end, in every placement, with their ledgers audited."""

from __future__ import annotations

import pytest
from harness.ledger import audit
from harness.specs import BATCH

DIGITS = set("0123456789")


@pytest.mark.parametrize(
    ("mode", "memory"),
    [("collocated", None), ("collocated", "resident"), ("disaggregated", None), ("hybrid", None)],
)
def test_every_slot_is_trained_exactly_once(fleet, spec_of, mode, memory):
    run = fleet.succeed(
        fleet.submit(
            spec_of(placement__mode=mode, placement__memory=memory, steps=4, tracking__ratios=memory is None)
        )
    )
    found = audit(fleet, run)
    assert len(found.trained) == 4 * BATCH and not found.dropped and found.rewinds == 0
    assert [evaluation.step for evaluation in run.evaluations] == [0, 4]
    steps = fleet.client.metrics(run.id)
    assert [(step.step, step.trained, step.max_staleness) for step in steps] == [
        (n, BATCH, 0) for n in range(1, 5)
    ]
    assert all({"generate", "score", "learn"} <= step.stage_s.keys() for step in steps)
    # One engine and one trainer in the same arithmetic: what was sampled is what is learned from.
    shown = fleet.client.trajectories(run.id)
    assert all(len(each.new_log_probs) == (memory is None and len(each.log_probs)) for each in shown)
    assert memory or any(each.new_log_probs != each.log_probs for each in shown), "the policy has moved"
    assert all(item.log_prob_compared_tokens and item.log_prob_mismatch_mean < 1e-3 for item in found.live)


def test_both_placements_sample_the_same_first_step(fleet, spec_of):
    def first_step(mode: str) -> list[tuple]:
        run = fleet.succeed(fleet.submit(spec_of(placement__mode=mode, steps=1)))
        found = fleet.client.trajectories(run.id, step=1)
        return sorted((t.prompt_ordinal, t.sample_index, t.prompt, t.completion, t.reward) for t in found)

    in_turns, side_by_side = first_step("collocated"), first_step("disaggregated")
    assert in_turns == side_by_side
    assert len(in_turns) == BATCH and len({completion for *_, completion, _ in in_turns}) > 4


@pytest.mark.nightly  # quick: `ci.recorded` has the weights that a seed ends with
def test_the_seed_decides(fleet, spec_of):
    def answers(seed: int) -> list[str]:
        run = fleet.succeed(fleet.submit(spec_of(seed=seed, steps=1)))
        return [t.completion for t in fleet.client.trajectories(run.id)]

    assert answers(1) != answers(2)
