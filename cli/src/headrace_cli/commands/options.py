"""Options that several commands share, and the completion of run ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

import typer

COMPLETION_S = 2.0
DEFAULT_DATA_DIR = Path(".headrace")


def complete_run(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of runs that begin with `incomplete`, with their states; none where no coordinator answers at once."""
    from headrace.client import Client, HeadraceError

    from headrace_cli.connection import find_target

    target = find_target(ctx.params.get("url"), Path(ctx.params.get("data_dir") or DEFAULT_DATA_DIR))
    if not target.url:
        return []
    try:
        with Client(
            target.url, target.token, timeout_s=COMPLETION_S, patience_s=0, ca_file=target.ca_file
        ) as client:
            runs = client.list()
    except HeadraceError:
        return []
    return [(run.id, run.state) for run in runs if run.id.startswith(incomplete)]


JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="HEADRACE_URL",
        help="Coordinator; default: the fleet of --data-dir.",
        show_default=False,
    ),
]
DataDirOption = Annotated[
    Path, typer.Option("--data-dir", envvar="HEADRACE_DATA_DIR", help="Where a local fleet keeps its files.")
]
NoToken = Annotated[
    bool,
    typer.Option(
        "--no-token",
        help="Ask nobody for a token: every user of this machine can then submit runs, and so run code as you.",
    ),
]


class VisibilityName(StrEnum):
    """Who sees a run."""

    PRIVATE = "private"
    TEAM = "team"
    FLEET = "fleet"


Visibility = Annotated[
    VisibilityName,
    typer.Option("--visibility", help="Who sees it: you, your team too, or everybody (docs/security.md)."),
]


def complete_key(incomplete: str) -> list[tuple[str, str]]:
    """Keys of a run's spec that go on with what is typed, with what they mean; a section ends in a dot."""
    from headrace_schema.spec import RunSpec

    schema = RunSpec.model_json_schema()

    def named(node: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        return found

    def section(node: dict[str, Any]) -> dict[str, Any]:
        """The keys of a node, or of the first of its forms that has some."""
        node = named(node)
        if "properties" in node:
            return dict(node["properties"])
        forms = [*node.get("anyOf", ()), *node.get("allOf", ()), *node.get("oneOf", ())]
        return next(filter(None, map(section, forms)), {})

    *above, last = incomplete.split(".")
    found = section(schema)
    for name in above:
        found = section(found.get(name, {}))
    begun = "".join(f"{name}." for name in above)
    return [
        (
            f"{begun}{name}{'.' if section(node) else '='}",
            node.get("description") or named(node).get("description", ""),
        )
        for name, node in found.items()
        if name.startswith(last)
    ]


RunId = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Id of a run, as `headrace run list` shows it.",
        autocompletion=complete_run,
    ),
]


@dataclass(frozen=True)
class Place:
    """Which coordinator a command speaks to, and for whom it prints."""

    url: Url = None
    data_dir: DataDirOption = DEFAULT_DATA_DIR
    as_json: JsonFlag = False


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of a dataclass as options, in place of each parameter that is one."""
    hints = get_type_hints(command, include_extras=True)
    return expanded(command, command, {name: kind for name, kind in hints.items() if is_dataclass(kind)})


def expanded(
    command: Callable[..., Any], call: Callable[..., None], groups: Mapping[str, Any]
) -> Callable[..., None]:
    """The options of `command`, which are passed to `call`; those of dataclasses stand for the parameters `groups`."""

    @wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{each.name: given.pop(each.name) for each in fields(kind)})
            for name, kind in groups.items()
        }
        call(**made, **given)

    own = {name: hint for name, hint in command.__annotations__.items() if name not in (*groups, "return")}
    hints = get_type_hints(SimpleNamespace(__annotations__=own), command.__globals__, include_extras=True)
    found: list[Parameter] = []
    for each in signature(command).parameters.values():
        if (kind := groups.get(each.name)) is None:
            found.append(each.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[each.name]))
            continue
        for name, hint in get_type_hints(kind, include_extras=True).items():
            default = getattr(kind, name)
            found.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    run.__signature__ = Signature(found)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in found}
    return run
