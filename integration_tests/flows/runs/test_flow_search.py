"""Conversations that search an index, on a real fleet: one process serves it, and none is left when the run is over."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import psutil
import pytest
import yaml
from harness.ledger import audit
from headrace_search.index import build

pytestmark = pytest.mark.usefixtures("one_simulator")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "agents"
STEPS, GROUPS, SAMPLES = 2, 4, 4
SEARCHES = """
import sys

sys.path.insert(0, {examples!r})
from lookup import Lookup


class Always(Lookup):
    def step(self, message):
        told, *_ = super().step({{"content": f"{{self.name}}?"}})  # whatever the model says
        return told, float(told[0]["content"] == f"{{self.number}}="), True
"""


def serving(index):
    """Processes that serve an index."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "headrace_search.server" in line and str(index) in line:
            found.append(process)
    return found


def test_conversations_search_an_index_that_one_process_serves(fleet, tiny_model, tmp_path):
    corpus, index = tmp_path / "lookup.jsonl", tmp_path / "index"
    rows = runpy.run_path(str(EXAMPLES / "lookup.py"))["corpus"]()
    corpus.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    build(corpus, index)
    (tmp_path / "always.py").write_text(SEARCHES.format(examples=str(EXAMPLES)), encoding="utf-8")
    spec = yaml.safe_load((EXAMPLES / "lookup.yaml").read_text(encoding="utf-8"))
    spec["model"]["path"] = str(tiny_model)
    spec["environment"] |= {
        "tasks": [f"{tmp_path}/always.py:Always"],
        "options": {"path": str(index)},
        "count": 4,
    }
    spec["algorithm"] |= {"prompts_per_step": GROUPS, "group_size": SAMPLES}
    spec |= {"steps": STEPS, "evaluation": {"every": 0}, "data": {"heldout": 4}, "export": False}
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * GROUPS * SAMPLES and not found.dropped
    talks = fleet.client.trajectories(run.id, limit=100)
    assert talks and {talk.reward for talk in talks} == {1.0}
    assert len(serving(index)) <= 1
    assert not psutil.wait_procs(serving(index), timeout=60)[1]
