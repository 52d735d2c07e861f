"""`up`, `down` and `status`: a fleet of local processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from headrace_servicekit.rpc.addresses import LOOPBACK, host_port

from headrace_cli.commands.doctor import doctor
from headrace_cli.commands.init import init
from headrace_cli.commands.options import DEFAULT_DATA_DIR, DataDirOption, JsonFlag, NoToken, Url, grouped
from headrace_cli.commands.starting import (
    ClusterOptions,
    FleetOptions,
    JoinOptions,
    start,
    start_on_cluster,
    telling,
)
from headrace_cli.connection import Answer, asking, connect, find_target
from headrace_cli.errors import user_error
from headrace_cli.launcher.plan import DEFAULT_PORT, host_name
from headrace_cli.output import console, error_console, print_json, styled
from headrace_cli.show.fleet import devices_table, instances_table, isolation_lines
from headrace_cli.show.runs import runs_list

if TYPE_CHECKING:
    from headrace.client import Client

    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.plan import FleetPlan
    from headrace_cli.launcher.repair import Examination


AUTHORITY = "ca.pem"
HostName = Annotated[
    str, typer.Option(help="Of this host in the fleet; default: its own.", show_default=False)
]


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command()(up)
    app.command()(join)
    app.command()(down)
    app.command()(status)
    app.command()(repair)
    app.command()(doctor)
    app.command()(init)
    app.command("open")(open_dashboard)


@grouped
def up(
    options: FleetOptions,
    cluster: ClusterOptions,
    port: Annotated[
        int,
        typer.Option(min=1, max=65534, help="Port of the HTTP API; with --listen the next one is gRPC's."),
    ] = DEFAULT_PORT,
    listen: Annotated[
        str,
        typer.Option(
            help="Address of this host at which other hosts reach the fleet, for headrace join there.",
            show_default=False,
        ),
    ] = LOOPBACK,
    name: HostName = "",
    sessions_grpc: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="Port at which loops of your own speak gRPC too (docs/own-loop.md).",
            show_default=False,
        ),
    ] = 0,
    no_token: NoToken = False,
    tls: Annotated[
        bool,
        typer.Option(
            "--tls",
            help="Encrypt the HTTP API too, as gRPC between hosts always is, and nothing that cannot be.",
        ),
    ] = False,
) -> None:
    """Start the services as local processes, or on a cluster, and return when they are ready."""
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.hosts import require_own_address

    if cluster.on and sessions_grpc:
        fix = "set HEADRACE_SESSIONS_GRPC where the head's processes have their environment from"
        raise user_error("--sessions-grpc", "is of one host, and --on starts a fleet on a cluster", fix)
    if start_on_cluster(cluster, options, port=port, no_token=no_token, tls=tls):
        return
    if listen != LOOPBACK:
        require_own_address("--listen", listen)
        if no_token:
            raise user_error(
                "--no-token", "everybody who reaches --listen could run code here", "leave it out"
            )
    plan = options.plan(
        port,
        encrypt=tls,
        no_token=no_token,
        listen=listen,
        host=name or host_name(),
        sessions_grpc=sessions_grpc,
    )
    if plan.certificates:
        _certify(DataDir.at(options.data_dir), plan, options.tls_files)
    start(plan, options)


def _certify(place: DataDir, plan: FleetPlan, given: Path | None) -> None:
    from headrace_cli.launcher.encryption import make_files, take_files
    from headrace_cli.launcher.start import refuse_second_fleet

    refuse_second_fleet(place)
    place.prepare()
    if given is not None:
        take_files(given, place, plan)
        shown = (given / "coordinator" / AUTHORITY).read_bytes()
    else:
        pin = make_files(place, plan.listen, plan.host)
        shown = (place.authority_keys / AUTHORITY).read_bytes()
        if plan.tls:
            error_console().print(f"fingerprint: {pin}", markup=False)
    (place.tls / AUTHORITY).unlink(missing_ok=True)
    if plan.tls:
        place.tls.mkdir(mode=0o700, exist_ok=True)
        (place.tls / AUTHORITY).write_bytes(shown)


@grouped
def join(
    options: JoinOptions,
    head: Annotated[
        str,
        typer.Argument(
            metavar="HEAD", help="HOST or HOST:PORT at which the head's `headrace up --listen` listens."
        ),
    ],
    token_file: Annotated[
        Path, typer.Option(help="Copy of `token` in the head's data directory.", show_default=False)
    ],
    name: HostName = "",
    listen: Annotated[
        str,
        typer.Option(
            help="Address of this host for the others; default: that towards HEAD.", show_default=False
        ),
    ] = "",
    outgoing: Annotated[
        bool,
        typer.Option(
            "--outgoing",
            help="This host connects to the head and nobody to it, as behind a NAT: for robots and scorers.",
        ),
    ] = False,
    ca_file: Annotated[
        Path | None,
        typer.Option(help="Copy of tls/ca.pem in an encrypted head's data directory.", show_default=False),
    ] = None,
    fingerprint: Annotated[
        str,
        typer.Option(help="Of an encrypted head's authority, in place of --ca-file.", show_default=False),
    ] = "",
) -> None:
    """Bring this host's devices and processes into the fleet of another host. Stop them with `headrace down`.

    Trainers need the head's data directory under the same path here, as a shared file system gives it.
    """
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.hosts import address_towards, find_head, head_place, require_own_address
    from headrace_cli.launcher.start import refuse_second_fleet

    host, port = head_place(head)
    if outgoing:
        _check_outgoing(options, listen)
    place, authority = DataDir.at(options.data_dir), None
    if options.tls_files is not None:
        authority = options.tls_files / "supervisor" / AUTHORITY
    elif ca_file is not None or fingerprint:
        from headrace_cli.launcher.encryption import trust

        refuse_second_fleet(place)
        place.prepare()
        authority = trust(place.tls, f"https://{host_port(host, port)}", ca_file, fingerprint)
    found, told = find_head(head, token_file, authority)
    for text in told:
        error_console().print(f"warning: {text}", markup=False)
    address = listen or address_towards(host)
    if address != LOOPBACK:
        require_own_address("--listen", address)
    plan = options.plan(
        0,
        encrypt=authority is not None,
        listen=address,
        host=name or host_name(),
        head=found,
        outgoing=outgoing,
    )
    if plan.certificates:
        from headrace_cli.launcher.encryption import ask_for_certificates, take_files

        place.prepare()
        if options.tls_files is not None:
            take_files(options.tls_files, place, plan)
        else:
            ask_for_certificates(place, plan)
    start(plan, options)


def _check_outgoing(options: JoinOptions, listen: str) -> None:
    """Raises CommandError (exit code 2) for what others of the fleet would have to reach by themselves."""
    for option, count in (("--rollout", options.rollout), ("--trainer", options.trainer)):
        if count:
            problem = "others fetch weights from these, and nobody reaches a host with --outgoing"
            raise user_error(option, problem, f"write {option} 0, and --simulator 1 or --reward 1")
    if listen:
        raise user_error(
            "--listen", "is where others reach this host, and with --outgoing nobody does", "leave it out"
        )


def down(data_dir: DataDirOption = DEFAULT_DATA_DIR, as_json: JsonFlag = False) -> None:
    """Stop the local fleet; its runs stay and go on with the next `up`.

    Trainers stop first and have 30 s to save a checkpoint; then the other services, the coordinator, the store.
    """
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.stop import stop_fleet

    stopped = stop_fleet(DataDir.at(data_dir), progress=telling(as_json))
    if as_json:
        print_json({"stopped": stopped})
    elif stopped:
        console().print(f"stopped; runs are kept in {data_dir}")
    else:
        console().print(f"no fleet runs on {data_dir}")


def repair(
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show where the store of a fleet that is down is damaged, and go on from what is good before it.

    The damaged files are kept. Exit code 1 where it is damaged and was not repaired.
    """
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.repair import adopt, discard, examine
    from headrace_cli.launcher.state import FleetLock

    place = DataDir.at(data_dir)
    lock = FleetLock(place.lock_file)
    if not place.root.is_dir() or not lock.acquire():
        problem = "a fleet runs on it" if place.root.is_dir() else "there is no such directory"
        raise user_error("--data-dir", f"{place.root}: {problem}", "stop it first: headrace down")
    try:
        found = examine(place)
        if not as_json:
            _show_examination(found)
        wanted = bool(found.damages) and (yes or (not as_json and sys.stdin.isatty() and _asks()))
        kept = adopt(place) if wanted else None
    finally:
        discard(place)
        lock.release()
    if as_json:
        damages = [vars(each) | {"file": str(each.file)} for each in found.damages]
        print_json(vars(found) | {"damages": damages, "kept": str(kept or "")})
    elif kept:
        console().print(f"repaired; the damaged files are kept in {kept}. next: headrace up")
    if found.damages and not kept:
        raise typer.Exit(1)


