"""Ranks that die or stand still are noticed in seconds, while others wait for them; ranks that compute are let be."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from headrace_servicekit.rpc.addresses import free_port
from headrace_trainer.errors import Refusal
from headrace_trainer.group import connections, group
from headrace_trainer.group.forming import check_alike, join_trainer_group, own_facts
from headrace_trainer.group.group import Member, TrainerGroup
from headrace_trainer.group.liveness import Liveness

pytestmark = pytest.mark.timeout(120)
SILENT_S = 1.0


class Child:
    """One rank's process, and what it has said."""

    def __init__(self, pipes: Path) -> None:
        self.given, self.out = pipes.with_suffix(".in"), pipes.with_suffix(".out")
        for pipe in (self.given, self.out):
            os.mkfifo(pipe)
        self.said: list[dict] = []
        self.ended = threading.Event()
        self._news = threading.Condition()
        self._input = None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self.out.open() as lines:
            for line in lines:
                with self._news:
                    self.said.append(json.loads(line))
                    self._news.notify_all()
        self.ended.set()

    def tell(self, line: str) -> None:
        self._input = self._input or self.given.open("w")
        self._input.write(f"{line}\n")
        self._input.flush()

    def heard(self, *what: str, within_s: float = 60.0) -> dict:
        """The first thing of these kinds that it says."""

        def found():
            return next((each for each in self.said if each["what"] in what), None)

        with self._news:
            assert self._news.wait_for(found, within_s), f"{what} within {within_s} s; it said {self.said}"
            return found()

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.heard("joins")["pid"], number)


