"""Prefix trees compute the same gradient as one row a sequence, and streaming the same as one batch."""

from __future__ import annotations

import cProfile
import math
import random

import msgspec
import pytest
import torch
from headrace_modelkit import logprobs
from headrace_trainer.backends.shared.figures import TokenFigures
from headrace_trainer.learning.packing import Attends, pack
from headrace_trainer.learning.planning import (
    Costs,
    PrefixTree,
    context,
    plan_balanced,
    plan_batches,
    plan_even,
    plan_rows,
)
from headrace_trainer.learning.samples import Sample

ANSWERS = [
    [4, 8, 2, 11],
    [4, 8, 3, 11],
    [4, 8, 2, 11],
    [4, 7, 2, 11],
    [1, 8, 2, 11],
    [4, 8, 2, 11],
    [4, 2, 2, 11],
    [4, 8, 0, 11],
]


def test_tree_attends_to_ancestors_only():
    tree = PrefixTree()
    assert tree.add([5, 6, 7]).tolist() == [0, 1, 2]
    assert tree.add([5, 6, 8]).tolist() == [0, 1, 3]
    batch = pack(
        [[Sample([5, 6, 7, 9], [2, 3], [0.0, 0.0]), Sample([5, 6, 8, 9], [2, 3], [0.0, 0.0])]], shared=True
    )
    assert batch.tokens_RL.tolist() == [[5, 6, 7, 8]]
    assert batch.positions_RL.tolist() == [[0, 1, 2, 2]]
    assert batch.mask_R1LL[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert (batch.sources_U[batch.index_K].tolist(), batch.targets_U[batch.index_K].tolist()) == (
        [1, 2, 1, 3],
        [7, 9, 8, 9],
    )


def test_rows_respect_the_budget_and_keep_every_sequence(sequences):
    group = sequences(3, count=8)
    rows = plan_rows(group, 16, shared=True)
    assert sorted(index for _, members in rows for index in members) == list(range(8))
    assert all(length <= 16 for length, _ in rows)
    assert sum(length for length, _ in rows) < sum(len(context(sequence)) for sequence in group)
    batches = plan_batches([5, 9, 3, 9], 18)
    assert batches == [[1, 3], [0, 2]]


@pytest.mark.parametrize(
    ("lengths", "ranks", "sizes"),
    [
        ([5] * 12, 2, [6, 6]),  # not 7 rows beside 5
        ([5] * 3, 2, [2, 1]),  # not 3 beside none
        ([5] * 8, 4, [2, 2, 2, 2]),
        ([5], 4, [1]),
        ([5] * 10, 1, [7, 3]),  # nobody waits for anybody
        ([30, 5, 5, 5, 5, 5], 2, [1, 5]),
        ([5] * 15, 2, [4, 4, 4, 3]),  # two rounds, and the second is no shorter than it has to be
    ],
)
def test_ranks_have_even_micro_batches(lengths, ranks, sizes):
    batches = plan_even(lengths, 35, ranks)
    assert [len(batch) for batch in batches] == sizes
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))


@pytest.mark.parametrize("budget", [24, 4096])
def test_shared_prefixes_give_the_plain_gradient(make_backend, sequences, accumulate, relative_l2, budget):
    groups = [sequences(seed) for seed in range(3)]
    found = {}
    for shared in (True, False):
        backend = make_backend(trainer={"shared_prefix": shared})
        accumulate(backend, groups, budget, shared=shared)
        found[shared] = backend.reduced_gradient(17.0)
    assert relative_l2(found[True], found[False]) <= 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_streaming_gives_the_gradient_of_the_batch(
    make_backend, sequences, accumulate, relative_l2, dtype, bound
):
    groups = [sequences(seed) for seed in range(6)]
    backend = make_backend(model={"dtype": dtype})
    accumulate(backend, groups, 4096)
    batch = backend.reduced_gradient(50.0)
    random.Random(0).shuffle(groups)
    for group in groups:
        accumulate(backend, [group], 24)
    assert 0 < relative_l2(backend.reduced_gradient(50.0), batch) <= bound


@pytest.mark.parametrize(
    "option", [{"gradient_checkpointing": True}, {"backend_options": {"shard": "weights"}}]
)
def test_memory_options_leave_the_gradient_alone(make_backend, sequences, accumulate, relative_l2, option):
    groups = [sequences(seed) for seed in range(3)]
    found = {}
    for on in (True, False):
        backend = make_backend(trainer=option if on else {})
        for group in groups:
            accumulate(backend, [group], 64)
        found[on] = backend.reduced_gradient(17.0)
    assert relative_l2(found[True], found[False]) <= 1e-5


