"""A relative judge on a real fleet: the example's server, which goes away in the middle of a run and comes back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.fleet import RUN_S, Fleet
from harness.ledger import audit
from harness.waiting import wait_for
from headrace.client import HeadraceError

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "judge"
STEPS, GROUPS, SAMPLES = 30, 4, 4

pytestmark = pytest.mark.nightly  # services/reward/tests/test_reward_judge.py has the quick twins


@contextmanager
def judge(port: int = 0) -> Iterator[int]:
    """The example's judge in a process of its own; its port."""
    command = [sys.executable, str(EXAMPLE / "judge.py"), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline()
        yield int(address.rpartition(":")[2].partition("/")[0])
    finally:
        process.kill()
        process.wait(10)


def example(tiny_model: Path, port: int, **more: Any) -> dict[str, Any]:
    """The example's spec with a few short steps."""
    spec: dict[str, Any] = yaml.safe_load((EXAMPLE / "relative.yaml").read_text(encoding="utf-8"))
    spec["model"]["path"] = str(tiny_model)
    spec["algorithm"] |= {"prompts_per_step": GROUPS, "group_size": SAMPLES}
    spec["reward"]["scorers"][0]["options"] |= {"base_url": f"http://127.0.0.1:{port}/v1", "deadline_s": 1}
    return spec | {"steps": STEPS, "evaluation": {"every": 0}, "export": False, **more}


def test_a_judge_that_goes_away_costs_no_slot(fleet: Fleet, tiny_model: Path) -> None:
    with judge() as port:
        run = fleet.submit(example(tiny_model, port))
        wait_for(lambda: fleet.client.get(run.id).step >= 2, "two steps", RUN_S)
    fleet.kill("reward-0")  # the next one opens the run while its judge is away
    wait_for(
        lambda: any("options.base_url" in wait for wait in fleet.client.get(run.id).waiting_for),
        "the run to say what it waits for",
        RUN_S,
    )
    with judge(port):
        ended = fleet.succeed(run)
    found = audit(fleet, ended)
    assert len(found.trained) == STEPS * GROUPS * SAMPLES and not found.dropped


def test_a_judge_that_was_never_there_is_refused_with_its_key(fleet: Fleet, tiny_model: Path) -> None:
    with judge() as port:
        pass
    with pytest.raises(HeadraceError) as raised:
        fleet.submit(example(tiny_model, port))
    (problem,) = raised.value.problems
    assert problem.key == "reward.scorers[0].options.base_url", problem
    assert "gave no verdict within deadline_s = 1 s" in problem.problem and "start it" in str(problem)
