"""A fleet that was stopped in the middle of a run on one commit goes on with the next one.

Its quick twins read one file of every form: test_event_forms.py, test_trainer_checkpoint_forms.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import ROOT
from harness.specs import BATCH

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
STEPS = 12
FROM = os.environ.get("HEADRACE_UPGRADE_FROM", "HEAD^")
"""The commit before."""


@pytest.fixture
def former(tmp_path):
    """The sources of the commit before, as PYTHONPATH has them."""
    tree = tmp_path / "former"
    tree.mkdir()
    packed = subprocess.run(["git", "archive", FROM], cwd=ROOT, capture_output=True, timeout=60)
    if packed.returncode:
        pytest.skip(f"{FROM} is not in this clone: {packed.stderr.decode().strip()}")
    subprocess.run(["tar", "-x"], cwd=tree, input=packed.stdout, check=True, timeout=60)
    return os.pathsep.join(
        str(path) for path in sorted(tree.glob("**/src")) if (path.parent / "pyproject.toml").is_file()
    )


def test_a_fleet_goes_on_with_the_next_commit(former, tmp_path, spec_of):
    with Fleet(tmp_path / "fleet", PYTHONPATH=former) as fleet:
        (launcher,) = {process.environ()["PYTHONPATH"] for process in [fleet.process("coordinator")]}
        assert launcher == former
        run = fleet.submit(spec_of(steps=STEPS))
        before = fleet.reach(run, 3)
        fleet.down()
        fleet.environment = {}
        fleet.up()
        assert "PYTHONPATH" not in fleet.process("coordinator").environ()
        ended = fleet.succeed(run)
        assert before.step >= 3 and ended.step == STEPS
        assert len(audit(fleet, ended).trained) == STEPS * BATCH


def test_the_sources_of_another_commit_are_those_that_run(former):
    """Editable installs stand behind PYTHONPATH."""
    code = "import headrace_servicekit; print(headrace_servicekit.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": former},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(former.split(os.pathsep)[0].rpartition("/former/")[0])
