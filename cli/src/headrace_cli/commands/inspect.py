"""`instances`, `hosts`, `leases`, `drain`, `scale` and `spec-schema`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from headrace.client.tokens import same_place

from headrace_cli.commands.options import DEFAULT_DATA_DIR, DataDirOption, JsonFlag, Url
from headrace_cli.connection import Answer, asking, connect, find_target, process_ids
from headrace_cli.launcher.plan import kind_and_count
from headrace_cli.output import console, print_json

if TYPE_CHECKING:
    from headrace.client import Client

leases_app = typer.Typer()


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    for command in (instances, hosts, drain, scale, spec_schema):
        app.command()(command)
    app.add_typer(leases_app, name="leases")


def instances(
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
    schemas: Annotated[
        bool,
        typer.Option("--schemas", help="With --json: the JSON Schemas of the capabilities' options too."),
    ] = False,
) -> None:
    """List the services' processes; with --json their process ids too, where the fleet is that of --data-dir."""
    target = find_target(url, data_dir)
    with connect(target) as client:
        found = client.instances()
    from headrace_cli.show.fleet import instance_document, instances_table

    if as_json:
        pids = process_ids(target, data_dir)
        print_json({"instances": [instance_document(item, pids, schemas=schemas) for item in found]})
        return

    console().print(instances_table(found, width=console().width))


def hosts(url: Url = None, data_dir: DataDirOption = DEFAULT_DATA_DIR, as_json: JsonFlag = False) -> None:
    """List the fleet's hosts; on its head also the whole command with which other hosts join it."""
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.hosts import join_command
    from headrace_cli.launcher.state import living_state
    from headrace_cli.show.fleet import hosts_of, hosts_table

    target, place = find_target(url, data_dir), DataDir.at(data_dir)
    with connect(target) as client:
        found = hosts_of(client.instances())
    state = living_state(place)
    runs_it = state is not None and any(each.name == "coordinator" for each in state.processes)
    heads = state is not None and runs_it and same_place(target.url, state.url)
    command = join_command(target.url, place) if heads else ""
    if as_json:
        print_json({"hosts": found, "join": command})
        return
    out = console()
    out.print(hosts_table(found) if found else "no instances")
    if command:
        out.print(f"more hosts, each with a copy of {place.token_file}:", markup=False, soft_wrap=True)
        out.print(f"  {command}", markup=False, soft_wrap=True)
    elif heads:
        out.print(
            "no other host can join: the head listens on the loopback; start it with headrace up --listen ADDRESS"
        )


@leases_app.callback(invoke_without_command=True)
def leases(
    context: typer.Context,
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """List devices and who holds them."""
    if context.invoked_subcommand:
        return
    with connect(find_target(url, data_dir)) as client:
        found = client.leases()
    if as_json:
        print_json(found.raw)
        return
    from headrace_cli.show.fleet import devices_table, leases_table

    console().print(devices_table(found, console().width))
    console().print(leases_table(found.leases) if found.leases else "no leases")


@leases_app.command()
@asking
def release(
    client: Client,
    device: Annotated[
        str, typer.Argument(metavar="DEVICE", help="A device in quarantine, or the end of its name: gpu:0.")
    ],
    reason: Annotated[str, typer.Option(help="How you know it; kept in the event log.")] = "",
) -> Answer:
    """Say that a device in quarantine is free, because you know that its last holder is gone. Refused while that is
    connected; nothing else checks it: a holder that lives on would share the device with the next one.
    """
    name = client.release_device(device, reason)
    return {"device": name}, lambda: f"{name}: released; see who gets it with: headrace leases"


@asking
def drain(
    client: Client,
    instance: Annotated[
        str, typer.Argument(metavar="INSTANCE", help="Such as rollout-0; see headrace instances.")
    ],
) -> Answer:
    """Take an instance out of use in order: no new work, what it holds is handed over or saved, then its process
    ends and its supervisor starts another. To have fewer processes, use scale. Does not wait.
    """
    document = {"instance": instance, "incarnation": client.drain(instance)}
    return document, lambda: f"{instance}: told to drain; see it replaced with: headrace instances"


@asking
def scale(
    client: Client,
    wanted: Annotated[list[str], typer.Argument(metavar="KIND=N...", help="Such as rollout=2 trainer=2.")],
    host: Annotated[
        str, typer.Option(help="On which host, where several have joined; see headrace instances.")
    ] = "",
) -> Answer:
    """Set how many processes of services run. Refused (exit code 2), with the figures, for more than the host
    can hold; those named before it stay. Does not wait for them; a later number replaces an earlier one at once.
    """
    pairs = [kind_and_count(each, "KIND=N") for each in wanted]
    counts = {kind: client.scale(kind, number, host) for kind, number in pairs}
    words = ", ".join(f"{kind}: {count} wanted" for kind, count in counts.items())
    return {"counts": counts}, lambda: f"{words}; see them come with: headrace instances"


def spec_schema(
    url: Url = None, data_dir: DataDirOption = DEFAULT_DATA_DIR, as_json: JsonFlag = False
) -> None:
    """Print the JSON Schema of run specs."""
    import json

    from headrace_cli.dry_run import local_schema

    target = find_target(url, data_dir)
    if target.known:
        with connect(target) as client:
            schema = client.spec_schema()
    else:
        schema = local_schema()
    if as_json:
        print_json(schema)
    else:
        print(json.dumps(schema, indent=2))
