"""What `up`, `join` and `demo` have in common: options, a start that shows what it waits for, what is said then."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands.options import DEFAULT_DATA_DIR, DataDirOption, JsonFlag
from headrace_cli.errors import CommandError, user_error
from headrace_cli.launcher.plan import (
    KINDS,
    FleetPlan,
    backend_python,
    engine_python,
    kind_and_count,
    simulator_python,
)
from headrace_cli.output import console, error_console, print_json, styled

if TYPE_CHECKING:
    from headrace_cli.launcher.start import ReadyFleet

SAY_S = 30.0
Count = Annotated[int, typer.Option(min=0, max=256, help="Instances of this service.")]


@dataclass(frozen=True)
class FleetOptions:
    """What `up` and `join` are told of the processes on this host."""

    data_dir: DataDirOption = DEFAULT_DATA_DIR
    rollout: Count = 1
    trainer: Count = 1
    reward: Count = 1
    simulator: Count = 1
    scale: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=N", help="Instances of a service, as `headrace scale` says it: simulator=4."
        ),
    ] = None
    devices: Annotated[
        str,
        typer.Option(
            help="Devices to lease, such as cpu:0,cpu:1 or gpu:0; default: the GPUs, or else all cores."
        ),
    ] = ""
    engine: Annotated[
        str,
        typer.Option(
            help="Engine that the rollout instances must have: vllm or sglang from this Python or from .envs/ENGINE. "
            "auto: on GPUs that of .envs, where `make engines` made one for them."
        ),
    ] = "auto"
    sim: Annotated[
        str,
        typer.Option(
            help="Simulator that the simulator instances must have: metaworld, maniskill, libero, verifiers or web "
            "from this Python or from .envs/SIM."
        ),
    ] = "gymnasium"
    backend: Annotated[
        str,
        typer.Option(
            help="Training backend that the trainer instances must have: megatron from this Python or from "
            ".envs/megatron. Such trainers have fsdp too."
        ),
    ] = "fsdp"
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay; Ctrl-C stops the fleet.")] = False
    timeout: Annotated[
        float, typer.Option(min=1, help="Longest start in seconds; one without progress ends after 60.")
    ] = 600
    tls_files: Annotated[
        Path | None,
        typer.Option(
            help="Directory with a folder for each role (coordinator, supervisor, rollout, …) with ca.pem, host.pem "
            "and host-key.pem of one's own.",
            show_default=False,
        ),
    ] = None
    trust: Annotated[
        str,
        typer.Option(
            help="open, or contained: users' code has no network and bounds of processes, memory and cores, and "
            "specs of those who are no admins hold none of their own. Default: HEADRACE_TRUST, or open.",
            show_default=False,
        ),
    ] = ""
    trust_allow: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of what specs of a contained fleet may hold all the same.", show_default=False
        ),
    ] = None
    as_json: JsonFlag = False

    def plan(self, port: int, *, encrypt: bool, **more: Any) -> FleetPlan:
        """The fleet, or this host's part of one. Raises CommandError."""
        self._contain()
        counts = {name: getattr(self, name) for name in KINDS}
        devices = device_names(self.devices)
        return FleetPlan(
            str(
                Path(os.path.expanduser(self.data_dir)).absolute()
            ),  # The launcher has another working directory.
            port,
            counts | dict(kind_and_count(text, "--scale") for text in self.scale or ()),
            devices,
            tethered=self.foreground,
            pythons={
                "rollout": engine_python(self.engine, devices),
                "simulator": simulator_python(self.sim),
                "trainer": backend_python(self.backend),
            },
            tls="given" if self.tls_files else "made" if encrypt else "",
            **more,
        )

    def _contain(self) -> None:
        """Hands the level of trust on to all processes, by their environment. Raises CommandError."""
        from headrace_servicekit.config import settings_from_environment
        from headrace_servicekit.contained.settings import (
            PREFIX,
            TRUST_VARIABLE,
            ContainedSettings,
            Containment,
            NotContained,
            is_contained,
        )
        from headrace_servicekit.rpc.errors import ServiceError, message_of

        if self.trust:
            os.environ[TRUST_VARIABLE] = self.trust
        if self.trust_allow:
            os.environ["HEADRACE_TRUST_ALLOW"] = str(self.trust_allow.absolute())
        try:
            if is_contained():
                Containment(settings_from_environment(ContainedSettings, PREFIX))
        except (NotContained, ServiceError) as error:
            raise user_error("--trust", message_of(error), "see docs/security.md") from error


