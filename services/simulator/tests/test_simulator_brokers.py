"""Brokers of backends: processes that are started once, started again when they end, and told to end first."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from headrace_simulator.pools.brokers import BrokerLost, Brokers
from headrace_simulator.pools.host import ChildHost, HostFault

BROKER = """
import json, os, struct, sys
from pathlib import Path

size, = struct.unpack("<I", sys.stdin.buffer.read(4))
told = json.loads(sys.stdin.buffer.read(size))
folder = Path(told["folder"])
seen = folder / "started"
seen.write_text((seen.read_text() if seen.exists() else "") + f"{os.getpid()}\\n")
answer = json.dumps({"error": "it has no engine"} if __name__ == "refusing" else {"listening": True}).encode()
sys.stdout.buffer.write(struct.pack("<I", len(answer)) + answer)
sys.stdout.buffer.flush()
sys.stdin.buffer.read()
Path(os.environ["ENDED"]).write_text("in order")
"""


@pytest.fixture
async def brokers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "toy_broker.py").write_text(BROKER)
    (tmp_path / "refusing_broker.py").write_text(BROKER.replace('__name__ == "refusing"', "True"))
    (tmp_path / "broken_broker.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ENDED", str(tmp_path / "ended"))
    made = Brokers({name: f"{name}_broker" for name in ("toy", "refusing", "broken", "missing")}, 30.0)
    yield made
    await made.close()


async def started(folder: Path, count: int) -> list[int]:
    for _ in range(3000):
        if len(found := (folder / "started").read_text().split()) >= count:
            return [*map(int, found)]
        await asyncio.sleep(0.02)
    raise AssertionError(f"{count} were not started")


async def test_one_serves_all_and_is_started_again_in_the_same_folder(brokers, tmp_path):
    assert await brokers.folder("gymnasium") is None
    first, second = await asyncio.gather(brokers.folder("toy"), brokers.folder("toy"))
    assert first == second and first.stat().st_mode & 0o777 == 0o755
    (pid,) = await started(first, 1)
    os.kill(pid, signal.SIGKILL)
    _, other = await started(first, 2)
    assert other != pid and await brokers.folder("toy") == first


async def test_it_is_told_to_end_before_it_is_killed_and_its_folder_goes(brokers, tmp_path):
    folder = await brokers.folder("toy")
    await started(folder, 1)
    await brokers.close()
    assert (tmp_path / "ended").read_text() == "in order" and not folder.exists()


@pytest.mark.parametrize(
    ("backend", "said"),
    [("refusing", "it has no engine"), ("broken", "code 3"), ("missing", "does not start")],
)
async def test_one_that_does_not_start_is_named_and_leaves_no_folder(
    brokers, backend, said, monkeypatch, tmp_path
):
    (tmp_path / "t").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    for _ in range(2):
        with pytest.raises(BrokerLost, match=said):
            await brokers.folder(backend)
    assert not list((tmp_path / "t").glob("headrace-broker-*"))
    opening = {"backend": backend, "name": "x", "options": {}}
    with pytest.raises(HostFault, match=said) as caught:
        await ChildHost(opening, 30.0, brokers).open()
    assert caught.value.field == "environment.backend"
