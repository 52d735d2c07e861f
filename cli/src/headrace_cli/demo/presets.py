"""What a preset stands on: its run spec and the model that it makes on the spot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace_cli.errors import CommandError, mistake
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.start import last_lines
from headrace_cli.launcher.tether import tether

PRESETS = {
    "tiny": "making a tiny model and its tokenizer",
    "smollm2": "unpacking SmolLM2-135M-Instruct (the first time takes a minute)",
}
SIDE_BY_SIDE = {"tiny"}
"""Presets that are faster with a core for each side than with all cores in turn; see docs/performance.md."""
MAKING_S = 900.0


def example(preset: str) -> Path:
    """The run spec of a preset: beside the package in a wheel, in the repository otherwise."""
    if preset not in PRESETS:
        raise mistake("--preset", f"{preset!r} is not one", f"use {' or '.join(PRESETS)}")
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "examples", here.parents[4] / "examples"):
        if (folder / f"{preset}.yaml").is_file():
            return folder / f"{preset}.yaml"
    raise CommandError(f"examples/{preset}.yaml is missing from the installation; reinstall headrace")


def placement(preset: str, devices: int) -> list[str]:
    """The override that takes the faster placement for a preset on so many devices."""
    return ["placement.mode=disaggregated"] if preset in SIDE_BY_SIDE and devices > 1 else []


class ModelMaker:
    """Makes a preset's model in a child process, unless it is there; leaving the block ends the child."""

    def __init__(self, preset: str, data_dir: DataDir) -> None:
        self.directory = data_dir.models / preset
        self.sentence = PRESETS[preset]
        self._log = data_dir.log_file(f"model-{preset}")
        self._child: subprocess.Popen[bytes] | None = None
        if not self.is_there:
            self._child = self._start(preset)

    @property
    def is_there(self) -> bool:
        """Whether the model directory is complete: its weights are written last."""
        return any(self.directory.glob("*.safetensors")) and (self.directory / "config.json").is_file()

    def _start(self, preset: str) -> subprocess.Popen[bytes]:
        """Without the fleet's mark: the launcher, which starts meanwhile, kills what carries it."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"headrace_modelkit.presets.{preset}", str(self.directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=tether(),
            )

    def wait(self) -> Path:
        """The model's directory once it is made; CommandError with the end of the log when that fails."""
        if self._child is None:
            return self.directory
        try:
            status = self._child.wait(timeout=MAKING_S)
        except subprocess.TimeoutExpired as error:
            raise CommandError(
                f"making the model took longer than {MAKING_S:g} s; see {self._log}"
            ) from error
        if status or not self.is_there:
            words = "\n".join(last_lines(self._log, 12))
            raise CommandError(f"the model could not be made; {self._log} ends with:\n{words}")
        return self.directory

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child and self._child.poll() is None:
            self._child.kill()
            self._child.wait()