@dataclass(frozen=True)
class JoinOptions(FleetOptions):
    """The same of a host that joins: by default it brings a rollout alone."""

    trainer: Count = 0
    reward: Count = 0
    simulator: Count = 0


@dataclass(frozen=True)
class NodeOptions:
    """What a cluster is asked for."""

    nodes: Annotated[int, typer.Option(min=1, max=4096, help="Nodes of the cluster to take.")] = 1
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs of each node; default: what so many nodes have.", show_default=False),
    ] = None
    cpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="CPUs of each node; default: one a GPU, or what so many nodes have.",
            show_default=False,
        ),
    ] = None
    pack: Annotated[
        bool, typer.Option("--pack", help="Put several of these nodes on one machine where they fit.")
    ] = False
    trainer_nodes: Annotated[
        int, typer.Option(min=1, help="The first so many nodes have --trainer; the head is the first.")
    ] = 1
    wait: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds to wait for nodes that others use, or that an autoscaler is to add."
        ),
    ] = 0.0
    node_dir: Annotated[
        str,
        typer.Option(
            help="Data directory on the nodes. Where all see it, the fleet outlives the node of its head; default: one "
            "below ~/.headrace.",
            show_default=False,
        ),
    ] = ""


@dataclass(frozen=True)
class ClusterOptions(NodeOptions):
    """On what cluster `up` starts a fleet."""

    on: Annotated[
        str,
        typer.Option(
            metavar="CLUSTER", help="Start the fleet on a cluster: ray, or ray://HEAD.", show_default=False
        ),
    ] = ""


CLUSTERS = "headrace.clusters"
"""Entry points: by an engine's name, what `up --on NAME` calls with the text behind the name and all options."""


