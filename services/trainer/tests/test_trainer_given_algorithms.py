"""Losses and gradients of answers that the data gives: TRL's functions, and shapes at the edge.

`data/preference_vectors.json` names TRL's function of each case. It was made by calling these functions of the package
with stand-ins for model and accelerator, on log-probs drawn with seed 0: four pairs, of which one has an answer of one
token, one two equal answers, and one nothing but ends.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headrace_schema.sections.learning import AlgorithmSection
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import Outcomes, TokenBatch, batch_figures_of
from headrace_trainer.algorithms.contract import check_algorithm

VECTORS = json.loads((Path(__file__).parent / "data" / "preference_vectors.json").read_text())
LENGTHS = VECTORS["lengths"]
NAMES = ("sft", "dpo", "ipo", "simpo", "orpo", "kto")


def outcomes_of(lengths, rewards, log_probs, reference) -> Outcomes:
    longest = max(1, *lengths)
    pad = [[0.0] * longest] * (len(lengths) - len(log_probs))
    columns = {"old_log_probs": log_probs, "reference_log_probs": reference}
    return Outcomes(
        rewards_B=torch.tensor(rewards, dtype=torch.float64),
        groups_B=torch.arange(len(lengths)) // 2,
        mask_BT=torch.arange(longest) < torch.tensor(lengths)[:, None],
        lengths_B=torch.tensor(lengths),
        longest=longest,
        columns_BT={name: torch.tensor(rows + pad, dtype=torch.float64) for name, rows in columns.items()},
    )


def learned(name: str, options: dict, lengths=LENGTHS, rewards=None):
    """(loss, gradient of the log-probs) that a step would have."""
    algorithm = build_algorithm(AlgorithmSection(name=name, options=options, group_size=2))
    rewards = rewards or [1.0, 0.0] * (len(lengths) // 2)
    outcomes = outcomes_of(lengths, rewards, VECTORS["log_probs"], VECTORS["reference"])
    advantages_BT = algorithm.advantages(outcomes)
    log_probs_BT = outcomes.columns_BT["old_log_probs"].clone().requires_grad_()
    places = outcomes.mask_BT.nonzero()
    values_K = log_probs_BT[places[:, 0], places[:, 1]]
    weights = [algorithm.token_weight(lengths[row]) for row in places[:, 0].tolist()]
    batch = TokenBatch(
        log_probs_K=values_K,
        old_log_probs_K=values_K.detach(),
        engine_log_probs_K=torch.full_like(values_K, torch.nan),
        advantages_K=advantages_BT[places[:, 0], places[:, 1]],
        weights_K=torch.tensor(weights, dtype=torch.float64),
        sequences_K=places[:, 0],
    )
    divisor = algorithm.denominator(float(len(values_K)), sum(length > 0 for length in lengths))
    found = algorithm.loss(batch).loss / divisor
    found.backward()
    return batch_figures_of(algorithm).get("loss", found.item()), log_probs_BT.grad


@pytest.mark.parametrize("case", VECTORS["cases"])
def test_loss_and_gradient_are_those_of_trl(case):
    expected, name = VECTORS["cases"][case], case.partition("/")[0]
    labels = [value for label in VECTORS["kto_labels"] for value in (1.0 if label else -1.0, 0.0)]
    loss, gradient = learned(name, expected["options"], rewards=labels if name == "kto" else None)
    assert loss == pytest.approx(expected["loss"], abs=1e-6)
    wanted = torch.tensor(expected["grad"], dtype=torch.float64)
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_a_pair_that_is_masked_counts_for_nothing(name):
    loss, gradient = learned(name, {})
    again, longer = learned(name, {}, [*LENGTHS, 0, 0])
    assert again == pytest.approx(loss) and not longer[len(LENGTHS) :].any()
    torch.testing.assert_close(longer[: len(LENGTHS)], gradient)


def test_the_likelihood_weighs_rows_and_aggregates_as_the_options_say():
    rewards, rows = [1.0, 2.0] * 4, torch.tensor(VECTORS["log_probs"], dtype=torch.float64)
    weighed = -torch.tensor(rewards)[:, None] * rows
    lengths = torch.tensor(LENGTHS)
    mask = torch.arange(max(LENGTHS)) < lengths[:, None]
    expected = {
        "token-mean": (weighed * mask).sum() / mask.sum(),
        "seq-mean-token-mean": ((weighed * mask).sum(1) / lengths).mean(),
        "seq-mean-token-sum": (weighed * mask).sum(1).mean(),
    }
    for aggregation, value in expected.items():
        loss, _ = learned("sft", {"loss_aggregation": aggregation}, rewards=rewards)
        assert loss == pytest.approx(value.item()), aggregation


@pytest.mark.parametrize("name", NAMES)
def test_the_contract_holds(name):
    check_algorithm(name, {})
