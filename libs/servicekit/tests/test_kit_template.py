"""Services that are forked from a template, with a service and a torch of the test's own."""

import json
import os
import signal
import sys
import time

import psutil
import pytest
from headrace_servicekit.process.supervisor import Supervisor

SERVICE = """
import json, os, random, sys, time
import torch
state = {
    "arguments": sys.argv[1:],
    "shown": open("/proc/self/cmdline").read().split(chr(0))[: len(sys.argv) + 2],
    "name": os.environ["HEADRACE_NAME"],
    "torch": torch.IMPORTED_BY,
    "pid": os.getpid(),
    "session": os.getsid(0),
    "input": sys.stdin.read(),
    "open": sorted(int(each) for each in os.listdir("/proc/self/fd")),
    "random": random.random(),
}
print(json.dumps(state), flush=True)
print("to stderr", file=sys.stderr, flush=True)
if "--end" in sys.argv:
    sys.exit(7)
time.sleep(600)
"""
TORCH = """
import os
IMPORTED_BY = os.getpid()
class cuda:
    _is_in_bad_fork = staticmethod(lambda: {lost} and os.getpid() != IMPORTED_BY)
"""
KEPT = TORCH.format(lost=False)


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
async def fleet(tmp_path, monkeypatch):
    """`await fleet(*arguments, n=1)`: a supervisor of such services."""
    made = []

    async def make(*arguments, n=1, torch=KEPT, **options):
        for name, text in (("headrace_rollout", SERVICE), ("torch", torch)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(text if name == "torch" else "")
            (tmp_path / name / "__main__.py").write_text(text)
        for name in ("transformers", "safetensors"):  # the real ones need the real torch
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").touch()
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
        command = [sys.executable, "-m", "headrace_rollout", *arguments]
        supervisor = Supervisor("h", "", None, lambda *_: command, tmp_path / "logs", **options)
        supervisor.set_count("rollout", n)
        await supervisor.start()
        made.append(supervisor)
        return supervisor

    yield make
    for supervisor in made:
        await supervisor.stop(2)


@pytest.fixture
def told(until):
    """`await told(supervisor)`: what each process says of itself, once it has said all."""

    async def tell(supervisor):
        def read():
            logs = [info.log_file for info in supervisor.processes()]
            texts = [log.read_text() if log.exists() else "" for log in logs]
            return all("stderr" in text for text in texts) and [
                json.loads(text.splitlines()[0]) for text in texts
            ]

        return await until(read, "their words")

    return tell


async def test_a_forked_service_finds_what_a_started_one_finds(fleet, told):
    supervisor = await fleet("--devices", "cpu:0", n=2)
    first, second = await told(supervisor)
    (template,) = supervisor.templates()
    assert [first["torch"], second["torch"]] == [template, template]
    for index, state in enumerate((first, second)):
        assert state["arguments"] == ["--devices", "cpu:0"]
        assert state["shown"][:5] == [sys.executable, "-m", "headrace_rollout", "--devices", "cpu:0"]
        assert state["name"] == f"rollout-{index}"
        assert state["pid"] == state["session"] == supervisor.processes()[index].pid
        assert state["input"] == ""
        assert state["open"] == [0, 1, 2, 3]  # 3 is the look itself
    assert first["random"] != second["random"]


async def test_its_end_is_told_and_the_next_is_forked_too(fleet, until):
    ends = []
    supervisor = await fleet("--end", on_end=ends.append)
    await until(lambda: len(ends) > 1, "two ends")
    assert {end.status for end in ends} == {7} and ends[0].last_words.endswith("to stderr")
    assert len({json.loads(end.last_words.splitlines()[0])["torch"] for end in ends}) == 1
    assert supervisor.templates()


async def test_a_killed_template_takes_its_services_along_and_all_come_back(fleet, told, until):
    ends = []
    supervisor = await fleet(on_end=ends.append)
    (before,) = await told(supervisor)
    os.kill(before["torch"], signal.SIGKILL)
    await until(lambda: ends, "the end")
    assert ends[0].status == -signal.SIGKILL
    await until(lambda: gone(before["pid"]), "its process's end")
    await until(lambda: supervisor.processes()[0].pid not in (0, before["pid"]), "the next")
    assert supervisor.templates() not in ([], [before["torch"]])


async def test_a_service_that_could_not_use_cuda_is_started_anew_with_the_same_id(fleet, told):
    supervisor = await fleet(torch=TORCH.format(lost=True))
    (state,) = await told(supervisor)
    assert state["torch"] == state["pid"] == supervisor.processes()[0].pid


async def test_without_a_template_a_service_is_started_by_itself(fleet, told):
    broken = "import os, sys\nif 'template' in str(sys.orig_argv): os._exit(3)\n" + KEPT
    supervisor = await fleet(torch=broken)
    (state,) = await told(supervisor)
    assert state["torch"] == state["pid"]


async def test_the_template_can_be_switched_off(fleet, told, monkeypatch):
    monkeypatch.setenv("HEADRACE_TEMPLATE", "0")
    supervisor = await fleet()
    (state,) = await told(supervisor)
    assert state["torch"] == state["pid"] and supervisor.templates() == []


async def test_a_stop_does_not_wait_for_imports(fleet, until, monkeypatch):
    monkeypatch.setattr("headrace_servicekit.process.child.STARTING_GRACE_S", 0.2)
    supervisor = await fleet(torch="import time\ntime.sleep(60)")
    await until(supervisor.templates, "the template")
    began = time.monotonic()
    await supervisor.stop()
    assert time.monotonic() - began < 10
