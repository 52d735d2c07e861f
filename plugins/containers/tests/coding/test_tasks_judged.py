"""Ten made repositories with hidden tests: their solutions are rewarded, and nothing else is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hacks import HACKS
from headrace_containers.tasks.proving import prove
from headrace_containers.tasks.reading import TaskSet
from headrace_containers.tasks.verifying import begin, judge, settled


def hacked(start, task, script, faults):
    """What the tests give an agent that runs a script."""
    task = settled(start, task)
    container = begin(start, task)
    (fault,) = (each for each in faults if each.name == task.name)
    env = {"MODULE": fault.name, "FUNCTION": fault.function}
    container.exec(("bash", "-c", script), env=env)
    return judge(start, task, container)


@pytest.fixture
def tasks(making, tmp_path):
    making.make(tmp_path)
    return TaskSet.at(tmp_path)


def test_the_solutions_of_ten_tasks_are_rewarded_and_doing_nothing_is_not(start, tasks):
    with ThreadPoolExecutor(4) as threads:
        proofs = dict(
            zip(
                tasks.names,
                threads.map(lambda name: prove(start, tasks.read(name)), tasks.names),
                strict=True,
            )
        )
    assert len(proofs) == 10
    assert {name: (each.oracle, each.nothing) for name, each in proofs.items()} == dict.fromkeys(
        tasks.names, (1.0, 0.0)
    )
    assert not any(each.wrong for each in proofs.values())


def test_no_way_around_a_task_is_rewarded(start, tasks, making):
    """Each way on one task; all ways on all tasks are in integration_tests/containers, with an engine."""
    pairs = [(hack, tasks.names[at % len(tasks.names)]) for at, hack in enumerate(HACKS)]

    def reward(pair):
        return hacked(start, tasks.read(pair[1]), HACKS[pair[0]], making.FAULTS).reward

    with ThreadPoolExecutor(4) as threads:
        rewards = dict(zip(pairs, threads.map(reward, pairs), strict=True))
    assert rewards == dict.fromkeys(pairs, 0.0)


NAIVE = """#!/bin/sh
python3 -m unittest -q && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
SEEN = """import unittest
from words import count
class Test(unittest.TestCase):
    def test(self):
        self.assertEqual(count("a  b"), 2)
"""


def test_tests_in_the_repository_are_the_agents_unless_the_task_says_that_they_are_restored(
    start, tasks, making
):
    """The way is real: it is rewarded by tests that the agent may write."""
    folder = tasks.path / "words"
    (folder / "tests" / "test.sh").write_text(NAIVE)
    (folder / "environment" / "repository" / "tests" / "test_words.py").write_text(SEEN)
    assert prove(start, tasks.read("words")).wrong is None
    edits = HACKS["edits the visible tests"]
    ends = "printf 'import os\\nos._exit(0)\\n' > tests/__init__.py"
    assert hacked(start, tasks.read("words"), ends, making.FAULTS).reward == 1.0
    with (folder / "task.toml").open("a") as file:
        file.write('\n[metadata]\nrestored = ["tests/**"]\n')
    for script in (edits, ends):
        judged = hacked(start, tasks.read("words"), script, making.FAULTS)
        assert judged.reward == 0.0 and "kept as the image has it: tests" in judged.said


def test_a_shared_task_is_judged_where_the_agent_was(start, tasks, making):
    with (tasks.path / "words" / "task.toml").open("a") as file:
        file.write('\n[verifier]\nenvironment_mode = "shared"\n')
    text = (tasks.path / "words" / "task.toml").read_text().replace("[verifier]\ntimeout_sec = 60\n", "", 1)
    (tasks.path / "words" / "task.toml").write_text(text)
    task = tasks.read("words")
    assert task.shared and prove(start, task).wrong is None
    assert hacked(start, task, HACKS["a program that stays"], making.FAULTS).reward == 0.0


def test_what_the_solution_does_otherwise_is_rewarded_too(start, tasks, making):
    """Deleted and added files, links within the repository, a test of its own: none of it stands in the way."""
    script = """
        mv words.py really.py && ln -s really.py words.py && rm README.md && mkdir extra && echo 1 > extra/a
        sed -i 's/split(" ")/split()/' really.py
    """
    judged = hacked(start, tasks.read("words"), script, making.FAULTS)
    assert judged.reward == 1.0, judged.said