def test_infer_gives_the_model_s_log_probs(make_backend, sequences):
    from headrace_modelkit.loading import load_model
    from headrace_schema.sections.generating import ModelSection

    backend = make_backend(sampling={"temperature": 0.8})
    group = sequences(1)
    model = load_model(ModelSection.model_validate(backend._config.model.model_dump()))
    for sequence, found in zip(group, backend.infer([group], ["old_log_probs"]), strict=True):
        with torch.no_grad():
            logits_TV = model(torch.tensor([sequence.tokens])).logits[0] / 0.8
        expected_TV = logits_TV.log_softmax(-1)
        expected = [
            float(expected_TV[position - 1, sequence.tokens[position]]) for position in sequence.trained
        ]
        torch.testing.assert_close(torch.tensor(found["old_log_probs"]), torch.tensor(expected))


def test_each_token_has_the_log_prob_of_the_temperature_that_it_was_drawn_at(make_backend, sequences):
    """Also where two samples drew the same token behind the same tokens, at different temperatures."""
    from headrace_modelkit.loading import load_model
    from headrace_schema.sections.generating import ModelSection

    backend = make_backend(sampling={"temperature": 0.8})
    cold, unsaid = sequences(1, count=2)
    mixed = [0.5 if index % 2 else 1.7 for index in range(len(cold.trained))]
    group = [msgspec.structs.replace(cold, temperatures=mixed), cold, unsaid]
    model = load_model(ModelSection.model_validate(backend._config.model.model_dump()))
    found = backend.infer([group], ["old_log_probs"])
    for sequence, own in zip(group, found, strict=True):
        with torch.no_grad():
            logits_TV = model(torch.tensor([sequence.tokens])).logits[0]
        at = sequence.temperatures or [0.8] * len(sequence.trained)
        expected = [
            float((logits_TV[position - 1] / temperature).log_softmax(-1)[sequence.tokens[position]])
            for position, temperature in zip(sequence.trained, at, strict=True)
        ]
        torch.testing.assert_close(torch.tensor(own["old_log_probs"]), torch.tensor(expected))


def test_a_packed_token_knows_its_sequence_and_its_old_log_prob():
    told = Sample([5, 6, 7], [1, 2], [0.0, 0.0], [1.0, 2.0], 1.0, {"old_log_probs": [-0.5, -0.25]})
    untold = Sample([5, 8], [1], [0.0], [3.0], 1.0)
    batch = pack([[untold, told], [untold]], shared=True)
    assert batch.sequences_K.tolist() == [0, 1, 1, 2]
    assert batch.advantages_K.tolist() == [3.0, 1.0, 2.0, 3.0]
    assert batch.columns_K["old_log_probs"].nan_to_num(nan=9.0).tolist() == [9.0, -0.5, -0.25, 9.0]


def test_old_log_probs_let_the_clip_take_effect(make_backend, sequences):
    """Below the clip's bound a negative advantage gives no gradient; at the policy's own log-probs it does."""
    backend = make_backend()
    group = [msgspec.structs.replace(s, advantages=[-1.0] * len(s.trained)) for s in sequences(1)]
    own = backend.infer([group], ["old_log_probs"])
    for shift, clipped in ((0.0, 0.0), (1.0, 1.0)):
        moved = [
            msgspec.structs.replace(
                s, columns={"old_log_probs": [v + shift for v in values["old_log_probs"]]}
            )
            for s, values in zip(group, own, strict=True)
        ]
        assert backend.micro([moved])
        report = backend.commit(7.0, 0.0)
        sums = report.token_sums
        assert sums["own.clip_fraction"] / sums["tokens"] == clipped
        assert sums["own.approx_kl"] / sums["tokens"] == pytest.approx(math.exp(-shift) - 1 + shift, abs=1e-4)
        assert (report.grad_norm == 0) is (shift > 0)


def test_a_non_finite_loss_accumulates_nothing(make_backend, sequences, accumulate, relative_l2):
    backend = make_backend()
    good, bad = sequences(1), sequences(2)
    accumulate(backend, [good], 512)
    poisoned = [
        Sample(s.tokens, s.trained, s.engine_log_probs, [float("inf")] * len(s.trained), 1.0) for s in bad
    ]
    assert not backend.micro([poisoned])
    found = backend.reduced_gradient(7.0)
    accumulate(backend, [good], 512)
    assert relative_l2(found, backend.reduced_gradient(7.0)) == 0


