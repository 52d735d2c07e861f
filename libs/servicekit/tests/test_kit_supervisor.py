"""The supervisor with real children: restarts, kills, last words, no orphans, its line to the coordinator."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from headrace.coordinator.v1 import fleet_pb2
from headrace_servicekit.lease.devices import instance_count
from headrace_servicekit.memory.capacity import GIB, Capacity, HostMemory
from headrace_servicekit.process import child
from headrace_servicekit.process.supervisor import Supervisor


def python(script):
    return [sys.executable, "-S", "-c", script]


SLEEP = python("import time; time.sleep(600)")
CRASH = python("import sys; print('out'); sys.exit('broken: no such model')")
DEAF = python(
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('deaf', flush=True); time.sleep(600)"
)
LISTEN_WHEN = """
import os, socket, time
while not os.path.exists({!r}):
    time.sleep(0.05)
listening = socket.create_server(("127.0.0.1", 0))
time.sleep(600)
"""
PARENT = python(
    "import subprocess, sys, time;"
    "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']);"
    "print(child.pid, flush=True); time.sleep(600)"
)
ENVIRONMENT = python(
    "import os, time;"
    "print(os.environ['HEADRACE_NAME'], os.environ['HEADRACE_INCARNATION'], flush=True); time.sleep(600)"
)
ENTRY_POINT = [sys.executable, "-m", "headrace_servicekit.process.supervise", "--kind", "rollout"]


@pytest.fixture
async def supervise(tmp_path):
    """`await supervise(command, kind=..., n=...)` starts a supervisor of `n` such processes."""
    started = []

    async def start(command, *, kind="rollout", n=1, coordinator="", **options):
        spawn = command if callable(command) else lambda kind, index, incarnation: command
        supervisor = Supervisor("h", coordinator, None, spawn, tmp_path / "logs", **options)
        supervisor.set_count(kind, n)
        await supervisor.start()
        started.append(supervisor)
        return supervisor

    yield start
    for supervisor in started:
        await supervisor.stop(2)


def pids(supervisor):
    return [info.pid for info in supervisor.processes() if info.pid]


def lines_of(supervisor):
    """The whole lines that each process has written; nothing until all have."""
    logs = [info.log_file for info in supervisor.processes()]
    texts = [log.read_text() if log.exists() else "" for log in logs]
    return [text.splitlines() for text in texts] if all(text.endswith("\n") for text in texts) else None


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_each_process_has_a_name_an_incarnation_and_a_log(supervise, until):
    given = []

    def spawn(kind, index, incarnation):
        given.append((kind, index, incarnation))
        return ENVIRONMENT

    supervisor = await supervise(spawn, n=2)
    lines = await until(lambda: lines_of(supervisor), "their logs")
    infos = supervisor.processes()
    assert lines == [[f"rollout-{index} {infos[index].incarnation}"] for index in (0, 1)]
    assert sorted(given) == sorted(("rollout", info.index, info.incarnation) for info in infos)
    assert infos[0].incarnation != infos[1].incarnation


async def test_a_killed_process_is_started_again_with_another_incarnation(supervise, until):
    supervisor = await supervise(SLEEP)
    (pid,) = await until(lambda: pids(supervisor), "the process")
    (before,) = supervisor.processes()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: pids(supervisor) not in ([], [pid]), "the next process")
    (after,) = supervisor.processes()
    assert after.incarnation != before.incarnation and after.restarts == 1


async def test_a_crashing_process_is_restarted_more_and_more_slowly(supervise, until):
    ends = []
    await supervise(CRASH, on_end=lambda end: ends.append((time.monotonic(), end)))
    await until(lambda: len(ends) >= 4, "four ends")
    times = [at for at, _ in ends]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[0] >= 0.2 and pauses[1] >= 0.4 and pauses[2] >= 0.8
    assert ends[0][1].status == 1 and "broken: no such model" in ends[0][1].last_words


async def test_the_pause_is_short_again_after_a_long_life(supervise, until, monkeypatch):
    monkeypatch.setattr(child, "STABLE_S", 0.0)
    monkeypatch.setattr(child, "FIRST_BACKOFF_S", 0.01)
    ends = []
    await supervise(CRASH, on_end=ends.append)
    await until(lambda: len(ends) >= 14, "fourteen ends; pauses that grow would take 40 s", 30)


async def test_kill_hits_one_incarnation_only(supervise, until):
    supervisor = await supervise(SLEEP)
    (pid,) = await until(lambda: pids(supervisor), "the process")
    (info,) = supervisor.processes()
    assert not supervisor.kill("rollout-0", "another incarnation")
    assert not supervisor.kill("rollout-9", info.incarnation)
    assert not gone(pid)
    assert supervisor.kill("rollout-0", info.incarnation)
    await until(lambda: gone(pid), "the kill")


async def test_set_count_starts_and_stops(supervise, until):
    supervisor = await supervise(SLEEP)
    await until(lambda: len(pids(supervisor)) == 1, "one process")
    supervisor.set_count("rollout", 3)
    first, *others = await until(lambda: len(pids(supervisor)) == 3 and pids(supervisor), "three processes")
    supervisor.set_count("rollout", 1)
    # A process is in the table until all that it started has ended too.
    await until(lambda: pids(supervisor) == [first], "two ends")
    assert all(gone(pid) for pid in others) and supervisor.count("rollout") == 1
    with pytest.raises(ValueError, match="-1"):
        supervisor.set_count("rollout", -1)


async def test_stop_asks_first_and_kills_after_the_grace(supervise, until):
    supervisor = await supervise(SLEEP)
    await until(lambda: pids(supervisor), "the process")
    supervisor.set_count("trainer", 0)
    began = time.monotonic()
    assert await supervisor.stop(10) == -signal.SIGTERM
    assert time.monotonic() - began < 5


async def test_a_process_deaf_to_sigterm_is_killed(supervise, until):
    supervisor = await supervise(DEAF)
    await until(lambda: lines_of(supervisor), "its first word")
    (pid,) = pids(supervisor)
    assert await supervisor.stop(0.5) == -signal.SIGKILL
    assert gone(pid)


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_what_a_process_started_goes_with_it(supervise, until, how):
    supervisor = await supervise(PARENT)
    ((line,),) = await until(lambda: lines_of(supervisor), "the grandchild")
    (info,), grandchild = supervisor.processes(), int(line)
    if how == "kill":
        supervisor.kill(info.instance, info.incarnation)
    else:
        await supervisor.stop(1)
    await until(lambda: gone(grandchild), "the grandchild's end")


async def test_a_command_that_does_not_exist_is_its_last_word(supervise, until):
    ends = []
    await supervise(["/no/such/program"], on_end=ends.append)
    await until(lambda: ends, "the end")
    assert ends[0].status == 127
    assert ends[0].last_words == "cannot start /no/such/program: No such file or directory"


async def test_children_die_with_a_killed_supervisor(tmp_path, until, processes):
    supervisor = processes([*ENTRY_POINT, "--log-dir", tmp_path, "--", *SLEEP], stderr=subprocess.DEVNULL)
    (started,) = await until(lambda: psutil.Process(supervisor.pid).children(), "the child", 20)
    await until(lambda: started.cmdline() == SLEEP, "the child's exec")
    supervisor.kill()
    await until(lambda: gone(started.pid), "the child's end")


async def test_the_container_entry_point_stops_its_child_and_shows_its_output(tmp_path, until, processes):
    arguments = ["--name", "rollout-x", "--log-dir", tmp_path, "--", *ENVIRONMENT]
    supervisor = processes([*ENTRY_POINT, *arguments], stderr=subprocess.PIPE)
    line = await asyncio.to_thread(supervisor.stderr.readline)
    assert line.startswith(b"rollout-x ")
    (started,) = psutil.Process(supervisor.pid).children()
    supervisor.send_signal(signal.SIGTERM)
    await until(lambda: supervisor.poll() is not None, "the end")
    assert gone(started.pid) and supervisor.returncode == 1  # the child ended by the signal


async def test_one_entry_point_starts_an_instance_for_each_device_on_ports_of_their_own(
    tmp_path, processes, monkeypatch
):
    monkeypatch.setenv("HEADRACE_LISTEN", "0.0.0.0:7000")
    monkeypatch.setenv("HEADRACE_METRICS_PORT", "9100")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert instance_count("devices") == 2
    # Both write to one stream, and an unbuffered `print` writes word by word: each says its line in one call.
    told = python(
        "import os, sys, time; said = ' '.join([os.environ['HEADRACE_NAME'], *sys.argv[1:]]);"
        " os.write(1, f'{said}\\n'.encode()); time.sleep(60)"
    )
    arguments = ["--name", "rollout-x", "--count", "2", "--log-dir", tmp_path, "--", *told]
    supervisor = processes([*ENTRY_POINT, *arguments], stderr=subprocess.PIPE)
    lines = {await asyncio.to_thread(supervisor.stderr.readline) for _ in range(2)}
    assert lines == {b"rollout-x-0\n", b"rollout-x-1 --listen 0.0.0.0:7001 --metrics-port 9101\n"}


@pytest.mark.parametrize("count", ["0", "all", "-1", "2000"])
def test_a_number_of_instances_that_cannot_be_is_refused(count):
    with pytest.raises(ValueError, match="write 1 to 1024, or devices"):
        instance_count(count)


def exits_told(fleet):
    return [message.exit for message in fleet.supervised if message.WhichOneof("event") == "exit"]


async def test_the_coordinator_hears_of_processes_and_ends(supervise, until, servers, new_fleet):
    fleet = new_fleet()
    _, address = await servers(fleet)
    supervisor = await supervise(CRASH, coordinator=address, scalable_kinds=["rollout"])
    supervisor.set_count("coordinator", 1)
    exits = await until(lambda: exits_told(fleet), "an exit")
    assert (exits[0].instance, exits[0].exit_status) == ("rollout-0", 1)
    assert "no such model" in exits[0].last_words and fleet.supervised[0].host == "h"
    tables = [m.processes for m in fleet.supervised if m.WhichOneof("event") == "processes"]
    assert list(tables[-1].scalable_kinds) == [fleet_pb2.SERVICE_KIND_ROLLOUT]
    listed = {process.instance for table in tables for process in table.processes}
    assert listed == {"rollout-0"}
    assert {exit.instance for exit in exits} == {"rollout-0"}


async def test_the_coordinator_scales_and_kills(supervise, until, servers, new_fleet):
    fleet = new_fleet()
    _, address = await servers(fleet)
    supervisor = await supervise(SLEEP, coordinator=address, scalable_kinds=["rollout"])

    def send(**command):
        fleet.supervisor_commands.put_nowait(fleet_pb2.SuperviseResponse(**command))

    def results():
        return [m.scale_result for m in fleet.supervised if m.WhichOneof("event") == "scale_result"]

    send(scale=fleet_pb2.Scale(request_id="a", kind=fleet_pb2.SERVICE_KIND_ROLLOUT, count=2))
    await until(lambda: len(pids(supervisor)) == 2, "two processes")
    send(scale=fleet_pb2.Scale(request_id="b", kind=fleet_pb2.SERVICE_KIND_TRAINER, count=2))
    await until(lambda: len(results()) == 2, "both results")
    assert [(r.request_id, bool(r.error)) for r in results()] == [("a", False), ("b", True)]
    assert "scalable kinds: rollout" in results()[1].error and supervisor.count("trainer") == 0
    info = supervisor.processes()[0]
    send(kill=fleet_pb2.Kill(instance=info.instance, incarnation=info.incarnation, reason="stuck"))
    await until(lambda: gone(info.pid), "the kill")
    exits = await until(lambda: exits_told(fleet), "its exit")
    assert (exits[0].incarnation, exits[0].exit_status) == (info.incarnation, -signal.SIGKILL)


async def test_more_than_the_host_can_hold_is_refused_with_the_figures(supervise, until, servers, new_fleet):
    fleet = new_fleet()
    _, address = await servers(fleet)
    memory = HostMemory(total=24 * GIB, available=4 * GIB)
    capacity = Capacity(lambda: memory, lambda pid: GIB // 2, {"rollout": GIB // 4})
    supervisor = await supervise(SLEEP, coordinator=address, scalable_kinds=["rollout"], capacity=capacity)

    def scale(name, count):
        scale = fleet_pb2.Scale(request_id=name, kind=fleet_pb2.SERVICE_KIND_ROLLOUT, count=count)
        fleet.supervisor_commands.put_nowait(fleet_pb2.SuperviseResponse(scale=scale))

    def errors():
        results = [m.scale_result for m in fleet.supervised if m.WhichOneof("event") == "scale_result"]
        return {result.request_id: result.error for result in results}

    await until(lambda: pids(supervisor), "the process")
    scale("too many", 999)
    scale("fits", 4)
    await until(lambda: len(errors()) == 2, "both answers")
    assert errors()["too many"] == (
        "scale rollout=999: this host can hold 4 rollout processes (0.5 GiB each, measured; "
        "4.0 of 24.0 GiB available, 2.4 kept free); 1 run now"
    )
    assert errors()["fits"] == "" and supervisor.count("rollout") == 4


async def test_a_newer_number_replaces_an_unfinished_one(supervise, until):
    supervisor = await supervise(DEAF, scalable_kinds=["rollout"], starts_at_once=2)
    await until(lambda: lines_of(supervisor) and pids(supervisor), "the first process")
    (first,) = pids(supervisor)
    supervisor.set_count("rollout", 6)
    await until(lambda: len(pids(supervisor)) == 2, "the second process")
    (second,) = set(pids(supervisor)) - {first}
    began = time.monotonic()
    supervisor.set_count("rollout", 1)
    await until(lambda: gone(second), "the end of what had just started")
    assert time.monotonic() - began < 10, "15 s is the grace of a process that has started"
    await until(lambda: pids(supervisor) == [first], "one process in the supervisor's view")
    assert supervisor.count("rollout") == 1


async def test_a_bounded_number_of_processes_starts_at_once(supervise, until, tmp_path):
    def spawn(kind, index, incarnation):
        return python(LISTEN_WHEN.format(str(tmp_path / f"go-{index}")))

    supervisor = await supervise(spawn, n=4, starts_at_once=2)

    def running():
        return [info.index for info in supervisor.processes() if info.pid]

    await until(lambda: running() == [0, 1], "two processes")
    await asyncio.sleep(0.5)
    assert running() == [0, 1]
    (tmp_path / "go-1").touch()
    await until(lambda: running() == [0, 1, 2], "the third")
    supervisor.kill("rollout-2", supervisor.processes()[2].incarnation)
    await until(lambda: set(running()) >= {0, 1, 3}, "the fourth, in the place of one that ended")


async def test_what_is_being_stopped_stays_in_the_table_until_it_has_ended(supervise, until):
    supervisor = await supervise(DEAF, n=2)
    await until(lambda: lines_of(supervisor), "their first words")
    last = supervisor.processes()[1]
    supervisor.set_count("rollout", 1)
    supervisor.set_count("rollout", 2)
    listed = [(info.instance, info.pid) for info in supervisor.processes()]
    assert listed[1:] == [("rollout-1", 0), ("rollout-1", last.pid)], "its successor waits for its end"
    assert supervisor.kill("rollout-1", last.incarnation)
    await until(lambda: supervisor.processes()[1].pid, "the successor")
    assert gone(last.pid)


async def test_a_kind_is_stopped_before_the_others_and_nothing_is_scaled_then(supervise, until):
    supervisor = await supervise(SLEEP)
    supervisor.set_count("trainer", 1)
    await until(lambda: len(pids(supervisor)) == 2, "both processes")
    await supervisor.stop_kind("trainer", 10)
    assert [(info.kind, bool(info.pid)) for info in supervisor.processes()] == [("rollout", True)]
    assert await supervisor.scale("rollout", 2) == "scale rollout=2: the fleet is stopping"


async def test_a_restarted_coordinator_hears_of_ends_that_it_missed(supervise, until, servers, new_fleet):
    fleet = new_fleet()
    server, address = await servers(fleet)
    supervisor = await supervise(SLEEP, coordinator=address)
    (pid,) = await until(lambda: pids(supervisor), "the process")
    await until(lambda: fleet.supervised, "the line")
    (before,) = supervisor.processes()
    await server.drain(0)
    os.kill(pid, signal.SIGKILL)
    later = new_fleet()
    await until(lambda: supervisor.processes()[0].restarts, "the restart")
    await servers(later, listen=address)
    exits = await until(lambda: exits_told(later), "the exit")
    assert exits[0].incarnation == before.incarnation
    assert later.supervised[0].WhichOneof("event") == "processes"
