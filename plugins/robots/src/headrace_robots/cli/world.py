"""`headrace world`: dynamics of an environment, learned from episodes of it, for runs that learn in them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from headrace_cli.commands.options import JsonFlag
from headrace_cli.errors import CommandError, user_error, writing
from headrace_cli.output import console, error_console, print_json, table

from headrace_robots.cli.commands import embodied_spec

if TYPE_CHECKING:
    from headrace_schema.sections.embodied import EnvironmentSection

    from headrace_robots.world.model import Space, WorldModel
    from headrace_robots.world.training import Real

app = typer.Typer(help="World models: environments that are learned from episodes.", no_args_is_help=True)


@app.command()
def train(
    file: Annotated[
        Path, typer.Argument(metavar="SPEC", help="Run spec of the real environment, a YAML file.")
    ],
    data: Annotated[
        list[Path],
        typer.Argument(
            metavar="DATA...", help="Replay stores (a run's folder replay) and LeRobot v3 data sets of it."
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="Directory to write; a model that is there is replaced by its next version.")
    ],
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the spec.")
    ] = None,
    members: Annotated[int, typer.Option(min=2, max=64, help="Networks of the ensemble.")] = 5,
    hidden: Annotated[int, typer.Option(min=1, max=4096, help="Units of each of two layers.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimizer.")] = 4000,
    batch: Annotated[int, typer.Option(min=1, help="Actions that a member learns from in a step.")] = 256,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate, which falls to 0.")] = 1e-3,
    heldout: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the episodes that judge the model, at least one.")
    ] = 0.2,
    tolerance: Annotated[
        float,
        typer.Option(
            min=1e-3, help="Error of a change at which an episode is cut, in deviations of the changes."
        ),
    ] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Of held-out episodes, weights and batches.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Learn a world model from real episodes, and judge it on those held out."""
    from headrace_robots.cli.collecting import open_pool, simulator

    spec = embodied_spec(file, sets or [])
    environment = spec.environment
    assert environment is not None
    if len(environment.tasks) != 1:
        raise user_error(
            "environment.tasks", f"names {len(environment.tasks)}, and a model is of one", "--set one of them"
        )
    training, reading = _modules()
    (task,) = environment.tasks

    async def opened() -> Any:
        from headrace_cli.launcher.plan import SIMULATORS, simulator_python

        python = simulator_python(environment.backend) if environment.backend in SIMULATORS else ""
        async with simulator(python) as stub:
            return await open_pool(environment, task, 1, stub, {}, "the model is of this environment")

    real = _real(environment, task, asyncio.run(opened()))
    how = training.Training(members, hidden, steps, batch, lr, heldout, tolerance, seed)
    scale = float(spec.algorithm.options.get("reward_scale", 1.0))
    size, words = sum(each.size for each in real.observations), error_console()
    try:
        found = {str(path): reading.read_episodes(path, real.action, size, scale) for path in data}
        episodes = [each for several in found.values() for each in several]
        counts = {path: len(several) for path, several in found.items()}
        with writing(output):
            model = training.train(
                real,
                episodes,
                output,
                how,
                counts,
                lambda step, loss: words.print(f"step {step}: loss {loss:.4g}", markup=False),
            )
    except reading.DataProblem as problem:
        raise user_error("DATA", str(problem), "see docs/world-models.md") from problem
    _show(output, model, as_json)


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A world model.")],
    as_json: JsonFlag = False,
) -> None:
    """Show a model's version, what it was learned from, and its errors on held-out episodes."""
    _modules()
    from headrace_robots.world.model import WorldNotReadable, load_world

    try:
        model = load_world(directory)
    except WorldNotReadable as error:
        raise user_error("DIR", str(error), "give a directory that `headrace world train` wrote") from error
    _show(directory, model, as_json)


def _modules() -> tuple[Any, Any]:
    """Training and reading. Raises CommandError where packages are missing."""
    try:
        from headrace_robots.world import data, training
    except ImportError as error:
        raise CommandError(f"world models need pip install 'headrace-robots[policies]' ({error})") from error
    return training, data


def _show(directory: Path, model: WorldModel, as_json: bool) -> None:
    from headrace_robots.world.model import told

    config = model.config
    if as_json:
        print_json(
            {
                "directory": str(directory.absolute()),
                "version": model.version,
                "digest": model.digest,
                **config.model_dump(mode="json", include={"number", "task", "threshold", "data", "errors"}),
            }
        )
        return
    rows = [
        ("version", model.version),
        ("of", f"{config.task} ({config.backend})"),
        *((name, str(value)) for name, value in config.data.items()),
        *((f"held-out error: {name}", value) for name, value in told(config.errors)),
        ("threshold of disagreement", f"{config.threshold:.3g}"),
    ]
    console().print(table(("world model", str(directory)), rows))


def _real(environment: EnvironmentSection, task: str, pool: Any) -> Real:
    """The environment as a model has it. Raises CommandError."""
    from headrace_servicekit.rpc.episodes import is_image

    from headrace_robots.world.training import Real

    spaces = {space.name: _space(space) for space in pool.observation_spaces}
    images = {name for name, each in spaces.items() if is_image(_type(each), each.shape)}
    names = environment.state if environment.state is not None else sorted(spaces.keys() - images)
    for name in names:
        if name not in spaces or _type(spaces[name]).kind != "f":
            reason = f"{name!r} is no observation of numbers, which alone are learned"
            known = ", ".join(repr(each) for each in spaces if _type(spaces[each]).kind == "f") or "none"
            raise user_error("environment.state", reason, f"name some of {known}")
    if not names:
        raise user_error("environment.tasks", f"{task} shows images alone", "choose one with states")
    return Real(environment.backend, task, tuple(spaces[name] for name in names), _space(pool.action_space))


def _type(space: Space) -> Any:
    import numpy as np

    return np.dtype(space.dtype)


def _space(message: Any) -> Space:
    import numpy as np
    from headrace_servicekit.rpc.tensors import NUMPY_TYPES, decode_tensor

    from headrace_robots.world.model import Space

    def bound(which: str) -> tuple[float | None, ...] | None:
        if not message.HasField(which):
            return None
        numbers = decode_tensor(getattr(message, which), max_bytes=1 << 26).ravel().astype(float)
        return tuple(float(each) if np.isfinite(each) else None for each in numbers)

    return Space(
        name=message.name,
        dtype=NUMPY_TYPES[message.data_type].name,
        shape=tuple(message.shape),
        low=bound("low"),
        high=bound("high"),
        categories=tuple(message.categories),
    )
