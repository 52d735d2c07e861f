"""How many samples an engine of another project is asked for at once, by the lengths that were measured."""

import pytest
from headrace_rollout.engines.hosted.rows import ENOUGH, Rows
from headrace_schema.gpu_defaults import FEWEST_ROWS


def measured(rows, answer, prompt=0.0, count=ENOUGH):
    for _ in range(count):
        rows.asked(prompt)
        rows.ended(answer)
    return rows


def test_until_lengths_are_measured_the_runs_own_number_holds():
    rows = measured(Rows(256), 20_000, count=ENOUGH - 1)
    assert rows.limit(400_000) == 256
    rows.ended(20_000)
    assert rows.limit(400_000) == 20, "the cache holds so many of the length that was measured"
    assert rows.limit(0) == 256, "an engine that does not tell its cache"


@pytest.mark.parametrize(
    ("answer", "prompt", "limit"),
    [(1_000, 0.0, 256), (1_500, 100.0, 250), (1_500, 2_500.0, 100), (100_000, 0.0, FEWEST_ROWS)],
)
def test_a_groups_prompt_counts_once_and_the_number_stays_within_its_bounds(answer, prompt, limit):
    assert measured(Rows(256), answer, prompt).limit(400_000) == limit
    assert measured(Rows(8), answer, prompt).limit(400_000) == 8


def test_answers_that_become_shorter_let_more_run():
    rows = measured(Rows(256), 8_000)
    before = rows.limit(400_000)
    assert before == 50 and measured(rows, 1_000, count=2_000).limit(400_000) == 256
