"""Ten made repositories on a real engine: solutions are rewarded; doing nothing, and ways around the tests, are not."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from harness.processes import ROOT
from headrace_containers.docker.provider import DockerProvider
from headrace_containers.tasks.proving import prove
from headrace_containers.tasks.reading import TaskSet
from headrace_containers.tasks.verifying import begin, judge, settled

AT_ONCE = 3


def module_of(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKING = module_of(ROOT / "examples" / "coding" / "make_tasks.py")
HACKS = module_of(ROOT / "plugins" / "containers" / "tests" / "coding" / "hacks.py").HACKS


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskSet:
    folder = tmp_path_factory.mktemp("tasks")
    MAKING.make(folder)
    return TaskSet.at(folder)


@pytest.mark.nightly  # quick: two tasks below; all ten in plugins/containers/tests/coding/test_tasks_judged.py
@pytest.mark.timeout(900)
def test_ten_solutions_are_rewarded(docker: DockerProvider, tasks: TaskSet) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        proofs = list(threads.map(lambda name: prove(docker.start, tasks.read(name)), tasks.names))
    assert [(each.oracle, each.nothing, each.wrong) for each in proofs] == [(1.0, 0.0, None)] * 10


def test_two_solutions_are_rewarded(docker: DockerProvider, tasks: TaskSet) -> None:
    for name in tasks.names[:2]:
        proof = prove(docker.start, tasks.read(name))
        assert (proof.oracle, proof.nothing, proof.wrong) == (1.0, 0.0, None)


@pytest.mark.nightly  # quick: each way on one task, in plugins/containers/tests/coding/test_tasks_judged.py
@pytest.mark.timeout(2400)
def test_no_way_around_any_task_is_rewarded(docker: DockerProvider, tasks: TaskSet) -> None:
    faults = {each.name: each for each in MAKING.FAULTS}
    pairs = [(hack, name) for hack in HACKS for name in tasks.names]

    def reward(pair: tuple[str, str]) -> float:
        task = settled(docker.start, tasks.read(pair[1]))
        container = begin(docker.start, task)
        fault = faults[task.name]
        container.exec(
            ("bash", "-c", HACKS[pair[0]]),
            env={"MODULE": fault.name, "FUNCTION": fault.function, "HOME": "/tmp"},
        )
        return judge(docker.start, task, container).reward

    with ThreadPoolExecutor(AT_ONCE) as threads:
        rewards = dict(zip(pairs, threads.map(reward, pairs), strict=True))
    assert not {pair: each for pair, each in rewards.items() if each}
