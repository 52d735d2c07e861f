"""A checkpoint as a model directory, of a run's files alone: no fleet, no GPU, one tensor in memory at a time.

`python -m headrace_trainer.export runs/RUN [--to DIRECTORY] [--at STEP]`
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import load_architecture, quantisation
from headrace_modelkit.weights import own_name
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.stores.files import localized
from headrace_servicekit.stores.problems import StoreProblem
from safetensors import SafetensorError
from torch import Tensor

from headrace_trainer.backends.shared.fit import ALPHA, CRITIC
from headrace_trainer.checkpoints.directory import MODEL, CheckpointDirectory
from headrace_trainer.checkpoints.reader import StateReader
from headrace_trainer.checkpoints.tree import Saved
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.workloads import run_kind


@dataclass(frozen=True)
class Exported:
    """What was written, and of which step."""

    directory: Path
    step: int
    version: int
    digest: str
    """Of the policy's version."""
    checkpoint: str
    weights: str = ""
    """Which numbers the files have, and what those of the run's model were where they were quantised."""


def export_checkpoint(run_directory: Path, name: Callable[[int], Path], step: int | None = None) -> Exported:
    """Writes the checkpoint of `step`, or the newest, into the new directory that `name` gives its step.

    Byte for byte what the run itself would export of that version. Nothing of the run changes, which may be at work.
    Raises Refusal INVALID for a run without such a checkpoint and a target that is not empty, CHECKPOINT_DAMAGED,
    MODEL_NOT_READABLE, and EXPORT_FAILED where the disk refuses.
    """
    checkpoints = CheckpointDirectory(run_directory, foreign=True)
    saved = _chosen(checkpoints, run_directory, step)
    target = name(saved.version.ordinal)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise invalid(f"{target} exists and is not empty; name a new directory")
    checkpoints.verify(saved)
    try:
        config = localized(TrainerConfig.model_validate(checkpoints.model()))
        kind = run_kind(config)
        names = kind.weight_names()
        reader = StateReader.of_checkpoint(saved.path, saved.files, saved.optimizer_steps)
        kind.export(chain(_tensors(reader, names), _head(reader)), target)
        weights = _weights(config, target)
    except (ModelNotReadable, StoreProblem) as error:
        raise invalid(str(error), "MODEL_NOT_READABLE") from error
    except ValueError as error:
        raise invalid(f"{checkpoints.root / MODEL}: {error}") from error
    except (OSError, SafetensorError) as error:
        raise Refusal("EXPORT_FAILED", f"{target} cannot be written: {error}", "exhausted") from error
    version = saved.version
    return Exported(target, version.ordinal, version.number, version.digest, saved.name, weights)


def _chosen(checkpoints: CheckpointDirectory, run_directory: Path, step: int | None) -> Saved:
    found = checkpoints.live()
    if found and not (checkpoints.root / MODEL).exists():
        raise invalid(
            f"{checkpoints.root} has no {MODEL}, which says what model it is; give the file back, or export a fork"
        )
    if not found:
        damaged = "; ".join(f"{each.name}: {each.reason}" for each in checkpoints.asides.take_reports())
        reason = f"only damaged ones: {damaged}" if damaged else "name a run that has one"
        raise invalid(f"{run_directory} has no checkpoint; {reason}")
    for saved in found:
        if step in (None, saved.version.ordinal):
            return saved
    steps = ", ".join(str(saved.version.ordinal) for saved in found)
    raise invalid(f"there is no checkpoint of step {step}; there are those of steps {steps}")


def _tensors(reader: StateReader, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Of each policy the weights, and behind them its adapters."""
    adapters = [name for name in reader.adapter_shapes() if own_name(name)[1] != ALPHA]
    for policy in dict.fromkeys(own_name(name)[0] for name in names):
        for name in (name for name in names if own_name(name)[0] == policy):
            yield name, reader.weight(name)
        for name in (name for name in adapters if own_name(name)[0] == policy):
            yield name, reader.adapter(name)


def _weights(config: TrainerConfig, target: Path) -> str:
    """See `Exported.weights`; empty where no language model was written."""
    file = target / "config.json"
    written: str = json.loads(file.read_text()).get("dtype", "") if file.is_file() else ""
    scheme = quantisation(load_architecture(config.model)) if written else {}
    return f"{written}, dequantised from {scheme['quant_method']}" if scheme else written


def _head(reader: StateReader) -> Iterator[tuple[str, Tensor]]:
    """The head of a critic, which is what a reward model's run has learned, and an aid of others."""
    for name in reader.critic_shapes():
        if name.startswith(f"{CRITIC}head."):
            yield name, reader.critic_weight(name)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; prints where the model is, with --json the step too."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace_trainer.export", description=__doc__.splitlines()[0]
    )
    parser.add_argument("run_directory", type=Path, help="a run's directory, such as .headrace/runs/RUN")
    parser.add_argument("--to", type=Path, help="a new directory; left out: RUN-step-STEP here")
    parser.add_argument("--at", type=int, metavar="STEP", help="of the checkpoint; left out: the newest")
    parser.add_argument("--json", action="store_true", help="print JSON, a refusal too")
    options = parser.parse_args(argv)
    run = options.run_directory
    try:
        exported = export_checkpoint(
            run, lambda step: options.to or Path(f"{run.name}-step-{step}"), options.at
        )
    except Refusal as refusal:
        if options.json:
            print(json.dumps({"reason": refusal.reason, "message": refusal.message}))
        else:
            print(f"error: {refusal.message}", file=sys.stderr)
        return 2
    shown = {**vars(exported), "directory": str(exported.directory.absolute())}
    print(json.dumps(shown) if options.json else exported.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
