"""A run whose environment is a container, on a real fleet; and what it says where there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from containers.brokers import containers_of
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import ROOT, mentioning, words_of
from harness.waiting import wait_for
from headrace.client import HeadraceError
from headrace_containers.docker.engine import owner

pytestmark = pytest.mark.usefixtures("engine", "one_simulator")
EXAMPLE = ROOT / "examples" / "containers" / "vowels.yaml"


def example(tiny_model: Path, **environment: Any) -> dict[str, Any]:
    """The example with few and short steps."""
    spec: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    spec["model"]["path"] = str(tiny_model)
    spec["environment"] |= {"count": 4, "processes": 4}
    spec["environment"]["options"] |= {"provider_options": {"pull": "never"}, **environment}
    spec["algorithm"] |= {"prompts_per_step": 2, "group_size": 4}
    return spec | {"steps": 2, "evaluation": {"every": 0}, "data": {"heldout": 4}, "export": False}


def ours() -> list[str]:
    listed = ["docker", "ps", "-aq", "--filter", "label=headrace.owner"]
    return subprocess.run(listed, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def test_a_model_is_trained_in_containers_and_none_is_left(fleet: Fleet, tiny_model: Path) -> None:
    run = fleet.succeed(fleet.submit(example(tiny_model)))
    found = audit(fleet, run)
    assert len(found.trained) + len(found.dropped) == 2 * 2 * 4
    talks = fleet.client.trajectories(run.id, limit=100)
    assert len({talk.reward for talk in talks}) == 2, "the check read what each one said"
    for talk in talks:
        said = talk.completion.rpartition("assistant: ")[2]
        assert talk.reward == float(any(letter in said for letter in "aeiou")), (talk.reward, said)


def test_an_image_that_is_not_there_is_refused_by_its_key(fleet: Fleet, tiny_model: Path) -> None:
    with pytest.raises(HeadraceError) as caught:
        fleet.submit(example(tiny_model, image="no-such-image:7"))
    (problem,) = caught.value.problems
    assert problem.key == "environment.options.image" and "no-such-image:7" in problem.problem
    with pytest.raises(HeadraceError) as caught:
        fleet.submit(example(tiny_model, imge="x"))
    assert caught.value.problems[0].key == "environment.options.imge"


def test_containers_that_are_killed_cost_their_episodes_alone(fleet: Fleet, tiny_model: Path) -> None:
    """And so does the broker, which is started again."""
    spec = example(tiny_model, setup="sleep 1")
    spec["steps"] = 3
    run = fleet.submit(spec)
    wait_for(ours, "the first containers")
    (broker,) = brokers()
    label = owner(broker.pid)
    broker.kill()
    fleet.succeed(run)
    (again,) = brokers()
    assert again.pid != broker.pid
    wait_for(lambda: not containers_of(label), "those of the killed one to be removed")


def brokers() -> list[psutil.Process]:
    """Those of this fleet's simulator; a reaper is none."""
    return [
        each for each in mentioning("headrace_containers.broker") if words_of(each)[-1].endswith(".broker")
    ]