def start_on_cluster(cluster: ClusterOptions, options: FleetOptions, **more: Any) -> bool:
    """Starts a fleet on the cluster of --on; False where there is none. Raises CommandError (exit code 2)."""
    if not cluster.on:
        names = [each.name for each in fields(NodeOptions) if getattr(cluster, each.name) != each.default]
        if names:
            option = f"--{names[0].replace('_', '-')}"
            raise user_error(
                option, "is of a fleet on a cluster", "name the cluster, as --on ray, or leave it out"
            )
        return False
    if options.trust:
        fix = "set HEADRACE_TRUST where the nodes' processes have their environment from"
        raise user_error("--trust", "is of one host, and --on starts a fleet on a cluster's nodes", fix)
    for option, given in (("--devices", options.devices), ("--tls-files", options.tls_files)):
        if given:
            raise user_error(
                option, "is of one host, and --on starts a fleet on a cluster's nodes", "leave it out"
            )
    from importlib.metadata import entry_points

    name, _, address = cluster.on.partition("://")
    found = {point.name: point for point in entry_points(group=CLUSTERS)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none: pip install 'headrace[ray]'"
        raise user_error("--on", f"{cluster.on!r} is no cluster that is known here", f"write one of: {known}")
    found[name].load()(address, cluster, options, **more)
    return True


def start(plan: FleetPlan, options: FleetOptions) -> None:
    """Starts a fleet, or this host's part of one, says what it is, and with `foreground` stays."""
    if options.foreground:
        signal.signal(signal.SIGTERM, _as_ctrl_c)
    start = start_quietly if options.as_json or not sys.stdout.isatty() else start_with_spinner
    show_started(start(plan, options.timeout), options, plan if plan.head else None)


def show_started(fleet: ReadyFleet, options: FleetOptions, joined: FleetPlan | None = None) -> None:
    """Says what has started, and with `foreground` stays. `joined`: as part of another host's fleet."""
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.stop import stop_fleet, undisturbed

    data_dir, foreground, as_json = options.data_dir, options.foreground, options.as_json
    try:
        if as_json:
            print_json(_ready_document(fleet))
        elif joined is None:
            _show_ready(fleet, data_dir, foreground)
        else:
            _show_joined(joined, fleet)
        if foreground:
            _stay(fleet, data_dir)
    except KeyboardInterrupt:
        if not foreground:
            raise
        with undisturbed():
            stop_fleet(DataDir.at(data_dir), fleet.launcher.pid, telling(as_json))


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Slurm, systemd and others end by SIGTERM what they started; it comes to a launcher's parent alone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def telling(as_json: bool) -> Callable[[str], None]:
    """Tells what is being stopped on standard error, or nothing beside JSON."""
    return (lambda text: None) if as_json else error_console().print


def device_names(text: str) -> list[str]:
    """What --devices names; says which share a core. Raises CommandError."""
    from headrace_servicekit.lease.devices import core_of

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not re.fullmatch(r"cpu:\d+|gpu:\d+(\.\d+)?", name):
            raise user_error(
                "--devices", f"{name!r} is no device", "write cpu:0 or gpu:0, separated by commas"
            )
    cores = {name: f"cpu:{core_of(name)}" for name in names if name.startswith("cpu:")}
    if shared := [f"{name} shares the core of {core}" for name, core in cores.items() if name != core]:
        sentence = f"warning: this host has {os.cpu_count()} cores; {', '.join(shared)}, which takes turns"
        error_console().print(sentence, markup=False)
    return names


def start_quietly(plan: FleetPlan, timeout_s: float = 600) -> ReadyFleet:
    """Starts a fleet; says on standard error what it waits for when that takes long."""
    from headrace_cli.launcher.start import start_fleet

    began, said = time.monotonic(), 0

    def progress(missing: str) -> None:
        nonlocal said
        if (periods := int((time.monotonic() - began) / SAY_S)) > said:
            said = periods
            error_console().print(f"still starting after {periods * SAY_S:.0f} s: waiting for {missing}")

    return start_fleet(plan, progress, timeout_s)


def start_with_spinner(plan: FleetPlan, timeout_s: float = 600) -> ReadyFleet:
    """Starts a fleet and shows what it waits for."""
    from headrace_cli.launcher.start import start_fleet

    with console().status("starting the fleet") as spinner:
        return start_fleet(
            plan, lambda missing: spinner.update(f"starting the fleet: waiting for {missing}"), timeout_s
        )


def _ready_document(fleet: ReadyFleet) -> dict[str, Any]:
    state = fleet.state
    return {
        "url": state.url,
        "launcher_pid": state.launcher_pid,
        "ready_s": round(fleet.seconds, 3),
        "token_file": state.token_file,
        "notice": fleet.notice,
        "instances": [item.raw for item in fleet.instances],
    }


def _show_ready(fleet: ReadyFleet, data_dir: Path, foreground: bool) -> None:
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.hosts import join_command
    from headrace_cli.show.fleet import instances_table

    where = "" if data_dir == DEFAULT_DATA_DIR else f" --data-dir {data_dir}"
    out = console()
    out.print(instances_table(fleet.instances, coordinator=fleet.state.url))
    logs = f", logs in {data_dir / 'logs'}"
    out.print(styled(("ready", "green"), f" in {fleet.seconds:.1f} s at ", (fleet.state.url, "bold"), logs))
    if fleet.notice:
        out.print(styled(("note", "yellow"), f" {fleet.notice}"))
    out.print(f"next: headrace run submit examples/tiny.yaml --watch{where}")
    out.print(f"look: headrace open{where}")
    if command := join_command(fleet.state.url, DataDir.at(data_dir)):
        out.print(
            f"more hosts, each with a copy of {data_dir / 'token'} (shown again by headrace hosts{where}):"
        )
        out.print(f"  {command}", markup=False, soft_wrap=True)
    out.print("stop: Ctrl-C" if foreground else f"stop: headrace down{where}")


def _show_joined(plan: FleetPlan, fleet: ReadyFleet) -> None:
    names = ", ".join(plan.instance_names) or "no processes yet"
    out = console()
    where = f" {fleet.state.url} as {plan.host} at {plan.listen} in {fleet.seconds:.1f} s: {names}"
    out.print(styled(("joined", "green"), where))
    out.print("look, at the head: headrace instances")
    out.print(f"more or fewer, at the head: headrace scale rollout=2 --host {plan.host}")


def _stay(fleet: ReadyFleet, data_dir: Path) -> None:
    if status := fleet.launcher.wait():
        raise CommandError(
            f"the launcher ended with status {status}; see {data_dir / 'logs' / 'launcher.log'}"
        )