@pytest.fixture(scope="module")
def nursery():
    """A process that has loaded torch, and forks ranks."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "liveness_rank.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def ranks(nursery, tmp_path):
    """Starts the ranks of a group; each is killed after the test."""
    children: list[Child] = []

    def start(world: int, silent_s: float = SILENT_S, timeout_s: float = 60.0, **facts: str) -> list[Child]:
        port, own = free_port(), []
        for rank in range(world):
            child = Child(tmp_path / f"rank-{len(children)}")
            job = {"rank": rank, "world": world, "port": port, "silent_s": silent_s, "timeout_s": timeout_s}
            job |= {"facts": facts if rank else {}, "in": str(child.given), "out": str(child.out)}
            nursery.stdin.write(json.dumps(job) + "\n")
            nursery.stdin.flush()
            children.append(child)
            own.append(child)
        return own

    yield start
    for child in children:
        child.send(signal.SIGKILL)


@pytest.mark.parametrize("waits", ["reduce", "header"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_stopped_rank_is_lost_and_who_waits_for_it_wakes(ranks, lost, waits):
    """The leader or a follower is stopped; the other one waits in an all-reduce, or for a header."""
    both = ranks(2)
    for child in both:
        child.heard("formed")
    waiter = both[1 - lost]
    both[lost].send(signal.SIGSTOP)
    began = time.monotonic()
    # Only a follower waits for headers; the leader then waits in an all-reduce all the same.
    waiter.tell(waits if lost == 0 else "reduce")
    failed = waiter.heard("failed", within_s=20)
    assert "silent" in failed["lost"] and f"rank {lost}" in failed["lost"]
    assert SILENT_S * 0.5 < time.monotonic() - began < SILENT_S + 5
    assert waiter.heard("lost")["members"] == [f"trainer-{lost}"]
    assert waiter.ended.wait(10)


def test_a_killed_rank_wakes_all_others_at_once(ranks):
    first, second, third = ranks(3, silent_s=30.0)
    for child in (first, second, third):
        child.heard("formed")
    second.tell("header")
    third.tell("reduce")
    began = time.monotonic()
    first.send(signal.SIGKILL)
    for child in (second, third):
        child.heard("failed", within_s=10)
    assert time.monotonic() - began < 5


def test_a_killed_follower_wakes_the_others_through_the_leader(ranks):
    first, second, third = ranks(3, silent_s=30.0)
    for child in (first, second, third):
        child.heard("formed")
    second.tell("header")
    third.send(signal.SIGKILL)
    first.tell("reduce")
    assert first.heard("failed", within_s=10)["lost"] == "rank 2 has closed its connections"
    # It waits for the leader, which lives: only the leader's word tells it.
    assert second.heard("failed", within_s=10)["lost"] == "rank 0 has ended the group"
    assert (first.heard("lost")["members"], second.heard("lost")["members"]) == (["trainer-2"], [])


def test_a_rank_that_computes_for_long_is_not_lost(ranks):
    """Both the one that computes and the one that waits for it, for four times the limit of silence."""
    first, second = ranks(2)
    for child in (first, second):
        child.heard("formed")
    second.tell("reduce")
    first.tell(f"compute {4 * SILENT_S}")
    first.tell("reduce")
    assert second.heard("done", "failed", within_s=30)["what"] == "done"
    assert not [each for each in first.said + second.said if each["what"] == "lost"]


def test_a_leader_may_be_idle_for_longer_than_the_meeting_was_given(ranks):
    """As while an engine starts: Gloo's own limit of what a rank waits for another one is the meeting's."""
    meeting_s = 6.0
    first, second = ranks(2, silent_s=30.0, timeout_s=meeting_s)
    for child in (first, second):
        child.heard("formed")
    second.tell("header")
    time.sleep(meeting_s + 1)
    first.tell("announce")
    assert second.heard("done", "failed")["what"] == "done"


def test_ranks_that_leave_in_order_lose_nobody(ranks):
    first, second = ranks(2)
    for child in (first, second):
        child.heard("formed")
    first.tell("leave")
    first.heard("left")
    time.sleep(SILENT_S * 2)  # What is tested is that nothing happens.
    second.tell("leave")
    second.heard("left")
    assert not [each for each in first.said + second.said if each["what"] == "lost"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_ends_while_the_group_forms_holds_nobody(ranks, number):
    """Every moment from before the meeting to after it; each ends as formed and lost, or as a refusal, in seconds."""
    for moment_s in (0.0, 0.02, 0.1):
        both = ranks(2, timeout_s=2.0)
        for child in both:
            child.heard("joins")
        time.sleep(moment_s)  # the moment is what varies
        both[0].send(number)
        began = time.monotonic()
        survivor = both[1]
        if survivor.heard("formed", "refused", within_s=25)["what"] == "formed":
            survivor.tell("header")
            survivor.heard("failed", within_s=10)
        else:
            assert survivor.heard("refused")["reason"] == "RENDEZVOUS_TIMEOUT"
        assert time.monotonic() - began < 20


def test_a_rank_that_differs_is_refused_by_name(ranks):
    first, second = ranks(2, **{"devices of kind": "cuda"})
    for child in (first, second):
        refused = child.heard("refused", "formed")
        assert refused["what"] == "refused" and refused["reason"] == "INVALID"
        assert (
            "rank 1 (trainer-1) has devices of kind cuda and rank 0 (trainer-0) has devices of kind cpu"
            in (refused["message"])
        )


def test_a_rank_with_another_model_of_gpu_is_refused_by_name(monkeypatch):
    h100, a100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: [h100, h100, a100][device.index])
    members = [Member(f"trainer-{n}", "", own_facts(torch.device("cuda", n))) for n in range(3)]
    check_alike(members[:2])
    with pytest.raises(Refusal) as refused:
        check_alike(members)
    assert refused.value.reason == "INVALID"
    assert (
        f"rank 2 (trainer-2) has GPUs of model {a100} and rank 0 (trainer-0) has GPUs of model {h100}: "
        in refused.value.message
    )


def test_what_only_some_ranks_know_is_not_compared():
    check_alike([Member("a", "", {"torch": "2"}), Member("b", "", {"torch": "2", "model.dtype": "float32"})])
    with pytest.raises(Refusal, match="rank 1 \\(b\\) has torch 3 and rank 0 \\(a\\) has torch 2"):
        check_alike([Member("a", "", {"torch": "2"}), Member("b", "", {"torch": "3"})])


def test_a_wait_that_nobody_needs_any_more_ends():
    """The compute thread of a rank whose leader has died is free for the next group as soon as its caller has gone."""
    stopped = threading.Event()
    threading.Timer(0.3, stopped.set).start()
    began = time.monotonic()
    with pytest.raises(Refusal, match="nobody waits for it any more") as refused:
        join_trainer_group(1, 1, 2, f"127.0.0.1:{free_port()}", 60.0, torch.device("cpu"), stopped=stopped)
    assert refused.value.reason == "RENDEZVOUS_TIMEOUT" and time.monotonic() - began < 5


def test_a_stranger_is_no_rank():
    leader = Liveness(0, 2, silent_s=0.5)
    port, secret = leader.listen()
    lost: list[tuple[tuple[int, ...], str]] = []
    done = threading.Event()

    def on_lost(ranks: tuple[int, ...], reason: str) -> None:
        lost.append((ranks, reason))
        done.set()

    leader.watch("127.0.0.1", port, secret, on_lost)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"x" * 20)
        assert done.wait(10)
    assert lost == [((1,), "rank 1 has been silent for 0.5 s")]


def test_strangers_who_say_nothing_keep_no_rank_waiting():
    """Each of them would have stopped the thread, and its beats, for a moment."""
    leader, follower = (Liveness(rank, 2, silent_s=1.0) for rank in (0, 1))
    port, secret = leader.listen()
    lost: list[object] = []
    leader.watch("127.0.0.1", port, secret, lambda *what: lost.append(what))
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    follower.watch("127.0.0.1", port, secret, lambda *what: lost.append(what))
    time.sleep(3.0)
    ended = [stranger for stranger in strangers if not stranger.recv(1)]
    follower.close()
    leader.close()
    assert lost == [] and len(ended) == len(strangers)


def test_ranks_listen_where_they_are_told():
    """torch's own server would listen at all addresses, and so did the liveness."""
    port = free_port()
    place = f"127.0.0.1:{port}"
    found: list[tuple[str, int]] = []

    stopped = threading.Event()

    def look() -> None:
        time.sleep(1.0)
        own = psutil.Process().net_connections("tcp")
        found.extend((each.laddr.ip, each.laddr.port) for each in own if each.status == psutil.CONN_LISTEN)
        stopped.set()

    threading.Thread(target=look).start()
    with pytest.raises(Refusal):
        join_trainer_group(1, 0, 2, place, 20.0, torch.device("cpu"), stopped=stopped)
    assert ("127.0.0.1", port) in found and {host for host, _ in found} <= {"127.0.0.1"}, found


