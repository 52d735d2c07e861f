"""A fleet by `headrace up --trust contained`: agents play, and a scorer that reaches out gets nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness.fleet import Fleet
from harness.ledger import audit

pytestmark = [
    pytest.mark.nightly,  # quick: test_security_contained.py
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="needs root on Linux"),
]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "agents"
SCORER = """
import os, pathlib, socket

def score(completion):
    got = []
    for host, port in (("127.0.0.1", {port}), ("192.0.2.1", 80)):
        try:
            socket.create_connection((host, port), timeout=5).close()
            got.append(port)
        except OSError:
            pass
    try:
        got.append(pathlib.Path({token!r}).read_text())
    except OSError:
        pass
    return float(len(got))
"""


def test_agents_are_trained_and_a_scorer_reaches_nothing(tmp_path, tiny_model):
    data = tmp_path / "fleet"
    with Fleet(data, "--trust", "contained") as fleet:
        (tmp_path / "scorer.py").write_text(SCORER.format(port=fleet.port, token=str(data / "token")))
        spec = yaml.safe_load((EXAMPLES / "endpoint.yaml").read_text(encoding="utf-8"))
        spec["model"]["path"] = str(tiny_model)
        spec["agent"]["python"] = f"{EXAMPLES / 'endpoint.py'}:play"
        spec["environment"]["count"] = 2
        spec["algorithm"] |= {"prompts_per_step": 2, "group_size": 2}
        spec |= {"steps": 2, "evaluation": {"every": 0}, "data": {"heldout": 2}, "export": False}
        hostile = {"name": f"{tmp_path / 'scorer.py'}:score", "weight": 0.0}
        spec["reward"] = {"scorers": [{"name": "episode"}, hostile]}
        run = fleet.succeed(fleet.submit(spec))
        assert len(audit(fleet, run).trained) == 8
        talks = fleet.client.trajectories(run.id, limit=100)
        assert {talk.parts["scorer.py:score"] for talk in talks} == {0.0}, "it reached something"
        said = str(list(fleet.client.events(run.id, follow=False)))
        assert "users' code of reward has no network" in said and "users' code of simulator has" in said
        refusal = _service_that_contains_nothing(fleet)
        assert "does not contain users' code" in refusal


def _service_that_contains_nothing(fleet: Fleet) -> str:
    """What a reward service says that is started beside the fleet without the walls."""
    process = fleet.process("reward-0")
    words = ["reward-9" if each == "reward-0" else each for each in process.cmdline()]
    place = words.index("--incarnation") + 1
    words[place] = "f" * 32
    environment = {name: value for name, value in process.environ().items() if name != "HEADRACE_TRUST"}
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=20)
        return done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        return ((late.stdout or b"") + (late.stderr or b"")).decode()