def _show_examination(found: Examination) -> None:
    out = console()
    for damage in found.damages:
        lost = f" {damage.file}, byte {damage.offset}: {damage.what}; {damage.lost} bytes are lost"
        out.print(styled(("damaged", "red"), lost))
    if not found.damages:
        out.print("the store is sound")
    snapshot = f"snapshot of event {found.snapshot}" if found.snapshot else "no snapshot"
    out.print(
        f"good: {snapshot}, events up to {found.last}, {len(found.runs)} runs that have not been archived"
    )
    for run, state in found.runs.items():
        out.print(f"  {run} {state}")
    if found.damages:
        out.print(
            "what runs did after that comes from their checkpoints and histories with the next `headrace up`"
        )


def _asks() -> bool:
    return typer.confirm("keep the damaged files aside and go on from what is good?")


@asking
def status(client: Client) -> Answer:
    """Show the fleet: services, devices and runs. Exit code 1 when none answers."""
    instances, leases, runs = client.instances(), client.leases(), client.list()
    found = {"instances": instances, "devices": leases.devices, "leases": leases.leases, "runs": runs}
    document = {"url": client.base_url} | {key: [item.raw for item in rows] for key, rows in found.items()}

    def text() -> Any:
        from rich.console import Group

        width = console().width
        return Group(
            instances_table(instances, coordinator=client.base_url, width=width),
            *isolation_lines(instances),
            devices_table(leases, width),
            runs_list(runs[:10], width)
            if runs
            else "no runs yet: headrace run submit examples/tiny.yaml --watch",
        )

    return document, text


def open_dashboard(
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    url: Url = None,
    browser: Annotated[bool, typer.Option(help="Open it, where there is a browser.")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Open the dashboard in a browser and print its address: a link that is good once and for a minute."""
    with connect(find_target(url, data_dir)) as client:
        link = client.link()
    show_link(link, browser, as_json)


def show_link(link: str, browser: bool, as_json: bool) -> None:
    """Prints a link to the dashboard, and opens it where there is a browser and somebody who looks."""
    if as_json:
        print_json({"url": link})
        return
    console().print(link, markup=False, soft_wrap=True)
    if browser and sys.stdout.isatty() and (sys.platform == "darwin" or _has_display()):
        import webbrowser

        webbrowser.open(link)


def _has_display() -> bool:
    """Whether a browser would get a window, not this terminal."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
