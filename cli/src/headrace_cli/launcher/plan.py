"""What a fleet shall be: how many of which service, on which devices; handed to the launcher as JSON."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from headrace_servicekit.rpc.addresses import LOOPBACK, free_port, host_port, is_loopback

from headrace_cli.errors import user_error
from headrace_cli.launcher.data_dir import DataDir

KINDS = ("rollout", "trainer", "reward", "simulator")
DEFAULT_PORT = 8470
AUTO = "auto"
MADE_ENGINES = ("vllm", "sglang")
"""What `make engines` makes, the one that `rollout.engine: auto` prefers first."""
DEFAULT_SIMULATOR = "gymnasium"
SIMULATORS = {
    "gymnasium": "gymnasium",
    "metaworld": "metaworld",
    "maniskill": "mani_skill",
    "libero": "libero",
    "verifiers": "verifiers",
    "web": "playwright",
}
"""Simulators by name, and the module that each is."""
OF_OTHERS = ("verifiers", "web")
"""Those that are extras of headrace-environments."""
DEFAULT_BACKEND = "fsdp"
BACKENDS = {"megatron": "megatron"}
"""Training backends that are an extra, and the module that each is."""


@dataclass(frozen=True)
class Head:
    """The host whose coordinator leads a fleet, as a host that joins it knows it."""

    url: str
    """Of its HTTP API."""
    grpc_address: str
    token_file: str
    """With the fleet's secret, a copy of the head's."""


@dataclass(frozen=True)
class FleetPlan:
    """A fleet to start, or with `head` this host's part of another one. `counts` is by kind; `devices` are names
    without the host, none: all it has.

    `pythons` are those that have the engine, backend or simulator of a kind's instances; others run on this one.
    """

    data_dir: str
    port: int = DEFAULT_PORT
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 1))
    devices: list[str] = field(default_factory=list)
    tethered: bool = False
    no_token: bool = False
    pythons: dict[str, str] = field(default_factory=dict)
    listen: str = LOOPBACK
    """Address of this host at which the others of the fleet reach its processes."""
    host: str = field(default_factory=lambda: host_name())
    """The host's name in the fleet."""
    head: Head | None = None
    outgoing: bool = False
    """Nobody reaches this host: its processes listen on the loopback, and are reached through the head."""
    sessions_grpc: int = 0
    """Port at which users' own loops speak gRPC; 0: by HTTP alone."""
    tls: Literal["", "made", "given"] = ""
    """The HTTP API is encrypted too, by certificates of the fleet's own authority, or by the user's files."""

    @property
    def certificates(self) -> Literal["", "made", "given"]:
        """Who makes the certificates by which services know each other. None is needed on the loopback alone."""
        return self.tls or ("" if is_loopback(self.listen) else "made")

    @property
    def url(self) -> str:
        """Of the fleet's HTTP API."""
        scheme = "https" if self.tls else "http"
        return self.head.url if self.head else f"{scheme}://{host_port(self.listen, self.port)}"

    def to_json(self) -> str:
        """The plan as the launcher's argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FleetPlan:
        """Reads the launcher's argument."""
        fields = json.loads(text)
        head = fields.pop("head")
        return cls(**fields, head=Head(**head) if head else None)

    def choose_grpc_port(self) -> int:
        """Where instances register: one that other hosts know, or any free one on the loopback."""
        return free_port() if self.listen == LOOPBACK else self.port + 1

    def instance_name(self, kind: str, index: int) -> str:
        """Unique over the hosts of a fleet."""
        return f"{kind}-{index}.{self.host}" if self.head else f"{kind}-{index}"

    @property
    def instance_names(self) -> list[str]:
        """Names of the instances that the fleet starts with."""
        return [
            self.instance_name(kind, index) for kind in KINDS for index in range(self.counts.get(kind, 0))
        ]


def host_name() -> str:
    """The host's name as device names use it."""
    return socket.gethostname().split(".")[0] or "localhost"


@dataclass(frozen=True)
class Wiring:
    """What all processes of one fleet share. Without `http_token_file` the HTTP API asks for no token."""

    plan: FleetPlan
    coordinator: str
    token_file: Path
    http_token_file: Path | None
    shared_memory: Path
    data_dir: Path

    def coordinator_command(self, redis_url: str) -> list[str]:
        """Command line of the coordinator."""
        file, place = self.http_token_file, DataDir(self.data_dir)
        keys = place.authority_keys
        return [
            *_module("headrace_coordinator"),
            *(
                "--listen",
                self.coordinator,
                "--http",
                host_port(self.plan.listen, self.plan.port),
                "--redis",
                redis_url,
            ),
            *("--data-dir", str(self.data_dir), "--token-file", str(self.token_file)),
            *(("--http-token-file", str(file)) if file else ("--no-token",)),
            *(
                ("--sessions-grpc", host_port(self.plan.listen, self.plan.sessions_grpc))
                if self.plan.sessions_grpc
                else ()
            ),
            *(
                ("--authority-dir", str(keys), "--join-token-file", str(place.token_file))
                if self.plan.certificates == "made"
                else ()
            ),
        ]

    def instance_command(self, kind: str, index: int, incarnation: str) -> list[str]:
        """Command line of an instance."""
        plan = self.plan
        devices = ("--devices", ",".join(plan.devices) or "auto")
        python = plan.pythons.get(kind, "")
        return [
            *_module(f"headrace_{kind}", python),
            *("--name", plan.instance_name(kind, index), "--incarnation", incarnation, "--host", plan.host),
            *("--coordinator", self.coordinator, *devices),
            *(("--outgoing",) if plan.outgoing else ("--listen", host_port(plan.listen, 0))),
            *("--token-file", str(self.token_file), "--shm-dir", str(self.shared_memory)),
            *("--data-dir", str(self.data_dir)),
        ]


