"""`headrace demonstrations`: episodes of a scripted policy as a data set that a run imitates before it begins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from headrace_cli.commands.options import JsonFlag
from headrace_cli.errors import CommandError, refused, user_error, writing
from headrace_cli.output import console, error_console, print_json, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_schema.spec import RunSpec

EPISODES = 32
FIRST_SEED = 1 << 30
"""Beyond the start states of `data`, unless its first_seed is set there too."""

app = typer.Typer(help="Demonstrations for the warm-up of robot policies.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `collect` a command of its own."""


@app.command()
def collect(
    file: Annotated[Path, typer.Argument(metavar="SPEC", help="Run spec of an embodied run, a YAML file.")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the spec.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            help="Directory to write; default: the spec's trainer.warmup.demonstrations.", show_default=False
        ),
    ] = None,
    episodes: Annotated[
        int, typer.Option(min=1, help="Successful episodes of each task; others are thrown away.")
    ] = EPISODES,
    noise: Annotated[
        float,
        typer.Option(min=0, help="Width of the noise on the script's actions, in halves of their range."),
    ] = 0.1,
    first_seed: Annotated[int, typer.Option(min=0, max=2**31 - 2**20, help="Seeds begin here.")] = FIRST_SEED,
    videos: Annotated[
        bool, typer.Option("--videos", help="Store cameras as H.264 videos; default: as PNG images.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Play the scripted policy of a spec's environment and write a LeRobot v3 data set."""
    from headrace_cli.launcher.plan import SIMULATORS, simulator_python

    spec = embodied_spec(file, sets or [])
    assert spec.environment is not None
    target = to or Path(spec.trainer.warmup.demonstrations or "-")
    if str(target) == "-":
        raise user_error(
            "--to", "names no directory, nor does trainer.warmup.demonstrations", "give one of them"
        )
    if target.exists():
        raise user_error("--to", f"{target} exists", "remove it, or give another directory")
    try:
        from headrace_robots.cli.collecting import Collection, collect
        from headrace_robots.cli.lerobot import write_data_set
    except ImportError as error:
        raise CommandError(
            f"collecting demonstrations needs pip install 'headrace[demonstrations]' ({error})"
        ) from error
    backend = spec.environment.backend
    python = simulator_python(backend) if backend in SIMULATORS else ""
    wanted = Collection(spec.environment, episodes, first_seed, noise, _cameras(spec))
    words = error_console()
    found = asyncio.run(collect(wanted, python, lambda line: words.print(line, markup=False)))
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_data_set(target, found.episodes, found.image_shapes, videos=videos)
    document = {
        "directory": str(target.absolute()),
        "episodes": len(found.episodes),
        "steps": sum(map(len, found.episodes)),
        "played_episodes": found.played,
        "played_steps": found.steps,
    }
    if as_json:
        print_json(document)
        return
    console().print(
        f"{document['episodes']} demonstrations of {document['steps']} steps in {target}", markup=False
    )


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A LeRobot v3 data set.")],
    episode: Annotated[
        int | None, typer.Argument(metavar="EPISODE", help="Show this one step by step, counted from 0.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the episodes of a data set, or show one: its actions, and rewards where they are stated."""
    try:
        from headrace_robots.demonstrations import Demonstrations, DemonstrationsNotReadable
    except ImportError as error:
        raise CommandError(
            f"reading demonstrations needs pip install 'headrace[demonstrations]' ({error})"
        ) from error
    try:
        found = Demonstrations(directory)
        if episode is not None and not 0 <= episode < len(found):
            raise user_error("EPISODE", f"there are {len(found)} episodes", f"give 0 to {len(found) - 1}")
        one = None if episode is None else found[episode]
    except DemonstrationsNotReadable as error:
        raise user_error("DIR", str(error), "give the directory of a LeRobot v3 data set") from error
    rows: list[tuple[str, ...]]
    keys: tuple[str, ...]
    if one is None:
        rows = [(str(at), str(steps), task) for at, (task, steps) in enumerate(found.listed())]
        keys = ("episode", "steps", "task")
        document: dict[str, object] = {"episodes": [dict(zip(keys, row, strict=True)) for row in rows]}
    else:
        rewards = [] if one.reward_T is None else one.reward_T.tolist()
        keys = ("step", "action", *(["reward"] if rewards else []))
        rows = [
            (
                str(at),
                " ".join(f"{value:.3g}" for value in action),
                *(f"{each:.3g}" for each in rewards[at : at + 1]),
            )
            for at, action in enumerate(one.action_TA.tolist())
        ]
        document = {"task": one.task, "actions": one.action_TA.tolist(), "rewards": rewards}
        error_console().print(f"episode {episode}: {one.task}, {len(rows)} steps", markup=False)
    if as_json:
        print_json(document)
    else:
        console().print(table(keys, rows))


def embodied_spec(file: Path, sets: list[str]) -> RunSpec:
    """The spec of a run with environments. Raises CommandError."""
    from headrace.client import HeadraceError, load_spec
    from headrace_cli.dry_run import check_schema
    from headrace_schema.spec import RunSpec

    try:
        document = load_spec(file, sets)
    except HeadraceError as error:
        raise refused(error) from error
    check_schema(document)
    spec = RunSpec.model_validate(document)
    if spec.environment is None:
        raise user_error("environment", "the spec has none", "give the spec of an embodied run")
    return spec


def _cameras(spec: RunSpec) -> Mapping[str, str] | None:
    """The cameras that a run of the spec sends to its policy: none where it is `mlp`."""
    assert spec.environment is not None
    if spec.environment.cameras is None and spec.model.policy and spec.model.policy.get("kind") == "mlp":
        return {}
    return spec.environment.cameras
