"""A run whose disk is lost goes on from its store in a new fleet; copies are made beside the steps, and bounded."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress

import psutil
import pytest
from harness.fleet import Fleet
from harness.ledger import audit
from harness.object_store import always
from harness.specs import BATCH
from harness.waiting import wait_for
from headrace_servicekit.stores.checkpoints import RemoteRun

STEPS = 6
pytestmark = pytest.mark.timeout(600)


def uploaders(fleet):
    """Processes of a fleet that speak with a store."""
    return [
        each for each in fleet.look() if each.is_running() and "headrace_servicekit.stores" in each.cmdline()
    ]


def kinds(fleet, run):
    return [event.type for event in fleet.events(run)]


@pytest.mark.nightly  # quick: test_stores_s3 kills uploads, test_uploads does the run's part
def test_a_fleet_whose_disk_is_wiped_in_mid_upload_goes_on_elsewhere(proxy, bucket, tmp_path, spec_of, gate):
    url = f"{bucket}/runs"
    first = Fleet(tmp_path / "one", "--simulator", "0")
    with first:
        first.ready("rollout-0", "trainer-0", "reward-0")
        gate.hold_after(3 * BATCH)
        run = first.submit(spec_of(steps=STEPS, reward=gate.reward, store={"url": url}))
        saved = wait_for(
            lambda: (found := first.client.get(run.id).raw["uploads"])["step"] >= 2 and found,
            "two steps in the store",
        )
        whole = saved["name"]
        remote = f"{url}/{run.id}/checkpoints/{whole}"
        wait_for(
            lambda: remote in [each.raw["remote"] for each in first.client.checkpoints(run.id)],
            "the checkpoint to be listed as remote",
            30,
        )
        # The next checkpoint's files take long: the trainer dies meanwhile, and then everything.
        proxy.fault = lambda method, path: "delay:20" if method == "PUT" and "weights" in path else ""
        gate.open()
        wait_for(lambda: "delay:20" in proxy.broken, "an upload to be in flight")
        first.kill("trainer-0")
        [process] = uploaders(first)
        process.kill()
        living = [each for each in first.look() if each.is_running()]
        for act in ("suspend", "kill"):  # Nobody is left who would start others again.
            for each in living:
                with suppress(psutil.NoSuchProcess):
                    getattr(each, act)()
        first.headrace("down")
        shutil.rmtree(tmp_path / "one")
    proxy.fault = always("")
    with Fleet(tmp_path / "two", "--simulator", "0") as second:
        second.ready("rollout-0", "trainer-0", "reward-0")
        origin = {"run": f"{url}/{run.id}"}
        again = second.submit(spec_of(steps=STEPS, reward=gate.reward, from_checkpoint=origin))
        ended = second.succeed(again)
        restored = next(e.data for e in second.events(again) if e.type == "version_restored")
        assert restored["checkpoint"].startswith("lineage-1/step-") and restored["source_run"] == run.id
        step = ended.first_step
        assert 2 <= step <= STEPS - 1 and restored["checkpoint"] == f"lineage-1/step-{step}"
        trained = audit(second, ended).trained
        assert len(trained) == (STEPS - step) * BATCH
        assert min(prompt for prompt, _ in trained) == step * (BATCH // 4)


@pytest.mark.nightly  # quick: test_uploads
def test_a_run_of_a_store_s_model_whose_directory_is_lost_goes_on(
    proxy, bucket, own_fleet, spec_of, gate, tiny_model, tmp_path
):
    RemoteRun(f"{bucket}/models/tiny").copy(tiny_model, "", {})
    with own_fleet(HEADRACE_STORE_CACHE=str(tmp_path / "cache")) as fleet:
        fleet.ready("rollout-0", "trainer-0", "reward-0")
        gate.hold_after(3 * BATCH + 3)
        spec = spec_of(steps=STEPS, reward=gate.reward, store={"url": f"{bucket}/runs"})
        spec["model"]["path"] = f"{bucket}/models/tiny"
        run = fleet.submit(spec)
        wait_for(lambda: fleet.client.get(run.id).raw["uploads"]["step"] == 3, "the third step in the store")
        shutil.rmtree(fleet.data_dir / "runs" / run.id / "checkpoints")
        fleet.kill("trainer-0")
        gate.open()
        ended = fleet.succeed(run)
        assert len(audit(fleet, ended).trained) == STEPS * BATCH
        assert any("was fetched from store.url" in str(event.data) for event in fleet.events(run))
        assert ended.raw["uploads"]["step"] == STEPS
        kept = json.loads((fleet.data_dir / "runs" / run.id / "checkpoints" / "model.json").read_text())
        assert kept["model"]["path"] == f"{bucket}/models/tiny"
        assert len([*(tmp_path / "cache").glob("*/files/model.safetensors")]) == 1


@pytest.mark.nightly  # quick: test_uploads
def test_a_slow_store_is_told_and_bounded_and_the_run_ends_with_all_that_it_keeps(
    proxy, bucket, own_fleet, spec_of
):
    with own_fleet() as fleet:
        fleet.ready("rollout-0", "trainer-0", "reward-0")
        proxy.fault = lambda method, path: "delay:1" if method == "PUT" and "step-" in path else ""
        spec = spec_of(steps=16, export=True, store={"url": f"{bucket}/runs", "waiting": 1})
        run = fleet.submit(spec)
        most = 0

        def ended():
            nonlocal most
            folder = fleet.data_dir / "runs" / run.id / "checkpoints"
            most = max(most, len([*folder.glob("lineage-1/step-*")]))
            return fleet.client.get(run.id).ended

        wait_for(ended, "the run to end", 240)
        found = fleet.succeed(run)
        skipped = [e.data for e in fleet.events(run) if e.type == "upload_skipped"]
        assert skipped and "slower than checkpoints" in skipped[0]["reason"]
        assert found.raw["uploads"]["skipped"] == len(skipped)
        # keep, those that wait, the one that is uploaded, and one that is being written or renamed.
        assert most <= 2 + 1 + 1 + 1
        assert found.raw["uploads"]["step"] == 16
        paths = " ".join(path for _, path in proxy.seen)
        assert "/export/" in paths
        text = fleet.metrics() if hasattr(fleet, "metrics") else ""
        assert not text or "headrace_run_uploads_skipped" in text
