"""`doctor`: what this machine has, what would stop a fleet here, and what a fleet would choose by itself."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from textwrap import wrap

import typer

from headrace_cli.commands.options import DEFAULT_DATA_DIR, DataDirOption, JsonFlag
from headrace_cli.errors import CommandError
from headrace_cli.output import console, print_json, styled

GIB = 2**30
TORCH_S = 120.0
LEAST_SHM, LEAST_DISK, LEAST_FILES = GIB, 10 * GIB, 4096
SHARED_MEMORY = Path("/dev/shm")
DRIVER = Path("/proc/driver/nvidia/version")
NEEDED = ("coordinator", "rollout", "trainer", "reward", "simulator")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_ASK_TORCH = (
    "import json, torch; c = torch.cuda; on = c.is_available(); "
    "print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda, 'hip': torch.version.hip, "
    "'gpus': [[p.name, p.total_memory, f'{p.major}.{p.minor}'] for p in map(c.get_device_properties, "
    "range(c.device_count() if on else 0))]}))"
)


@dataclass(frozen=True)
class Finding:
    """One thing of this machine; with a `problem` it stops a fleet or slows it, and `fix` is what to do."""

    what: str
    value: str
    problem: str = ""
    fix: str = ""


def doctor(data_dir: DataDirOption = DEFAULT_DATA_DIR, as_json: JsonFlag = False) -> None:
    """Show what this machine has, what would stop a fleet here, and what it would choose. Exit code 1 for problems.

    Paste it into a report: it holds no token and no name of a user.
    """
    shown = sys.stdout.isatty() and not as_json
    with console().status("looking at this machine") if shown else nullcontext():
        found = list(examine(data_dir))
    bad = [each for each in found if each.problem]
    if as_json:
        print_json({"findings": [asdict(each) for each in found], "problems": len(bad)})
    else:
        width = max(len(each.what) for each in found)
        for each in found:
            mark = ("  !", "bold red") if each.problem else (" ok", "green")
            room = max(20, console().width - width - 7)
            first, *others = wrap(each.value, room, break_long_words=False, break_on_hyphens=False) or [""]
            console().print(styled(mark, f"  {each.what:{width}}  {first}"))
            for line in others:
                console().print(" " * (width + 7) + line, markup=False)
            if each.problem:
                console().print(styled(f"     {each.problem}; ", (each.fix, "green")))
        console().print(f"\n{len(bad)} problem{'' if len(bad) == 1 else 's'}")
    if bad:
        raise typer.Exit(1)


def examine(data_dir: Path) -> Iterator[Finding]:
    """Everything that is looked at, in the order in which it is shown. Starts no fleet and writes nothing."""
    yield Finding("Python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    yield _packages()
    yield from _torch_and_gpus(_ask_torch())
    yield from _room(data_dir)
    yield _files()
    yield from _containment()
    yield _fleet(data_dir)
    yield from _proxies()
    yield from _environments()
    yield from _choices()


def _packages() -> Finding:
    found = {each.metadata["Name"]: each.version for each in distributions()}
    own = {name.removeprefix("headrace-"): version for name, version in found.items() if "headrace" in name}
    words = "; ".join(
        f"{version}: {', '.join(sorted(name for name in own if own[name] == version))}"
        for version in sorted(set(own.values()))
    )
    if missing := [name for name in NEEDED if name not in own]:
        problem = f"no {', '.join(missing)} in this Python: it can speak to a fleet and cannot start one"
        return Finding("packages", words, problem, "pip install 'headrace[local]'")
    return Finding("packages", words)


def _ask_torch() -> dict[str, object] | str:
    """What torch says in a process of its own, or why it does not."""
    command = [sys.executable, "-c", _ASK_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def torch_findings(
    torch: dict[str, object] | str, seen: list[str], memory: dict[str, int]
) -> Iterator[Finding]:
    """What torch is built for beside the GPUs that the driver shows, with the bytes of each by UUID."""
    if isinstance(torch, str):
        yield Finding("torch", "none", torch, "pip install torch, the build for this machine's devices")
        usable: object = []
    else:
        build = (
            f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPU"
        )
        yield Finding("torch", f"{torch['version']}, the build for {build}")
        usable = torch["gpus"]
    driver = DRIVER.read_text(encoding="utf-8").splitlines()[0] if DRIVER.is_file() else ""
    if not seen:
        yield Finding("GPUs", "none" + (f"; {driver}" if driver else ""))
        return
    sizes = [f"{memory[uuid] / GIB:.0f} GiB" if uuid in memory else "unknown size" for uuid in seen]
    words = f"{len(seen)}: " + ", ".join(sizes) + (f"; {driver}" if driver else "")
    if isinstance(usable, list) and len(usable) < len(seen):
        problem = f"torch can use {len(usable)} of them"
        yield Finding(
            "GPUs", words, problem, "install torch for them; see nvidia-smi or rocm-smi, and the driver"
        )
    else:
        yield Finding("GPUs", words)


def _torch_and_gpus(torch: dict[str, object] | str) -> Iterator[Finding]:
    from headrace_servicekit.lease.gpus import MAKERS, find_gpus

    gpus = [gpu.uuid for gpu in find_gpus(os.environ, MAKERS)]
    memory = {uuid: size for maker in MAKERS for uuid, size in maker.memory().items()} if gpus else {}
    yield from torch_findings(torch, gpus, memory)


def room_findings(memory: int, shared: int, disk: int, place: Path) -> Iterator[Finding]:
    """Bytes that are free: of memory, of /dev/shm, and of the disk that has the data directory."""
    yield Finding("memory", f"{memory / GIB:.1f} GiB free")
    words = f"{shared / GIB:.1f} GiB free"
    if shared < LEAST_SHM:
        fix = "docker run --shm-size 8g; in Kubernetes an emptyDir of medium Memory at /dev/shm"
        yield Finding(str(SHARED_MEMORY), words, "weights go from trainers to rollouts through it", fix)
    else:
        yield Finding(str(SHARED_MEMORY), words)
    words = f"{disk / GIB:.1f} GiB free"
    if disk < LEAST_DISK:
        yield Finding(
            "disk", words, "checkpoints may not fit", f"free some, or give a --data-dir not on {place}"
        )
    else:
        yield Finding("disk", words)


def _room(data_dir: Path) -> Iterator[Finding]:
    from headrace_servicekit.memory.capacity import host_memory

    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", f"{cores} of {os.cpu_count()}")
    place = next(each for each in (data_dir.absolute(), *data_dir.absolute().parents) if each.exists())
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    yield from room_findings(host_memory().available, shared, shutil.disk_usage(place).free, place)


def _files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < LEAST_FILES:
        return Finding("open files", f"at most {hard}", "a fleet needs more", f"ulimit -n {LEAST_FILES}")
    return Finding("open files", f"at most {'any number' if hard < 0 else hard}")


def _containment() -> Iterator[Finding]:
    """What `headrace up --trust contained` gives users' code here; a problem where this fleet is to be contained."""
    from headrace_servicekit.contained.settings import FIX, ContainedSettings, Containment, is_contained

    containment = Containment(ContainedSettings.model_validate({"network": "best_effort"}))
    walls = containment.walls
    if containment.groups:
        containment.groups.close()
    if not walls[0].startswith("no") and is_contained():
        yield Finding(
            "--trust contained", "; ".join(walls), "users' code can have no network of its own here", FIX
        )
    else:
        yield Finding("--trust contained", "; ".join(walls))


