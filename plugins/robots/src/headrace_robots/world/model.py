"""A world model as a directory: `world.json`, which says what it is of, and `model.safetensors`. Computes with numpy.

An ensemble of networks, each from a state and an action to the state's change, the reward, and whether the episode
ends. Knows no simulator service and no training.
Shapes: M members of the ensemble, N environments, S numbers of a state, F numbers of an action as it is read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from headrace_schema.sections.base import Count, CountOrZero, Section
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file

CONFIG, WEIGHTS = "world.json", "model.safetensors"
FORMAT = 1
STARTS, FIRST = "starts", "first"
"""Names of two tensors: states at which episodes may begin, and which of these were the first of a real one."""


class WorldNotReadable(Exception):
    """A directory that holds no whole world model; the message says what to change."""


class Space(Section):
    """An observation or an action of the real environment; the fields of the service's `ArraySpace`."""

    name: str = ""
    dtype: str
    shape: tuple[CountOrZero, ...]
    low: tuple[float | None, ...] | None = Field(default=None, description="null: nothing bounds a number")
    high: tuple[float | None, ...] | None = None
    categories: tuple[CountOrZero, ...] = ()

    @property
    def size(self) -> int:
        """Numbers."""
        return math.prod(self.shape)

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Least and most of each number, in one row; infinite where nothing bounds it."""
        ends = ((self.low, -math.inf), (self.high, math.inf))
        low, high = (
            np.array([free if end is None else end for end in given or (None,) * self.size], np.float64)
            for given, free in ends
        )
        return low, high


class WorldConfig(Section):
    """What `world.json` says."""

    format: Count = FORMAT
    number: Count = Field(
        description="counts the models that were written to this directory, one after the other"
    )
    backend: str = Field(description="backend of the real environment")
    task: str = Field(description="its name there")
    observations: tuple[Space, ...] = Field(min_length=1)
    action: Space
    members: Count
    hidden: Count = Field(description="units of each of two layers")
    terminates: bool = Field(
        description="whether a real episode ended by itself, so that the model says when"
    )
    longest: Count = Field(description="actions of the longest real episode")
    threshold: float = Field(gt=0, description="disagreement of the members at which an episode is cut")
    data: dict[str, float | str] = Field(description="what it was learned from")
    errors: dict[str, tuple[float, ...]] = Field(
        description="on held-out episodes: the mean, and the ends of its 95% interval where there are several episodes"
    )

    @property
    def state_size(self) -> int:
        """S."""
        return sum(each.size for each in self.observations)

    @property
    def read_size(self) -> int:
        """F: a number is read as it is, a category as one of so many."""
        return sum(count or 1 for count in self.action.categories or (0,) * self.action.size)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors beside STARTS and FIRST, by name."""
        inputs, outputs = self.state_size + self.read_size, self.state_size + 2
        sizes = (inputs, self.hidden, self.hidden, outputs)
        found: dict[str, tuple[int, ...]] = {
            "input_mean": (inputs,),
            "input_std": (inputs,),
            "output_mean": (outputs - 1,),
            "output_std": (outputs - 1,),
        }
        for place in range(3):
            found[f"weight.{place}"] = (self.members, sizes[place], sizes[place + 1])
            found[f"bias.{place}"] = (self.members, 1, sizes[place + 1])
        return found


@dataclass(frozen=True)
class Predicted:
    """What N actions lead to. `disagreement_N` is, over the numbers of the state, the largest standard deviation of
    the members' changes, in standard deviations of the change of that number in the data.
    """

    states_NS: np.ndarray
    rewards_N: np.ndarray
    ended_N: np.ndarray
    disagreement_N: np.ndarray


