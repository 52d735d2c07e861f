"""The launcher with real child processes: what it starts it keeps, and what it leaves is nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from headrace_cli.errors import CommandError
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.gpu_locks import GpuLocks
from headrace_cli.launcher.plan import FleetPlan, Wiring, backend_python, engine_python, simulator_python
from headrace_cli.launcher.start import require_room
from headrace_servicekit.memory.capacity import GIB, Capacity, HostMemory


def wait_for(condition: Callable[[], object], what: str, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def pid_of(fleet, name: str) -> int:
    """The process's id; never 0, which kill() would take for our own process group."""
    wait_for(lambda: _pid(fleet, name), f"a process of {name}")
    return _pid(fleet, name)


def _pid(fleet, name: str) -> int:
    return next(item["pid"] for item in fleet.state()["processes"] if item["name"].startswith(name))


def test_up_is_ready_and_down_leaves_only_data(fleet):
    ready = fleet.up("--rollout", "2", "--devices", "cpu:0,cpu:1")
    assert {item["name"] for item in ready["instances"]} == {
        "rollout-0", "rollout-1", "trainer-0", "reward-0", "simulator-0",
    }  # fmt: skip
    assert next(i for i in ready["instances"] if i["name"] == "rollout-0")["devices"] == ["cpu:0", "cpu:1"]
    assert next(i for i in ready["instances"] if i["name"] == "reward-0")["devices"] == ["cpu:0", "cpu:1"]
    assert ready["ready_s"] > 0
    shared_memory = Path(fleet.state()["shared_memory"])
    assert shared_memory.is_dir()
    for name in ("token", "http-token"):
        token = fleet.data_dir / name
        assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text()) >= 32
    assert ready["token_file"] == str(fleet.data_dir / "http-token")
    listed = fleet.run("run", "list", "--json")  # the stand-in asks for that token
    assert (listed.returncode, json.loads(listed.stdout)) == (0, {"runs": []}), listed.stderr

    environment = Path(f"/proc/{pid_of(fleet, 'rollout')}/environ").read_bytes().split(b"\0")
    assert b"OMP_NUM_THREADS=1" in environment

    down = fleet.run("down", "--json")
    assert (down.returncode, json.loads(down.stdout)) == (0, {"stopped": True})
    assert fleet.processes() == []
    assert not shared_memory.exists() and not (fleet.data_dir / "fleet.json").exists()
    assert any((fleet.data_dir / "redis").rglob("*.aof"))


def test_without_a_token_only_when_told(tmp_path):
    plan = FleetPlan(str(tmp_path))
    wiring = Wiring(plan, "127.0.0.1:1", tmp_path / "token", tmp_path / "http-token", tmp_path, tmp_path)
    asked = wiring.coordinator_command("redis://here")
    assert asked[asked.index("--http-token-file") + 1] == str(tmp_path / "http-token")
    assert "--no-token" not in asked
    assert "--no-token" in replace(wiring, http_token_file=None).coordinator_command("redis://here")


def test_store_keeps_what_was_written(fleet):
    import redis

    fleet.up()
    store = redis.Redis.from_url(fleet.state()["redis_url"])
    store.set("run", "kept")
    store.close()
    os.kill(pid_of(fleet, "store"), signal.SIGKILL)
    fleet.run("down")
    fleet.up()
    assert redis.Redis.from_url(fleet.state()["redis_url"]).get("run") == b"kept"


@pytest.mark.parametrize("name", ["store", "coordinator", "rollout-0"])
def test_what_dies_is_started_again(fleet, name):
    fleet.up()
    before = pid_of(fleet, name)
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: _pid(fleet, name) not in (0, before), f"a new {name}")


def test_sigkill_of_the_launcher_takes_everything_along(fleet):
    ready = fleet.up()
    services = {pid_of(fleet, item["name"]) for item in fleet.state()["processes"]}
    grandchildren = {item["child"] for item in ready["instances"]}
    os.kill(ready["launcher_pid"], signal.SIGKILL)
    wait_for(lambda: not services & set(fleet.processes()), "the services' end")
    # Children of services in sessions of their own are the next command's to sweep.
    assert grandchildren & set(fleet.processes())
    # So it does for `up`, which takes no notice of the state file that was left.
    assert (fleet.data_dir / "fleet.json").exists()
    assert fleet.up()["launcher_pid"] != ready["launcher_pid"]
    assert not grandchildren & set(fleet.processes())


def test_sigterm_stops_the_fleet(fleet):
    os.kill(fleet.up()["launcher_pid"], signal.SIGTERM)
    wait_for(lambda: not fleet.processes(), "the fleet's end")
    assert not (fleet.data_dir / "fleet.json").exists()