def kind_and_count(text: str, option: str) -> tuple[str, int]:
    """What KIND=N says, such as rollout=2. Raises CommandError (exit code 2), which names the option."""
    kind, _, number = text.partition("=")
    if kind not in KINDS or not number.isdigit():
        raise user_error(
            option, f"{text!r} is not understood", f"write one of {', '.join(KINDS)}, such as rollout=2"
        )
    return kind, int(number)


def engine_python(engine: str, devices: Sequence[str] = (), folder: Path = Path()) -> str:
    """The Python whose rollout instances can run an engine: this one, or that of .envs/ENGINE below `folder`.

    `auto` is, for a fleet with GPUs, the first of `MADE_ENGINES` that is installed for them; else the built-in engine.
    Raises CommandError (exit code 2) where neither has the engine, or .envs/ENGINE was made for other devices.
    """
    if engine == "transformers":
        return ""
    on_gpus = has_gpus(devices)
    if engine == AUTO:
        fitting = (name for name in MADE_ENGINES if on_gpus and made_for(name, folder) not in ("", "cpu"))
        engine = next(fitting, "")
        return str(_python_of(engine, folder)) if engine else ""
    if not engine.isidentifier():
        raise user_error(
            "--engine", f"{engine!r} is no engine", f"write {AUTO}, transformers, {' or '.join(MADE_ENGINES)}"
        )
    fix = f"install headrace-rollout[{engine}], or in a checkout: make engines ENGINE={engine}"
    python = _python_with(engine, engine, folder, "--engine", fix)
    made = made_for(engine, folder) if python else ""
    if made and (made == "cpu") is on_gpus:
        problem = f"{python} holds the build of {engine} for {made}, and this fleet has {'GPUs' if on_gpus else 'none'}"
        other = "--devices cpu:0,cpu:1 keeps it" if on_gpus else "--devices gpu:0 names one"
        raise user_error(
            "--engine", problem, f"make engines ENGINE={engine} makes the one for this machine; {other}"
        )
    return python


def has_gpus(devices: Sequence[str]) -> bool:
    """Whether a fleet with these devices, or with none named, has a GPU of this machine."""
    from headrace_servicekit.lease.devices import detect_devices  # takes gRPC along

    return any(name.rpartition("/")[2].startswith("gpu:") for name in devices or detect_devices())


def made_for(engine: str, folder: Path = Path()) -> str:
    """For which kind of device .envs/ENGINE was made ("cpu", "cuda", "rocm"); "" where it does not say."""
    stamp = folder.absolute() / ".envs" / engine / ".complete"
    return stamp.read_text(encoding="utf-8").strip() if stamp.is_file() else ""


def simulator_python(simulator: str, folder: Path = Path()) -> str:
    """As `engine_python`, of the simulator instances and a simulator."""
    if simulator not in SIMULATORS:
        raise user_error("--sim", f"{simulator!r} is no simulator", f"write one of {', '.join(SIMULATORS)}")
    if simulator == DEFAULT_SIMULATOR:
        return ""  # A service without it starts all the same, and offers what it has.
    dist = "headrace-environments" if simulator in OF_OTHERS else "headrace-simulator"
    fix = f"install {dist}[{simulator}], or in a checkout: make simulators SIM={simulator}"
    return _python_with(simulator, SIMULATORS[simulator], folder, "--sim", fix)


def backend_python(backend: str, folder: Path = Path()) -> str:
    """As `engine_python`, of the trainer instances and a training backend."""
    if backend == DEFAULT_BACKEND:
        return ""
    if backend not in BACKENDS:
        known = ", ".join((DEFAULT_BACKEND, *BACKENDS))
        raise user_error("--backend", f"{backend!r} is no training backend", f"write one of {known}")
    fix = f"install headrace-trainer[{backend}], or in a checkout: make {backend}"
    return _python_with(backend, BACKENDS[backend], folder, "--backend", fix)


def _python_with(name: str, module: str, folder: Path, option: str, fix: str) -> str:
    if find_spec(module) is not None:
        return ""
    python = _python_of(name, folder)
    if python.is_file():
        return str(python)
    raise user_error(option, f"{name} is not installed here, and there is no {python}", fix)


def _python_of(name: str, folder: Path) -> Path:
    return folder.absolute() / ".envs" / name / "bin" / "python"


def _module(name: str, python: str = "") -> list[str]:
    return [python or sys.executable, "-m", name]