def test_a_thread_that_stood_still_counts_no_silence():
    """As after SIGSTOP and SIGCONT of the whole process: what it did not hear, nobody may have failed to say."""
    leader, follower = (Liveness(rank, 2, silent_s=math.inf) for rank in (0, 1))
    port, secret = leader.listen()
    lost: list[object] = []
    leader.watch("127.0.0.1", port, secret, lambda *what: lost.append(what))
    follower.watch("127.0.0.1", port, secret, lambda *what: lost.append(what))
    time.sleep(0.5)
    follower.close()
    leader.close()
    assert lost == []


def test_a_group_on_gpus_is_aborted_through_torch(monkeypatch):
    """A recording process group in place of NCCL's: each of the world's groups is aborted, and the connections cut."""
    aborted: list[str] = []

    class Recording(dist.ProcessGroup):
        def __init__(self, rank: int, size: int) -> None:
            super().__init__(rank, size)

        def abort(self) -> None:
            aborted.append("abort")

        def getBackendName(self) -> str:
            return "recording"

    def create(_store: object, rank: int, size: int, _timeout: object) -> dist.ProcessGroup:
        return Recording(rank, size)

    dist.Backend.register_backend("recording", create, devices=["cpu"])
    monkeypatch.setattr(connections, "cut", lambda ends: aborted.append(f"cut {sorted(ends)}"))
    monkeypatch.setattr(group, "init_device_mesh", lambda *_: None)
    held = dist.distributed_c10d._world.default_pg
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", None, raising=False) if held else None
    dist.init_process_group("recording", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(
        group.dist, "new_group", lambda **_: dist.distributed_c10d.new_group(backend="recording")
    )
    subject = TrainerGroup(1, 0, 1, torch.device("cuda"))
    subject._connections = frozenset({(("a", 1), ("b", 2))})
    subject.abort("rank 1 is gone")
    assert aborted == ["abort"] * 3 + ["cut [(('a', 1), ('b', 2))]"]
    assert not dist.is_initialized()
    subject.abort("again")
    subject.leave()
    assert aborted == ["abort"] * 3 + ["cut [(('a', 1), ('b', 2))]"]
