"""The replay store: what it keeps, draws and counts, and what is left of it when its process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from headrace_robots.policies.directory import policy_config
from headrace_robots.trainer.off_policy.plugins import SacOptions
from headrace_robots.trainer.replay.draws import SumTree
from headrace_robots.trainer.replay.opening import open_store
from headrace_robots.trainer.replay.records import Sampling, Spaces, Stored, StoreProblem, read_uses
from headrace_robots.trainer.replay.store import ReplayStore

SPACES = Spaces(2, 1)


def episode(number, chunks=9, *, terminated=False, success=False, pictures=None, spaces=SPACES):
    """Its rewards are its number, and its states count its chunks."""
    states = np.zeros((chunks + 1, spaces.state_size), np.float32)
    states[:, 0] = np.arange(chunks + 1) + 100 * number
    return Stored(
        (number, 0),
        1,
        states,
        np.full((chunks, spaces.action_size), number, np.float32),
        np.full(chunks, number, np.float32),
        terminated,
        success,
        pictures or {},
    )


def generator(seed=0):
    return np.random.default_rng(seed)


@pytest.fixture
def store(tmp_path):
    opened = []

    def make(capacity=60, spaces=SPACES, name="store.sqlite", **sampling):
        opened.append(ReplayStore(name and tmp_path / name, capacity, spaces, Sampling(**sampling)))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_the_oldest_episodes_go_beyond_the_capacity_and_nothing_else(store):
    own = store()
    for number in range(20):
        own.insert(episode(number))
        own.commit()
        assert len(own.ring) <= 60 and len(own) == len(own.ring) - len(own.episodes)
    assert [each.prompt for each in own.episodes.values()] == [*range(14, 20)]
    drawn = own.draw(5000, generator())
    # Every chunk is drawn, none of what an episode ended with as a beginning, and what follows one is the next.
    assert {*drawn.actions_BA[:, 0]} == {14, 15, 16, 17, 18, 19}
    assert Counter(drawn.states_BS[:, 0] % 100).keys() == {*range(9)}
    assert (drawn.next_states_BS[:, 0] == drawn.states_BS[:, 0] + 1).all()


def test_an_end_is_worth_nothing_behind_it_and_a_cut_is(store):
    own = store(gamma=0.5)
    own.insert(episode(1, 3, terminated=True))
    own.insert(episode(2, 3))
    drawn = own.draw(200, generator())
    last = drawn.states_BS[:, 0] % 100 == 2
    ended = drawn.actions_BA[:, 0] == 1
    assert (drawn.discounts_B == np.where(last & ended, 0.0, 0.5)).all()


@pytest.mark.parametrize("draws", ["uniform", "recent", "prioritised"])
def test_a_store_that_is_opened_again_or_rewound_draws_the_same(draws, store):
    own = store(draws=draws)
    for number in range(12):
        own.insert(episode(number))
        drawn = own.draw(16, generator(number))
        own.prioritise(drawn.rows_B, drawn.rewards_B * number)
        own.commit()
    before = own.draw(64, generator(5)).rows_B
    own.rollback()
    at, uses = own.commit_number, own.uses()
    for number in range(12, 20):
        own.insert(episode(number))
        drawn = own.draw(16, generator(number))
        own.prioritise(drawn.rows_B, drawn.rewards_B)
        own.commit()
    assert [*own.episodes] != [*range(7, 13)]
    assert own.rewind(at) == 0
    assert (own.draw(64, generator(5)).rows_B == before).all()
    own.rollback()
    assert own.uses() == uses
    again = store(draws=draws)
    assert again.commit_number == at and (again.draw(64, generator(5)).rows_B == before).all()


def test_what_is_not_committed_is_undone(store):
    own = store()
    own.insert(episode(1))
    own.commit()
    for number in range(2, 10):  # some of which make the first one go
        own.insert(episode(number))
    assert 1 not in {each.prompt for each in own.episodes.values()}
    own.draw(32, generator())
    own.rollback()
    assert [each.prompt for each in own.episodes.values()] == [1]
    assert [(use.slot, use.uses) for use in own.uses()] == [((1, 0), 0)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_store_that_a_lost_group_left_in_a_step_is_opened_by_the_next(ranks, tmp_path, robots):
    policy, options = policy_config(robots.POLICY).build(0), SacOptions(capacity=60)
    stored = lambda number: episode(number, spaces=Spaces(6, 2))  # noqa: E731
    left, _ = open_store(tmp_path, options, policy, 0, 0, 1)
    left.insert(stored(1))
    left.commit()
    left.insert(stored(2))  # and here another rank is killed
    again, note = open_store(tmp_path, options, policy, 1, 0, ranks)
    assert [each.prompt for each in again.episodes.values()] == [1] and not note
    again.insert(stored(3))
    again.commit()
    again.close()


def test_uses_add_up_to_the_draws_and_stay_when_an_episode_goes(store, tmp_path):
    own = store()
    for number in range(12):
        own.insert(episode(number))
        own.draw(20, generator(number))
        own.commit()
        if number == 8:
            size = len(own.uses())
            own.forget(6)
            assert len(own.uses()) == size
    uses = read_uses(tmp_path / "store.sqlite")
    assert sum(use.uses for use in uses) == 12 * 20 and uses == own.uses()
    assert [use.slot for use in uses] == [(number, 0) for number in range(12)]
    assert [use.evicted for use in uses] == [True] * 6 + [False] * 6


def test_the_newest_are_drawn_more_often_and_large_differences_too(store):
    recent = store(capacity=10_000, draws="recent", recency=2.0)
    for number in range(1000):
        recent.insert(episode(number))
    newer = (recent.draw(20_000, generator()).actions_BA >= 500).mean()
    assert newer == pytest.approx(0.5**0.5, abs=0.02)
    own = store(draws="prioritised", priority_exponent=1.0, importance_exponent=1.0, name=None)
    for number in range(6):
        own.insert(episode(number))
    rows = np.arange(own.ring.first, own.ring.end)
    begins = rows[own.ring.left_N[own.ring.places(rows)] > 0]
    wanted = np.where(begins == begins[7], 99.0, 1.0)
    own.prioritise(begins, wanted)
    drawn = own.draw(20_000, generator())
    share = (drawn.rows_B == begins[7]).mean()
    assert share == pytest.approx(99 / (99 + len(begins) - 1), abs=0.02)
    # Weights make up for it: each chunk counts alike in the sum.
    heavy = drawn.weights_B[drawn.rows_B == begins[7]]
    light = drawn.weights_B[drawn.rows_B != begins[7]]
    assert light.max() == 1 and heavy[0] == pytest.approx(1 / 99, rel=0.01)


def test_a_sum_tree_draws_in_proportion_and_never_what_is_empty():
    tree = SumTree(6)
    tree.set(np.array([0, 2, 5]), np.array([1.0, 3.0, 4.0]))
    assert tree.total == 8
    assert tree.find(np.array([0.5, 1.5, 3.99, 4.0, 7.99, 8.0])).tolist() == [0, 2, 2, 5, 5, 5]
    tree.set(np.array([5]), np.array([0.0]))
    assert tree.find(np.array([3.99999, 4.0])).tolist() == [2, 2]


def test_pictures_stay_compressed_until_they_are_drawn(store, tmp_path):
    spaces = Spaces(1, 1, {"top": (8, 8, 3)})
    own = store(capacity=200, spaces=spaces)
    for number in range(4):
        frames = np.full((10, 8, 8, 3), number, np.uint8)
        frames[:, 0, 0, 0] = np.arange(10)
        own.insert(episode(number, pictures={"top": frames}, spaces=spaces))
    own.commit()
    drawn = own.draw(32, generator())
    pictures = own.pictures(drawn.next_rows_B, "top")
    assert (pictures[:, 1, 1, 0] == drawn.actions_BA[:, 0]).all()
    assert (pictures[:, 0, 0, 0] == drawn.next_states_BS[:, 0] % 100).all()
    assert own.ring.bytes < 200 * 64, "rows have no pictures"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"states": np.nan}, "states are not all finite"),
        ({"rewards": np.inf}, "rewards are not all finite"),
        ({"chunks": 90}, "algorithm.options.capacity"),
        ({"size": 3}, "do not fit"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_moves(change, said, store):
    own = store()
    own.insert(episode(1))
    own.commit()
    wrong = episode(2, change.get("chunks", 9), spaces=Spaces(change.get("size", 2), 1))
    wrong.states_TS[0, 1] = change.get("states", 0)
    wrong.rewards_T[3] = change.get("rewards", 0)
    with pytest.raises(StoreProblem, match=said):
        own.insert(wrong)
    assert [each.prompt for each in own.episodes.values()] == [1] and len(own) == 9


def test_a_file_of_another_space_is_refused_with_both(store):
    store().close()
    with pytest.raises(StoreProblem, match=r'"state": 2.*"state": 5'):
        store(spaces=Spaces(5, 1))


@pytest.mark.parametrize("cut", ["body", "file"])
def test_a_store_that_is_cut_says_so(cut, store, tmp_path):
    own = store()
    for number in range(6):
        own.insert(episode(number))
    own.commit()
    path = tmp_path / "store.sqlite"
    if cut == "body":
        own._file.execute("UPDATE episodes SET body = substr(body, 1, 20) WHERE id = 3")
        own.close()
    else:
        own._file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        own.close()
        os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StoreProblem, match=r"store.sqlite is damaged.*delete it"):
        store()


def test_a_store_whose_disk_is_full_says_which_file_and_keeps_what_it_had(store):
    own = store(capacity=100_000)
    own.insert(episode(1))
    own.commit()
    own._file.execute(f"PRAGMA max_page_count = {own._file.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(StoreProblem, match=r"store.sqlite: database or disk is full: free the disk"):
        for number in range(2, 200):
            own.insert(episode(number, 200))
    own.rollback()
    assert [each.prompt for each in own.episodes.values()] == [1]


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_robots_replay_store as here
from headrace_robots.trainer.replay.records import Sampling
from headrace_robots.trainer.replay.store import ReplayStore
store = ReplayStore(Path(sys.argv[1]), 60, here.SPACES, Sampling(draws="prioritised"))
for number in range(10**6):
    store.insert(here.episode(number))
    drawn = store.draw(20, here.generator(number))
    store.prioritise(drawn.rows_B, drawn.rewards_B)
    store.commit()
    print(store.commit_number, flush=True)
"""


def test_a_kill_loses_no_commit_and_counts_every_use(store, tmp_path):
    path = tmp_path / "store.sqlite"
    command = [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = 0
        while said < 25:
            said = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().split("\n")
    said = max([said, *(int(line) for line in rest[:-1] if line)])
    own = store(draws="prioritised")
    assert said <= own.commit_number <= said + 1
    uses = own.uses()
    assert sum(use.uses for use in uses) == 20 * own.commit_number
    assert [use.slot[0] for use in uses] == [*range(own.commit_number)]
    assert [each.prompt for each in own.episodes.values()] == [*range(own.commit_number)][-6:]
