"""`headrace success`: a classifier that tells by a picture whether a task is done, for `reward.scorers`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from headrace_cli.commands.options import JsonFlag
from headrace_cli.errors import CommandError, user_error, writing
from headrace_cli.output import console, print_json, table

app = typer.Typer(help="Success classifiers: rewards from pictures.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `train` a command of its own."""


@app.command()
def train(
    data: Annotated[
        list[Path],
        typer.Argument(metavar="DATA...", help="LeRobot v3 data sets with next.success and the camera."),
    ],
    camera: Annotated[str, typer.Option(help="Camera, as the data sets and the policy call it.")],
    output: Annotated[Path, typer.Option(help="Directory to write; a classifier that is there is replaced.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimizer, of 32 pictures.")] = 600,
    pixels: Annotated[
        int, typer.Option(min=16, max=512, help="Pictures are resized to so many, squared.")
    ] = 64,
    heldout: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the episodes that judge it.")
    ] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Of held-out episodes, weights and batches.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Learn to tell pictures with success from others, and judge that on held-out episodes."""
    try:
        import numpy as np

        from headrace_robots.demonstrations import Demonstrations, DemonstrationsNotReadable
        from headrace_robots.reward import network
    except ImportError as error:
        needed = "pip install 'headrace-robots[policies,demonstrations]'"
        raise CommandError(f"success classifiers need {needed} ({error})") from error
    episodes: list[network.Labelled] = []
    try:
        for directory in data:
            for place, shown in enumerate(Demonstrations(directory, [camera])):
                if shown.success_T is None:
                    reason = f"{directory} does not say whether an action led to success (next.success)"
                    fix = "headrace demonstrations collect writes it with --noise 0"
                    raise user_error("DATA", f"{reason}, episode {place}", fix)
                # A step's picture is what came of the action before it.
                labels_N = np.concatenate([[False], shown.success_T.numpy()[:-1] > 0])
                episodes.append(network.Labelled(shown.images[camera].numpy(), labels_N))
        if output.exists() and not (output / network.CONFIG).is_file():
            raise user_error("--output", f"{output} is there, and no classifier", "give another directory")
        with writing(output):
            config = network.train(
                camera, episodes, output, steps=steps, heldout=heldout, seed=seed, pixels=pixels
            )
    except DemonstrationsNotReadable as error:
        raise user_error("DATA", str(error), "give LeRobot v3 data sets") from error
    except network.ClassifierProblem as problem:
        raise user_error("DATA", str(problem), "see docs/rewards.md") from problem
    if as_json:
        print_json({"directory": str(output.absolute()), **config.model_dump(mode="json")})
        return
    rows = [
        (name, f"{share:.3f} ({low:.3f} to {high:.3f})") for name, (share, low, high) in config.errors.items()
    ]
    console().print(table(("held-out pictures", str(output)), rows))