def _fleet(data_dir: Path) -> Finding:
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.plan import DEFAULT_PORT
    from headrace_cli.launcher.state import living_state

    state = living_state(DataDir.at(data_dir))
    if state is not None:
        away = state.away or state.refusal
        words = f"{state.phase} at {state.url}, {len(state.processes)} processes"
        return (
            Finding("fleet", words, away, "see launcher.log in its logs") if away else Finding("fleet", words)
        )
    with socket.socket() as asked:
        asked.settimeout(1.0)
        taken = asked.connect_ex(("127.0.0.1", DEFAULT_PORT)) == 0
    if taken:
        problem = f"port {DEFAULT_PORT} is another program's, or another fleet's"
        return Finding("fleet", "none", problem, "headrace up --port 8480, or --url for that fleet")
    return Finding("fleet", f"none on {data_dir}; port {DEFAULT_PORT} is free")


def _proxies() -> Iterator[Finding]:
    named = [name for name in PROXIES if os.environ.get(name) or os.environ.get(name.upper())]
    if not named:
        return
    spared = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    words = f"{', '.join(named)} set, no_proxy {spared or 'empty'}"
    if spared != "*" and not {"localhost", "127.0.0.1"} & set(spared.replace(" ", "").split(",")):
        fix = "export no_proxy=localhost,127.0.0.1 and the hosts of the fleet"
        yield Finding("proxies", words, "calls between services may go to the proxy", fix)
    else:
        yield Finding("proxies", words)


def _environments() -> Iterator[Finding]:
    """Engines, simulators and backends that `make` put into environments of their own."""
    from headrace_cli.launcher.plan import BACKENDS, MADE_ENGINES, SIMULATORS, made_for

    for name in sorted({*MADE_ENGINES, *SIMULATORS, *BACKENDS}):
        python = Path(".envs").absolute() / name / "bin" / "python"
        if python.is_file():
            made = made_for(name)
            yield Finding(f".envs/{name}", f"for {made}" if made else "there")


def _choices() -> Iterator[Finding]:
    from headrace_servicekit.lease.devices import detect_devices

    from headrace_cli.launcher.plan import AUTO, MADE_ENGINES, engine_python

    devices = [name.rpartition("/")[2] for name in detect_devices()]
    yield Finding("devices", f"headrace up leases {', '.join(devices)}")
    try:
        python = engine_python(AUTO)
    except CommandError as error:
        yield Finding("engine", "none", error.message, "name one with --engine")
        return
    engine = next((name for name in MADE_ENGINES if f"/{name}/" in python), "transformers, built in")
    if not python and devices[0].startswith("gpu:"):
        fix = "make engines ENGINE=vllm, where answers are to come faster"
        yield Finding("engine", f"auto is {engine}", "on GPUs vLLM or SGLang is faster", fix)
    else:
        yield Finding("engine", f"auto is {engine}")
