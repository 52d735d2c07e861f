"""The store's file is damaged or cut while the fleet is down: `up` says where or what is lost, and runs go on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from harness.fleet import Fleet
from harness.ledger import audit
from harness.specs import BATCH

STEPS = 12


def increment_of(fleet: Fleet) -> Path:
    """The store's file of commands."""
    (found,) = (fleet.data_dir / "redis" / "appendonlydir").glob("*.incr.aof")
    return found


def stopped_in_the_middle(fleet: Fleet, spec_of) -> str:
    """A run that has made some of its steps, and a fleet that is down."""
    run = fleet.submit(spec_of(steps=STEPS))
    fleet.reach(run, 4)
    fleet.down()
    return str(run.id)


def up_again(fleet: Fleet) -> str:
    """What the coordinator has to say of its start."""
    done = fleet.headrace("up", "--port", str(fleet.port), "--devices", "cpu:0,cpu:1", "--json")
    assert done.returncode == 0, f"{done.stderr}\n{fleet.logs()}"
    fleet.look()
    return str(json.loads(done.stdout)["notice"])


def goes_on(fleet: Fleet, run: str) -> None:
    """The fleet is brought up, says that its store lost its end, and the run ends with every slot trained once."""
    assert "runs are rebuilt from their checkpoints" in up_again(fleet)
    found = audit(fleet, fleet.succeed(run))
    assert len(found.trained) == STEPS * BATCH and not found.dropped


@pytest.mark.nightly  # quick: cli/tests/test_repair.py
def test_garbage_is_named_and_repaired(own_fleet, spec_of):
    with own_fleet() as fleet:
        run = stopped_in_the_middle(fleet, spec_of)
        file = increment_of(fleet)
        begun = file.read_bytes().index(b'"type":"StepOpened"')
        middle = (begun + file.stat().st_size) // 2  # what is before it knows the run
        with file.open("r+b") as writing:
            writing.seek(middle)
            writing.write(b"\xff\x00\xfe" * 100)
        damaged = file.read_bytes()
        refused = fleet.headrace("up", "--port", str(fleet.port))
        assert refused.returncode == 1, refused
        assert f"{file}, byte " in refused.stderr and "`headrace repair --data-dir" in refused.stderr
        assert "Traceback" not in refused.stderr
        # Garbage inside a value is found by the coordinator, which has written that it leads by then.
        assert file.read_bytes().startswith(damaged), "nothing is thrown away by a start"
        damaged = file.read_bytes()
        shown = fleet.headrace("repair")
        assert shown.returncode == 1 and f"{file}, byte " in shown.stdout, shown
        repaired = fleet.json("repair", "--yes")
        assert (Path(repaired["kept"]) / file.name).read_bytes() == damaged
        assert (
            damaged[: repaired["damages"][0]["offset"]]
            == file.read_bytes()[: repaired["damages"][0]["offset"]]
        )
        goes_on(fleet, run)


@pytest.mark.nightly  # cli/tests/test_repair.py cuts files; test_history_losses.py rebuilds a run
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_file_that_was_cut_is_said_and_its_run_goes_on(own_fleet, spec_of, share):
    """`share`: what is left of all that the store heard since the run was submitted."""
    with own_fleet() as fleet:
        run = stopped_in_the_middle(fleet, spec_of)
        file = increment_of(fleet)
        begun = file.read_bytes().index(b'"type":"StepOpened"')
        os.truncate(file, begun + int((file.stat().st_size - begun) * share))
        goes_on(fleet, run)


@pytest.mark.nightly
def test_a_run_that_a_cut_store_does_not_know_any_more_is_named(own_fleet, spec_of):
    with own_fleet() as fleet:
        run = stopped_in_the_middle(fleet, spec_of)
        file = increment_of(fleet)
        os.truncate(file, file.read_bytes().index(b'"type":"RunSubmitted"'))
        notice = up_again(fleet)
        assert f"of {run} it knows nothing more: submit each one's run.json again" in notice
        fleet.succeed(fleet.submit(json.loads((fleet.data_dir / "runs" / run / "run.json").read_text())))