class WorldModel:
    """The networks, in float64: what is predicted for one environment depends on no other by a visible bit."""

    def __init__(self, config: WorldConfig, tensors: Mapping[str, np.ndarray], digest: str) -> None:
        self.config, self.digest = config, digest
        self._tensors = {name: tensors[name].astype(np.float64) for name in (*config.shapes(), STARTS)}
        self.starts_NS: np.ndarray = self._tensors[STARTS]
        self.first_N: np.ndarray = np.flatnonzero(tensors[FIRST])
        """Rows of `starts_NS` with which a real episode began."""
        bounds = [each.bounds() for each in config.observations]
        low_S, high_S = (np.concatenate(ends) for ends in zip(*bounds, strict=True))
        least_S, most_S = self.starts_NS.min(0), self.starts_NS.max(0)
        # Beyond the data networks know nothing: nothing may grow there without end.
        self._low_S = np.maximum(low_S, least_S - (most_S - least_S))
        self._high_S = np.minimum(high_S, most_S + (most_S - least_S))

    @property
    def version(self) -> str:
        """Number and digest."""
        return f"{self.config.number} ({self.digest[:12]})"

    @property
    def change_std(self) -> np.ndarray:
        """(S,) standard deviations of the changes of a state's numbers in the data."""
        found: np.ndarray = self._tensors["output_std"][: self.config.state_size]
        return found

    @property
    def reward_std(self) -> float:
        """Standard deviation of the rewards in the data."""
        return float(self._tensors["output_std"][-1])

    @property
    def reward_mean(self) -> float:
        """Mean of the rewards in the data."""
        return float(self._tensors["output_mean"][-1])

    def predict(self, states_NS: np.ndarray, actions_NA: np.ndarray, members_N: np.ndarray) -> Predicted:
        """What each action leads to in its environment's member: within the bounds of the observations, and no further
        beyond the states of the data than these are apart.
        """
        tensors, size = self._tensors, self.config.state_size
        read_NF = read(self.config.action, actions_NA)
        rows_NI = (np.concatenate([states_NS, read_NF], 1) - tensors["input_mean"]) / tensors["input_std"]
        hidden_MNH = np.broadcast_to(rows_NI, (self.config.members, *rows_NI.shape))
        for place in range(3):
            hidden_MNH = hidden_MNH @ tensors[f"weight.{place}"] + tensors[f"bias.{place}"]
            if place < 2:
                hidden_MNH = hidden_MNH * 0.5 * (1 + np.tanh(hidden_MNH / 2))  # SiLU
        own_NO = hidden_MNH[members_N, np.arange(len(states_NS))]
        change_NK = own_NO[:, :-1] * tensors["output_std"] + tensors["output_mean"]
        return Predicted(
            np.clip(states_NS + change_NK[:, :size], self._low_S, self._high_S),
            change_NK[:, size],
            (own_NO[:, -1] > 0) & self.config.terminates,
            hidden_MNH[..., :size].std(0).max(1),
        )


def read(space: Space, actions_NA: np.ndarray) -> np.ndarray:
    """(N, F) actions in the environment's units as the networks read them."""
    if not space.categories:
        return actions_NA.astype(np.float64)
    low_A, _ = space.bounds()
    columns = []
    for place, count in enumerate(space.categories):
        own_N = actions_NA[:, place].astype(np.float64)
        if not count:
            columns.append(own_N[:, None])
            continue
        first = low_A[place] if math.isfinite(low_A[place]) else 0.0
        columns.append((own_N[:, None] - first == np.arange(count)).astype(np.float64))
    return np.concatenate(columns, 1)


def load_config(directory: Path) -> WorldConfig:
    """What the directory says of its model. Raises WorldNotReadable."""
    try:
        config = WorldConfig.model_validate_json((directory / CONFIG).read_bytes())
    except OSError as error:
        raise WorldNotReadable(
            f"there is no world model in {directory} ({error.strerror}); `headrace world train` writes one"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise _damaged(directory / CONFIG, f"{place}: {first['msg']}") from error
    if config.format != FORMAT:
        raise _damaged(directory / CONFIG, f"its format is {config.format}, and {FORMAT} is read")
    return config


def load_world(directory: Path) -> WorldModel:
    """The model of a directory. Raises WorldNotReadable."""
    config, file = load_config(directory), directory / WEIGHTS
    try:
        tensors = load_file(file)
        digest = digest_of((directory / CONFIG).read_bytes(), file.read_bytes())
    except (OSError, SafetensorError, ValueError) as error:
        raise _damaged(file, str(error)) from error
    rows = tensors[STARTS].shape[0] if STARTS in tensors and tensors[STARTS].ndim else 0
    wanted = {**config.shapes(), STARTS: (rows, config.state_size), FIRST: (rows,)}
    for name, shape in wanted.items():
        found = tensors[name].shape if name in tensors else None
        if found != shape:
            has = "is not there" if found is None else f"has shape {list(found)}"
            raise _damaged(file, f"{name} {has}, and {list(shape)} is wanted")
        if not np.isfinite(tensors[name]).all():
            raise _damaged(file, f"{name} is not finite")
    if not tensors[FIRST].any():
        raise _damaged(file, "it has no state at which an episode begins")
    return WorldModel(config, tensors, digest)


def digest_of(*bodies: bytes) -> str:
    """SHA-256 of a model's files, hexadecimal."""
    found = hashlib.sha256()
    for body in bodies:
        found.update(hashlib.sha256(body).digest())
    return found.hexdigest()


def told(errors: Mapping[str, Sequence[float]]) -> list[tuple[str, str]]:
    """Name and value of each held-out error, with its interval, for people."""
    return [
        (name, f"{mean:.3g}" + (f" ({interval[0]:.3g} to {interval[1]:.3g})" if interval else ""))
        for name, (mean, *interval) in errors.items()
    ]


def _damaged(file: Path, what: str) -> WorldNotReadable:
    return WorldNotReadable(
        f"{file} is no whole file of a world model ({what}); train it anew with `headrace world train`"
    )


def described(config: WorldConfig) -> str:
    """`world.json` of a model."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"
