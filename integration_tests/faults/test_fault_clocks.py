"""Wall clocks of a fleet's processes are an hour apart: runs end as with one clock, under kills too.

Its quick twin, of clocks that jump, is in test_fault_wires.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from harness.fleet import Fleet
from harness.ledger import audit
from harness.specs import BATCH

SHIM = Path(__file__).parents[1] / "harness" / "clock"
STEPS = 4
HOUR = 3600
AHEAD, BEHIND = f"coordinator={HOUR}", f"coordinator=-{HOUR}"
APART = f"rollout={HOUR},trainer=-{HOUR},reward={HOUR}"


def shifted(tmp_path: Path, rows: str) -> Fleet:
    # Templates fork services: each must start by itself to have a clock of its own.
    variables = {"PYTHONPATH": str(SHIM), "HEADRACE_TEST_CLOCK": rows, "HEADRACE_TEMPLATE": "0"}
    return Fleet(tmp_path / "fleet", "--simulator", "0", **variables)


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("rows", [AHEAD, BEHIND, APART, f"{AHEAD},{APART}"])
def test_a_run_under_kills_does_not_see_that_clocks_are_an_hour_apart(tmp_path, spec_of, rows):
    with shifted(tmp_path, rows) as fleet:
        said = sum(float(row.partition("=")[2]) for row in rows.split(",") if row.startswith("coordinator"))
        assert abs(fleet.client.require_health().time - time.time() - said) < 60, "its clock is its own"
        run = fleet.submit(spec_of(steps=STEPS, limits__recoveries=20))
        fleet.reach(run, 1)
        for name in ("rollout-0", "trainer-0"):
            fleet.kill(name)
        ended = fleet.succeed(run)
        assert len(audit(fleet, ended).trained) == STEPS * BATCH