@pytest.mark.parametrize("how", ["down", "sigterm"])
def test_trainers_stop_first_and_the_coordinator_last(fleet, how):
    launcher = fleet.up("--scale", "rollout=2")["launcher_pid"]
    (fleet.data_dir / "slow-trainer").touch()
    if how == "down":
        said = fleet.run("down").stderr
        stopped = [line for line in said.splitlines() if line.startswith("stopping")]
        assert stopped and stopped[0] == "stopping the trainers, at most 30 s", said
    else:
        os.kill(launcher, signal.SIGTERM)
        wait_for(lambda: not fleet.processes(), "the fleet's end")
    ends = (fleet.data_dir / "ends").read_text().splitlines()
    assert ends[0] == "trainer 200" and ends[-1] == "coordinator"
    assert sorted(ends[1:-1]) == ["reward 200", "rollout 200", "rollout 200", "simulator 200"]


def test_second_up_on_one_data_dir_is_a_sentence(fleet):
    ready = fleet.up()
    again = fleet.run("up", "--port", "1")
    assert again.returncode == 2
    assert f"launcher {ready['launcher_pid']}" in again.stderr and "headrace down" in again.stderr
    assert "Traceback" not in again.stderr
    assert fleet.run("status", "--json").returncode == 0


def test_taken_port_is_a_sentence(fleet):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", fleet.port))
        taken.listen()
        result = fleet.run("up", "--port", str(fleet.port))
    assert result.returncode == 2
    assert f"--port: {fleet.port} is in use" in result.stderr
    assert fleet.processes() == []


def test_unwritable_data_dir_is_a_sentence(fleet):
    fleet.data_dir.write_text("a file where a directory should be")
    result = fleet.run("up", "--port", str(fleet.port))
    fleet.data_dir.unlink()
    assert result.returncode == 2
    assert "--data-dir" in result.stderr and "cannot be written" in result.stderr


def test_full_disk_is_a_sentence(tmp_path):
    with pytest.raises(CommandError, match=r"MiB free, a fleet needs") as caught:
        DataDir.at(tmp_path).prepare(needed_bytes=2**60)
    assert caught.value.exit_code == 2


def test_more_processes_than_the_host_holds_is_a_sentence():
    capacity = Capacity(lambda: HostMemory(24 * GIB, 20 * GIB), lambda pid: 0)
    one = dict.fromkeys(("rollout", "trainer", "reward", "simulator"), 1)
    require_room({**one, "rollout": 4}, capacity)
    with pytest.raises(
        CommandError, match=r"--rollout: .*can hold 21 rollout processes \(0.75 GiB each"
    ) as caught:
        require_room({**one, "rollout": 256}, capacity)
    assert caught.value.exit_code == 2
    require_room(one, Capacity(lambda: HostMemory(GIB, 0), lambda pid: 0))


def test_bad_device_name_is_a_sentence(fleet):
    result = fleet.run("up", "--devices", "cpu0")
    assert result.returncode == 2
    assert "--devices: 'cpu0'" in result.stderr and "cpu:0" in result.stderr


def test_coordinator_that_cannot_start_shows_its_last_words(fleet):
    fleet.data_dir.mkdir()
    (fleet.data_dir / "break-coordinator").touch()
    result = fleet.run("up", "--port", str(fleet.port))
    assert result.returncode == 1
    assert "coordinator ended" in result.stderr and "the stand-in was told to break" in result.stderr
    assert fleet.processes() == []


