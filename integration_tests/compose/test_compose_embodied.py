"""`docker compose --profile embodied up --scale simulator=2`: a robot policy trains; a simulator dies in the middle."""

from __future__ import annotations

import pytest
import yaml
from harness.ledger import audit
from harness.processes import ROOT
from harness.waiting import wait_for

STEPS = 8
CHILDREN = """
import psutil
found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
print(sum("headrace_simulator.child" in command for command in found))
"""


@pytest.mark.nightly
def test_a_robot_policy_trains_in_two_containers_of_simulators(fleet):
    spec = yaml.safe_load((ROOT / "examples" / "embodied" / "pendulum.yaml").read_text())
    fleet.up("--scale", "simulator=2")
    try:
        run = fleet.submit({**spec, "steps": STEPS})
        wait_for(lambda: all(children(fleet, index) for index in (1, 2)), "environments in both", 120)
        fleet.reach(run, 2)
        fleet.kill_process("simulator")
        ended = fleet.succeed(run)
        found = audit(fleet, ended)
        assert len(found.trained) == STEPS * spec["algorithm"]["prompts_per_step"]
        assert found.rewinds == 0 and not found.abandoned
    finally:
        fleet.up("--scale", "simulator=1")


def children(fleet, index):
    """Processes of environments in a simulator's container."""
    return int(fleet.inside("simulator", "python", "-c", CHILDREN, index=index))
