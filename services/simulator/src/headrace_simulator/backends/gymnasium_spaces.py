"""Gymnasium's spaces as named arrays, and rows of numbers as its actions. Knows no environment.

A: numbers of an action, all parts of a Dict or Tuple space one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium import spaces

from headrace_simulator.backends.base import EXPERT_ACTION, BackendError
from headrace_simulator.spaces import ArraySpace, cast

MOST_CATEGORIES = 4096
"""Of one number: an observation shows one as so many, and a policy has an output for each."""
PIXELS = 8
"""Fewest on a side of a matrix of bytes that is a picture."""
FRAME_CHANNELS = (1, 3, 4)
"""Of one of the frames that are stacked."""
Leaf = tuple[tuple[Any, ...], spaces.Space[Any]]
Convert = Callable[[np.ndarray], np.ndarray]


class Observations:
    """What an environment shows, as named arrays.

    Parts of Dict and Tuple spaces have names such as "camera.front". A category is a one-hot vector, a picture is
    (height, width, channels) whatever its layout is, with the channels of stacked frames one after the other. Text is
    left out. Raises BackendError for what is no array.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        everything = list(_leaves(space, ()))
        # Text alone is refused as what is no array.
        leaves = [leaf for leaf in everything if not _is_text(leaf[1])] or everything
        found = [(path, *_shown(".".join(map(str, path)), each)) for path, each in leaves]
        self.spaces = [shown for _, shown, _ in found]
        self._parts = found

    def __call__(self, observation: Any) -> dict[str, np.ndarray]:
        """The arrays of an observation. Raises ValueError for values that their spaces' types do not hold."""
        found = {}
        for path, space, convert in self._parts:
            part = observation
            for key in path:
                part = part[key]
            found[space.name] = cast(_label(space.name), convert(np.asarray(part)), space.dtype)
        return found

    def rows(self, observations: Any, places: Sequence[int]) -> dict[str, np.ndarray]:
        """The arrays of some rows of a vector's observations, as columns. Raises as a call."""
        found = {}
        for path, space, convert in self._parts:
            part = observations
            for key in path:
                part = part[key]
            column = np.asarray(part)[places]
            if convert is not np.asarray:
                column = np.stack([convert(each) for each in column])
            found[space.name] = cast(_label(space.name), column, space.dtype)
        return found


class Actions:
    """What an environment takes. Raises BackendError for actions that are no numbers."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self._space = space
        leaves = [each for _, each in _leaves(space, ())]
        rows = [_numbers(each) for each in leaves]
        ends = np.cumsum([0, *(len(low) for low, _, _ in rows)])
        self._slices = [slice(int(a), int(b)) for a, b in pairwise(ends)]
        low, high, counts = (np.concatenate([row[place] for row in rows]) for place in range(3))
        continuous = [each.dtype for each, row in zip(leaves, rows, strict=True) if not row[2].any()]
        dtype = np.result_type(*continuous) if continuous else np.dtype(np.int64)
        whole = isinstance(space, spaces.Dict | spaces.Tuple) or space.shape is None
        shape = (int(ends[-1]),) if whole else tuple(space.shape or ())
        self.space = ArraySpace(
            "",
            dtype,
            shape,
            _bound(low, dtype, shape),
            _bound(high, dtype, shape),
            tuple(int(count) for count in counts) if counts.any() else (),
        )

    def __call__(self, action: np.ndarray) -> Any:
        """The action in the environment's own form."""
        return _nested(self._space, iter(self._slices), action.reshape(-1))


def _is_text(space: spaces.Space[Any]) -> bool:
    """Also for spaces of others' own, such as MiniGrid's of missions."""
    return isinstance(space, spaces.Text) or (space.dtype is not None and np.dtype(space.dtype).kind == "U")


def _leaves(space: spaces.Space[Any], path: tuple[Any, ...]) -> Iterator[Leaf]:
    """The spaces inside nested Dict and Tuple spaces, with their keys."""
    if isinstance(space, spaces.Dict):
        parts: list[tuple[Any, spaces.Space[Any]]] = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        parts = list(enumerate(space.spaces))
    else:
        yield path, space
        return
    for key, each in parts:
        yield from _leaves(each, (*path, key))


def _nested(space: spaces.Space[Any], slices: Iterator[slice], row_A: np.ndarray) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _nested(each, slices, row_A) for key, each in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nested(each, slices, row_A) for each in space.spaces)
    part = row_A[next(slices)]
    if isinstance(space, spaces.Discrete):
        return int(part[0])
    return part.reshape(space.shape or ()).astype(space.dtype)


