"""Random numbers, processed distributions and the draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from headrace_rollout.engines.samples import Distribution
from headrace_rollout.engines.transformers.batch import Batch
from headrace_rollout.engines.transformers.sampling import (
    RowDistributions,
    draw,
    philox4x32,
    process,
    uniforms,
)
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

V = 50


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    """The known-answer tests of the authors' Random123 library."""

    def words(text):
        return tuple(np.array([int(word, 16)], dtype=np.uint64) for word in text.split())

    assert [f"{int(word[0]):08x}" for word in philox4x32(words(counter), words(key))] == expected.split()


CPU = torch.device("cpu")


def test_uniforms_are_uniform_and_depend_on_every_coordinate():
    position = np.arange(20_000)
    zeros = np.zeros_like(position)
    values = uniforms(zeros - 3, zeros + 2**40, zeros, position)
    assert values.dtype == np.float32 and values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 45, "chi-squared, 19 degrees of freedom"
    coordinates = {"seed": 1, "prompt_ordinal": 1, "sample_index": 1, "position": 1}
    moves = [{}, *({name: 2} for name in coordinates), {"seed": 1 + 2**32}, {"prompt_ordinal": 1 + 2**32}]
    found = {
        float(uniforms(**{name: np.array([value]) for name, value in {**coordinates, **move}.items()})[0])
        for move in moves
    }
    assert len(found) == len(moves)


def logits(rows=4, scale=3.0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(0)) * scale


@pytest.mark.parametrize(
    ("distribution", "reference"),
    [
        (Distribution(top_k=5), TopKLogitsWarper(5)),
        (Distribution(top_p=0.7), TopPLogitsWarper(0.7)),
        (Distribution(min_p=0.1), MinPLogitsWarper(0.1)),
    ],
)
def test_truncation_equals_transformers(distribution, reference):
    found = process(logits(), RowDistributions.of([distribution] * 4, CPU))
    assert torch.equal(found, reference(None, logits()))
    assert 0 < found.isinf().sum() < found.numel() - 4


def test_the_repetition_penalty_equals_transformers():
    seen_ids = torch.tensor([[1, 2, 3], [4, 4, 4], [0, 49, 7], [9, 8, 9]])
    seen = torch.zeros(4, V, dtype=torch.bool).scatter(1, seen_ids, True)
    found = process(logits(), RowDistributions.of([Distribution(repetition_penalty=1.3)] * 4, CPU), seen)
    assert torch.equal(found, RepetitionPenaltyLogitsProcessor(1.3)(seen_ids, logits()))


def test_each_row_has_its_own_distribution():
    rows = [Distribution(), Distribution(0.5, top_k=2), Distribution(2.0, top_p=0.4), Distribution(min_p=0.3)]
    together = process(logits(), RowDistributions.of(rows, CPU))
    for index, row in enumerate(rows):
        alone = process(logits()[index : index + 1], RowDistributions.of([row], CPU))
        torch.testing.assert_close(together[index : index + 1], alone)


def test_the_draw_follows_the_distribution_and_its_log_probs():
    rows = 20_000
    scores = process(
        logits(1).expand(rows, V), RowDistributions.of([Distribution(0.8, top_k=10)] * rows, CPU)
    )
    uniform = (torch.arange(rows) + 0.5) / rows
    tokens, log_probs = draw(scores, RowDistributions.of([Distribution()] * rows, CPU), uniform)
    expected = scores[0].log_softmax(-1)
    torch.testing.assert_close(log_probs, expected[tokens])
    frequency = torch.bincount(tokens, minlength=V) / rows
    torch.testing.assert_close(frequency, expected.exp(), atol=2e-4, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    scores = torch.full((3, V), float("-inf"))
    scores[0, 7], scores[1, 0], scores[2, V - 1] = 5.0, 5.0, -80.0
    scores[:, 20] = torch.tensor([1.0, 2.0, -80.0])
    tokens, log_probs = draw(
        scores, RowDistributions.of([Distribution()] * 3, CPU), torch.full((3,), uniform)
    )
    assert tokens.tolist() == ([7, 0, 20] if uniform == 0 else [20, 20, V - 1])
    assert log_probs.isfinite().all()


def test_greedy_rows_take_the_best_and_report_temperature_one():
    rows = RowDistributions.of([Distribution(0.0), Distribution(1.0)], CPU)
    two = logits(2)
    tokens, log_probs = draw(process(two, rows), rows, torch.tensor([0.999, 0.0]))
    assert tokens[0] == two[0].argmax() and tokens[1] == 0
    torch.testing.assert_close(log_probs[0], two[0].log_softmax(-1).max())


@given(count=st.integers(1, 12), data=st.data())
def test_removing_rows_keeps_each_remaining_sequence_with_its_numbers(count, data):
    batch = Batch(12)
    batch.trajectories = [f"s{row}" for row in range(count)]
    batch.routes = [bytearray([row]) for row in range(count)]
    batch._histories = [(f"s{row}", row) for row in range(count)]
    batch.read = [[row] for row in range(count)]
    batch.length[:count] = np.arange(count)
    gone = data.draw(st.sets(st.integers(0, count - 1)))
    targets, sources = batch.remove(list(gone))
    assert len(targets) == len(sources) <= len(gone)
    kept = {name: int(batch.length[row]) for row, name in enumerate(batch.trajectories)}
    assert kept == {f"s{row}": row for row in range(count) if row not in gone}
    assert [f"s{own[0]}" for own in batch.routes] == batch.trajectories
    assert [own for own, _ in batch._histories] == batch.trajectories
    assert [f"s{own}" for [own] in batch.read] == batch.trajectories
