"""How many samples an engine of another project is asked for at once, by the lengths that were measured."""

import pytest
from headrace_rollout.engines.hosted.lengths import ENOUGH, Lengths
from headrace_schema.gpu_defaults import FEWEST_ROWS


def measured(lengths, answer, prompt=0.0, count=ENOUGH):
    for _ in range(count):
        lengths.asked(prompt)
        lengths.ended(answer)
    return lengths


def test_until_lengths_are_measured_the_runs_own_number_holds():
    lengths = measured(Lengths(), 20_000, count=ENOUGH - 1)
    assert lengths.limit(256, 400_000) == 256
    lengths.ended(20_000)
    assert lengths.limit(256, 400_000) == 20, "the cache holds so many of the length that was measured"
    assert lengths.limit(256, 0) == 256, "an engine that does not tell its cache"


@pytest.mark.parametrize(
    ("answer", "prompt", "limit"),
    [(1_000, 0.0, 256), (1_500, 100.0, 250), (1_500, 2_500.0, 100), (100_000, 0.0, FEWEST_ROWS)],
)
def test_a_groups_prompt_counts_once_and_the_number_stays_within_its_bounds(answer, prompt, limit):
    assert measured(Lengths(), answer, prompt).limit(256, 400_000) == limit
    assert measured(Lengths(), answer, prompt).limit(8, 400_000) == 8


def test_answers_that_become_shorter_let_more_run():
    lengths = measured(Lengths(), 8_000)
    before = lengths.limit(256, 400_000)
    assert before == 50 and measured(lengths, 1_000, count=2_000).limit(256, 400_000) == 256