@pytest.mark.parametrize("reshard", [False, True], ids=["kept whole", "resharded"])
def test_the_heads_gradient_is_the_same_in_many_chunks(
    make_backend, sequences, accumulate, relative_l2, monkeypatch, reshard
):
    """bf16 hidden states come in rows, so only the head's sum over chunks and micro-batches can differ."""
    groups = [sequences(seed, count=12) for seed in range(6)]
    backend = make_backend(
        model={"dtype": "bfloat16"}, trainer={"backend_options": {"shard": "weights" if reshard else "state"}}
    )
    found = []
    for rows in (4096, 1):
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", rows * 32)
        for group in groups:
            accumulate(backend, [group], 4096)
        found.append({"head": backend.reduced_gradient(50.0)["lm_head.weight"]})
    assert 0 < relative_l2(found[1], found[0]) <= 1e-3


def test_micro_batches_of_a_round_cost_alike_whatever_their_lengths():
    """A row of 8 costs 72 and one of 4 costs 20: even in nodes is 92 against 60, even in cost 80 against 72."""
    costs = Costs(1.0, padded=False)
    assert plan_balanced([8, 4, 4, 4, 4], 16, 2, costs) == [[[1, 2, 3, 4], [0]]]


def test_what_costs_alike_goes_into_one_round():
    costs, lengths = Costs(1.0, padded=False), [5, 6, 9, 5, 6]
    rounds = plan_balanced(lengths, 10, 2, costs)
    prices = [[costs.of_batch([lengths[row] for row in batch]) for batch in batches] for batches in rounds]
    assert prices == [[90, 60], [42, 42]], "not 90 beside 42, and 60 beside 42"


def test_no_micro_batch_is_above_the_budget_so_that_ranks_cost_alike():
    """With a short row beside the long one both would cost 9, and two rows of its length are above the budget."""
    lengths = [8, *[1] * 10]
    [batches] = plan_balanced(lengths, 10, 2, Costs(padded=False))
    assert sorted(len(batch) * max(lengths[row] for row in batch) for batch in batches) == [8, 10]


def test_one_rank_keeps_the_plan_that_its_hashes_were_made_with():
    lengths = [5, 9, 3, 9]
    assert plan_balanced(lengths, 18, 1, Costs()) == [[batch] for batch in plan_batches(lengths, 18)]


def test_an_engine_log_prob_that_is_missing_counts_in_no_figure():
    """The figures stay on the device until they are read, and are those of the tokens that have one."""
    figures, told = TokenFigures(), torch.tensor([0.25, -0.5, 0.125])
    missing = torch.tensor([math.nan])
    figures._compare(torch.cat([told, missing]))
    plain = TokenFigures()
    plain._compare(told)
    assert figures.sums() == plain.sums() and figures.maxima() == plain.maxima()
    assert figures.sums()["engine_tokens"] == 3.0 and figures.maxima()["mismatch"] == 0.5
    figures._compare(missing)
    figures._compare(torch.empty(0))
    assert figures.sums() == plain.sums()


def test_a_tree_tells_the_path_before_each_piece_in_as_few_runs_as_there_are():
    tree = PrefixTree()
    for tokens in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 5, 6], [1, 2, 3], [1, 2, 4, 7]):
        tree.add(tokens)
    assert tree.pieces == [
        ((0, 3), ()),
        ((3, 5), ((0, 2),)),
        ((5, 6), ((0, 2), (3, 5))),
        ((6, 7), ((0, 2), (3, 4))),
    ]


def test_a_tree_without_room_stays_as_it_is():
    tree = PrefixTree()
    assert tree.add([1, 2, 3], 3).tolist() == [0, 1, 2]
    assert tree.add([1, 2, 4], 3) is None and tree.size == 3
    assert tree.add([1, 2, 4], 4).tolist() == [0, 1, 3]


def test_a_small_micro_batch_is_packed_in_few_calls_of_numpy_and_torch():
    """128 answers of 4 tokens, as examples/tiny.yaml has them: calls of functions, so that no clock is asked."""
    rows = [
        [Sample([*prompt, *answer], [4, 5, 6, 7], [-0.5] * 4, [0.3] * 4, 1.0) for answer in ANSWERS]
        for prompt in ([first, 8, 2, 10] for first in range(16))
    ]
    pack(rows, shared=True, attends=Attends.CHEAPEST)
    profile = cProfile.Profile()
    profile.runcall(pack, rows, shared=True, attends=Attends.CHEAPEST)
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls < 60 * len(rows) * len(ANSWERS)
