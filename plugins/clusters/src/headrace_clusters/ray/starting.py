"""Starts the driver of a fleet on Ray and waits until it is ready, for `up --on ray` and `ray run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from headrace.client import Client, HeadraceError
from headrace.client.errors import Problem
from headrace_cli.commands.starting import FleetOptions, NodeOptions, show_started
from headrace_cli.errors import CommandError
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.plan import KINDS, kind_and_count
from headrace_cli.launcher.start import ReadyFleet, last_lines, refuse_second_fleet
from headrace_cli.launcher.state import read_state
from headrace_cli.launcher.stop import stop_fleet, undisturbed
from headrace_cli.launcher.tether import tether
from headrace_cli.output import error_console

from headrace_clusters.ray.connecting import cluster_address, require_ray
from headrace_clusters.ray.plan import RayPlan

ANSWER_S = 10.0


def plan_of(
    address: str,
    nodes: NodeOptions,
    options: FleetOptions,
    *,
    port: int,
    no_token: bool = False,
    tls: bool = False,
) -> RayPlan:
    """The plan that options describe. Raises CommandError (exit code 2)."""
    require_ray()
    place = DataDir.at(options.data_dir)
    counts = {kind: getattr(options, kind) for kind in KINDS}
    names = (("--engine", options.engine), ("--backend", options.backend), ("--sim", options.sim))
    return RayPlan(
        address=cluster_address(address),
        data_dir=str(place.root),
        node_dir=nodes.node_dir or f"~/.headrace/ray/{place.fleet_id}",
        nodes=nodes.nodes,
        gpus=nodes.gpus,
        cpus=nodes.cpus,
        pack=nodes.pack,
        counts=counts | dict(kind_and_count(text, "--scale") for text in options.scale or ()),
        trainer_nodes=nodes.trainer_nodes,
        port=port,
        wait_s=nodes.wait,
        timeout_s=options.timeout,
        tls=tls,
        no_token=no_token,
        words=[word for pair in names for word in pair],
    )


def up(
    address: str,
    nodes: NodeOptions,
    options: FleetOptions,
    *,
    port: int,
    no_token: bool = False,
    tls: bool = False,
) -> None:
    """`headrace up --on ray[://HEAD]`."""
    plan = plan_of(address, nodes, options, port=port, no_token=no_token, tls=tls)
    show_started(start(plan, tethered=options.foreground), options)


def start(plan: RayPlan, *, tethered: bool, say: Callable[[str], None] | None = None) -> ReadyFleet:
    """Starts a fleet on Ray; `tethered`: it ends with this process. Raises CommandError, and nothing of it is left."""
    place = DataDir.at(plan.data_dir)
    refuse_second_fleet(place)
    place.prepare()
    place.set_big_log_aside("launcher")
    began = time.monotonic()
    with place.log_file("launcher").open("ab") as log:
        driver = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace_clusters.ray.driver", plan.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            preexec_fn=tether(signal.SIGTERM) if tethered else None,
        )
    try:
        _wait(driver, place, say or (lambda text: error_console().print(text, markup=False)))
    except BaseException:
        with undisturbed():
            stop_fleet(place, driver.pid)
        raise
    state = read_state(place)
    if state is None:
        raise CommandError(f"the fleet has ended; see {place.log_file('launcher')}")
    fleet = ReadyFleet(state, [], time.monotonic() - began, driver)
    token = Path(state.token_file).read_text(encoding="ascii") if state.token_file else ""
    try:
        with Client(state.url, token, timeout_s=ANSWER_S, patience_s=0, ca_file=place.authority) as client:
            return ReadyFleet(state, list(client.instances()), fleet.seconds, driver)
    except HeadraceError:
        notice = f"this machine does not reach {state.url}: submit from a node, or use headrace ray submit"
        return ReadyFleet(state, [], fleet.seconds, driver, notice)


def _wait(driver: subprocess.Popen[bytes], place: DataDir, say: Callable[[str], None]) -> None:
    """Until the driver, which has the deadlines, says that the fleet is ready. Raises CommandError with its reason."""
    assert driver.stdout is not None
    with os.fdopen(os.dup(driver.stdout.fileno()), encoding="utf-8") as lines:
        for line in lines:
            told = json.loads(line)
            if "ready" in told:
                return
            if "error" in told:
                problems = [Problem(**each) for each in told.get("problems", [])]
                raise CommandError(
                    told["error"],
                    reason=told.get("reason", "FAILED"),
                    exit_code=told.get("exit_code", 1),
                    problems=problems,
                )
            say(told["waiting"])
    words = "\n".join(last_lines(place.log_file("launcher"), 12))
    raise CommandError(f"the driver ended with status {driver.wait()}; its log ends with:\n{words}")