def test_foreground_ends_with_ctrl_c_and_with_its_own_death(fleet):
    for signal_number, status in ((signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen(
            fleet.command("up", "--foreground", "--json", "--port", str(fleet.port)),
            env=fleet.environment,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["instances"]
        process.send_signal(signal_number)
        assert process.wait(30) == status
        wait_for(lambda: not fleet.processes(), "the fleet's end")


@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_end_the_command_before_its_foreground_fleet(fleet, ends):
    process = subprocess.Popen(
        fleet.command("up", "--foreground", "--port", str(fleet.port)),
        env=fleet.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    while "stop: Ctrl-C" not in process.stdout.readline():
        pass
    folder = Path(fleet.state()["shared_memory"])
    process.send_signal(ends)
    assert folder.is_dir() and "stopping" in process.stderr.readline()
    process.send_signal(ends)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert not folder.exists(), "it is removed when all processes have ended"


def test_down_without_a_fleet(fleet):
    result = fleet.run("down")
    assert (result.returncode, "no fleet runs" in result.stdout) == (0, True)


def test_long_data_dir_still_gets_a_socket(tmp_path):
    data_dir = DataDir.at(tmp_path / ("long" * 40))
    assert len(os.fsencode(data_dir.socket_path(data_dir.root))) <= 100
    data_dir.short_folder.rmdir()


def test_help_loads_nothing_that_takes_long():
    subprocess.run([sys.executable, "-m", "headrace_cli", "--help"], check=True, capture_output=True)
    heavy = "{'torch', 'grpc', 'httpx', 'yaml', 'pydantic'}"
    code = f"import sys, headrace_cli.main; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_rollout_instances_run_on_the_python_that_has_their_engine(tmp_path):
    plan = FleetPlan(str(tmp_path), pythons={"rollout": "/engine/python"})
    wiring = Wiring(plan, "127.0.0.1:1", tmp_path / "token", None, tmp_path, tmp_path)
    assert wiring.instance_command("rollout", 0, "a")[0] == "/engine/python"
    assert wiring.instance_command("trainer", 0, "a")[0] == sys.executable


def make_environment(folder, engine, device=None):
    python = folder / ".envs" / engine / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    if device is not None:
        (folder / ".envs" / engine / ".complete").write_text(f"{device}\n")
    return str(python)


def test_an_engine_is_found_in_its_environment_or_named_with_what_makes_it(tmp_path):
    assert engine_python("transformers") == ""
    with pytest.raises(CommandError, match="make engines ENGINE=no_such_engine"):
        engine_python("no_such_engine", folder=tmp_path)
    with pytest.raises(CommandError, match="write auto, transformers, vllm or sglang"):
        engine_python("../bin")
    python = make_environment(tmp_path, "no_such_engine")
    assert engine_python("no_such_engine", folder=tmp_path) == python


@pytest.mark.parametrize(
    ("device", "devices", "words"),
    [
        (
            "cpu",
            ["gpu:0"],
            "the build of other_engine for cpu, and this fleet has GPUs; make engines ENGINE=other",
        ),
        ("cuda", ["cpu:0"], "the build of other_engine for cuda, and this fleet has none"),
        ("cpu", ["cpu:0"], ""),
        ("cuda", ["gpu:0", "gpu:1"], ""),
        ("rocm", ["gpu:0"], ""),
    ],
)
def test_an_environment_that_was_made_for_other_devices_is_refused(tmp_path, device, devices, words):
    python = make_environment(tmp_path, "other_engine", device)
    if not words:
        assert engine_python("other_engine", devices, tmp_path) == python
        return
    with pytest.raises(CommandError) as refused:
        engine_python("other_engine", devices, tmp_path)
    assert words in " ".join(str(refused.value).split()) and "--engine" in str(refused.value)


def test_a_fleet_with_gpus_takes_the_engine_that_was_made_for_them(tmp_path):
    """README's one command for GPUs: `make engines`, and `headrace up` as everywhere."""
    gpus = ["gpu:0"]
    assert engine_python("auto", gpus, tmp_path) == ""
    sglang = make_environment(tmp_path, "sglang", "cuda")
    assert engine_python("auto", gpus, tmp_path) == sglang
    vllm = make_environment(tmp_path, "vllm", "cpu")  # for `make test-engines`
    assert engine_python("auto", gpus, tmp_path) == sglang
    (tmp_path / ".envs" / "vllm" / ".complete").write_text("cuda\n")
    assert engine_python("auto", gpus, tmp_path) == vllm
    assert engine_python("auto", ["cpu:0"], tmp_path) == ""


def test_a_training_backend_is_found_in_its_environment_or_named_with_what_makes_it(tmp_path):
    assert backend_python("fsdp") == ""
    with pytest.raises(CommandError, match="make megatron"):
        backend_python("megatron", tmp_path)
    python = tmp_path / ".envs" / "megatron" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert backend_python("megatron", tmp_path) == str(python)
    with pytest.raises(CommandError, match="fsdp, megatron"):
        backend_python("deepspeed", tmp_path)


def test_a_simulator_is_found_in_its_environment_or_named_with_what_makes_it(tmp_path):
    assert simulator_python("gymnasium") == ""
    with pytest.raises(CommandError, match=r"install headrace-environments\[verifiers\], or in a checkout"):
        simulator_python("verifiers", tmp_path)
    with pytest.raises(CommandError, match="make simulators SIM=libero"):
        simulator_python("libero", tmp_path)
    python = tmp_path / ".envs" / "libero" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert simulator_python("libero", tmp_path) == str(python)
    with pytest.raises(CommandError, match="gymnasium, metaworld, maniskill, libero, verifiers, web"):
        simulator_python("mujoco")


def test_a_gpu_is_of_one_fleet_alone(tmp_path, monkeypatch):
    """A host that joins two heads would lease the same device twice."""
    seen = ["GPU-aa/gpu:0", "GPU-bb/gpu:1"]
    monkeypatch.setattr("headrace_cli.launcher.gpu_locks.detect_devices", lambda: seen)
    first = GpuLocks(["GPU-bb/gpu:1"], tmp_path / "one", tmp_path / "locks")
    second = GpuLocks([], tmp_path / "two", tmp_path / "locks")
    first.acquire()
    with pytest.raises(
        CommandError, match=r"--devices: GPU-bb is in use by the fleet of \S+/one.*--devices gpu:N"
    ):
        second.acquire()
    GpuLocks(["GPU-aa/gpu:0"], tmp_path / "three", tmp_path / "locks").acquire()
    first.release()
    with pytest.raises(CommandError, match=r"GPU-aa is in use by the fleet of .*three"):
        second.acquire()
    seen[:] = ["host/cpu:0"]
    second.acquire()  # slots of a CPU may be shared