def _numbers(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lowest and highest value of each number of an action, and how many whole numbers it may be (0: continuous)."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        first, counts = _categories(space)
        return first, first + counts - 1, counts
    if not isinstance(space, spaces.Box):
        kinds = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them"
        raise BackendError(
            "environment.name", f"its actions are {type(space).__name__}; {kinds} can be served"
        )
    low, high = space.low.reshape(-1), space.high.reshape(-1)
    if space.dtype is None or np.dtype(space.dtype).kind not in "iu":
        return low, high, np.zeros(len(low), np.int64)
    counts = high.astype(np.int64) - low.astype(np.int64) + 1
    if (counts > MOST_CATEGORIES).any() or (counts < 1).any():
        raise BackendError(
            "environment.name",
            f"its actions are whole numbers of {counts.max()} values; at most {MOST_CATEGORIES} can be served: wrap it "
            "into Discrete actions, or into a Box of floats",
        )
    return low, high, counts


def _categories(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """The first value of each number, and how many there are."""
    if isinstance(space, spaces.Discrete):
        first, counts = np.array([space.start]), np.array([space.n])
    elif isinstance(space, spaces.MultiDiscrete):
        first, counts = space.start.reshape(-1), space.nvec.reshape(-1)
    else:
        counts = np.full(int(np.prod(space.shape)), 2)
        first = np.zeros_like(counts)
    return first.astype(np.int64), counts.astype(np.int64)


def _shown(name: str, space: spaces.Space[Any]) -> tuple[ArraySpace, Convert]:
    """The arrays of an observation, and what makes them."""
    if name == EXPERT_ACTION:  # an action as policies give it, a category too
        return replace(Actions(space).space, name=name), np.asarray
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        first, counts = _categories(space)
        if counts.max() > MOST_CATEGORIES:
            raise BackendError(
                "environment.name",
                f"{_label(name)} is one of {counts.max()} values, and at most {MOST_CATEGORIES} are shown as "
                "one-hot: wrap it into numbers",
            )
        size = int(counts.sum())
        places = np.cumsum([0, *counts[:-1]])
        zero, one = np.zeros(size, np.float32), np.ones(size, np.float32)

        def one_hot(value: np.ndarray) -> np.ndarray:
            shown, chosen = zero.copy(), cast(_label(name), value, first.dtype).reshape(-1) - first
            if len(chosen) != len(counts) or (chosen < 0).any() or (chosen >= counts).any():
                raise ValueError(f"{_label(name)} is {value.tolist()}, which is not in {space}")
            shown[places + chosen] = 1
            return shown

        return ArraySpace(name, zero.dtype, (size,), zero, one), one_hot
    if isinstance(space, spaces.MultiBinary):
        return ArraySpace(name, np.dtype(np.int8), space.shape), np.asarray
    if not isinstance(space, spaces.Box):
        raise BackendError("environment.name", f"{_label(name)} is {type(space).__name__}, which is no array")
    convert = _picture(space)
    low, high = (convert(bound) if np.isfinite(bound).any() else None for bound in (space.low, space.high))
    return ArraySpace(name, np.dtype(space.dtype), convert(space.low).shape, low, high), convert


def _picture(space: spaces.Box) -> Convert:
    """What makes a picture (height, width, channels); what is no picture stays as it is."""
    shape = space.shape
    if space.dtype != np.uint8 or not 2 <= len(shape) <= 4:
        return np.asarray
    if len(shape) == 2:
        bytes_whole = not space.low.any() and bool((space.high == 255).all())
        return _add_channel if bytes_whole and min(shape) >= PIXELS else np.asarray
    if len(shape) == 3:
        return _move_channels if shape[2] > min(shape[:2]) and shape[0] <= min(shape[1:]) else np.asarray
    if shape[3] in FRAME_CHANNELS and shape[3] <= min(shape[1:3]):
        return _join_frames
    return _join_channels_first if shape[1] in FRAME_CHANNELS else np.asarray


def _add_channel(image: np.ndarray) -> np.ndarray:
    return image[..., None]


def _move_channels(image: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(image, 0, -1))


def _join_frames(image: np.ndarray) -> np.ndarray:
    frames, height, width, channels = image.shape
    return np.moveaxis(image, 0, 2).reshape(height, width, frames * channels)


def _join_channels_first(image: np.ndarray) -> np.ndarray:
    return _move_channels(image.reshape(-1, *image.shape[2:]))


def _bound(numbers: np.ndarray, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray | None:
    return numbers.astype(dtype).reshape(shape) if np.isfinite(numbers).any() else None


def _label(name: str) -> str:
    return f"observation {name!r}" if name else "its observation"
