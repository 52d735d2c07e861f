"""Spaces of observations and actions as plain arrays, their wire form, and what makes an action valid."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.rpc.tensors import NUMPY_TYPES, decode_tensor, encode_tensor

_MAX_BOUND_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class ArraySpace:
    """Arrays of one type and shape, within bounds."""

    name: str
    """Name of the observation; empty when there is only one, and for actions."""
    dtype: np.dtype
    shape: tuple[int, ...]
    low: np.ndarray | None = None
    """Of `shape`; None when nothing bounds it, infinite where an element is not bounded."""
    high: np.ndarray | None = None
    categories: tuple[int, ...] = ()
    """Of each number, in row order, how many whole numbers it may be, from `low` (default 0) on; 0: a continuous one.
    Empty where all are continuous.
    """

    @property
    def counts(self) -> np.ndarray:
        """`categories` in the space's shape."""
        return np.reshape(np.asarray(self.categories or np.zeros(self.shape), np.int64), self.shape)

    @cached_property
    def inside(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The least and the most of each number, where a value of the space's type between them is in the space."""
        if not self.categories:
            return None if self.low is None or self.high is None else (self.low, self.high)
        if not all(self.categories) or self.dtype.kind not in "iu":
            return None
        first = np.zeros(self.shape, self.dtype) if self.low is None else self.low
        return first, first + (self.counts - 1).astype(self.dtype)


def to_message(space: ArraySpace) -> simulator_pb2.Space:
    """The wire form; ServiceError INVALID where the element type cannot travel."""
    data_type = encode_tensor(np.zeros(0, space.dtype)).data_type
    message = simulator_pb2.Space(name=space.name, data_type=data_type, shape=space.shape)
    message.categories.extend(space.categories)
    if space.low is not None:
        message.low.CopyFrom(encode_tensor(space.low))
    if space.high is not None:
        message.high.CopyFrom(encode_tensor(space.high))
    return message


def from_message(message: simulator_pb2.Space) -> ArraySpace:
    """The space that `to_message` wrote."""
    bounds = {
        key: decode_tensor(getattr(message, key), max_bytes=_MAX_BOUND_BYTES)
        for key in ("low", "high")
        if message.HasField(key)
    }
    dtype, shape = NUMPY_TYPES[message.data_type], tuple(message.shape)
    return ArraySpace(message.name, dtype, shape, categories=tuple(message.categories), **bounds)


def cast(what: str, given: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The same values in another type; a float of fewer bits may round, and no other value may change.

    Raises ValueError, which names both types, for what would be lost: a float as a whole number, a whole number that
    the type does not hold, a float that would become infinite.
    """
    if given.dtype == dtype:
        return given
    kinds = {"b": "biuf", "i": "biuf", "u": "biuf", "f": "f"}.get(given.dtype.kind, "")
    if dtype.kind in kinds:
        with np.errstate(over="ignore"):
            found = given.astype(dtype)
        same = np.isfinite(found) == np.isfinite(given) if given.dtype.kind == "f" else _same(given, found)
        if np.all(same):
            return found
        where = tuple(int(place) for place in np.argwhere(~same)[0])
        raise ValueError(f"{what} holds {given[where]} of type {given.dtype}, which {dtype} does not hold")
    raise ValueError(f"{what} is of type {given.dtype}, where {dtype} is declared; give it in that type")


def _same(given: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Where whole numbers are the same in another type: also the sign, which numpy's wrapping changes."""
    back = (
        found.astype(given.dtype) == given
        if found.dtype.kind != "f"
        else found.astype(object) == given.astype(object)
    )
    same: np.ndarray = np.asarray(back, np.bool_) & ((found < 0) == (given < 0))
    return same


def flag(what: str, value: object) -> bool:
    """A flag that is a bool, 0 or 1, of any type. Raises ValueError, which names the value, for what is neither."""
    array = np.asarray(value)
    if array.size == 1 and array.dtype.kind in "biuf" and (item := array.item()) in (0, 1):
        return bool(item)
    raise ValueError(f"{what} is {value!r} of type {type(value).__name__}, and no bool")


def picture(frame: object) -> np.ndarray:
    """A rendered frame, (height, width, 3) uint8. Raises ValueError for what is none."""
    array = np.asarray(frame)
    if array.ndim != 3 or array.shape[2] != 3:
        raise ValueError("this environment renders no rgb_array")
    return cast("the picture that it renders", array, np.dtype(np.uint8))


def in_shape(space: ArraySpace, actions: np.ndarray, *, chunk: bool) -> np.ndarray:
    """An action, or a chunk of them, in the shape of its space: policies give each as a row of numbers."""
    dimensions = actions.ndim - chunk
    if dimensions == 1 and len(space.shape) != 1 and actions.shape[-1] == np.prod(space.shape):
        return actions.reshape((*actions.shape[:chunk], *space.shape))
    return actions


def action_fault(space: ArraySpace, action: np.ndarray) -> str | None:
    """Why the action is not in the space, in words; None when it is."""
    if action.shape != space.shape:
        return f"the action has shape {list(action.shape)}, the action space {list(space.shape)}"
    # Any width of the right kind will do: policies work in float32, many spaces in float64.
    if action.dtype.kind not in ("iu" if space.dtype.kind in "iu" else "iuf" + space.dtype.kind):
        return f"the action is of type {action.dtype}, the action space of type {space.dtype}"
    try:
        value = cast("the action", action, space.dtype)
    except ValueError as error:
        return str(error)
    if not np.isfinite(value).all():
        return "the action holds a value that is not finite"
    if space.categories and (fault := _category_fault(space, value)):
        return fault
    low = None if space.low is None else value < space.low
    high = None if space.high is None else value > space.high
    for outside in (low, high):
        if outside is not None and outside.any():
            where = tuple(int(i) for i in np.argwhere(outside)[0])
            return f"element {list(where)} of the action is {value[where]:g}, out of its bounds"
    return None


def _category_fault(space: ArraySpace, value: np.ndarray) -> str | None:
    first = np.zeros(space.shape) if space.low is None else space.low
    outside = (value != np.floor(value)) | (value < first) | (value >= first + space.counts)
    outside &= space.counts > 0
    if not outside.any():
        return None
    where = tuple(int(i) for i in np.argwhere(outside)[0])
    least = int(np.asarray(first)[where])
    named = f"element {list(where)} of the action" if where else "action"
    return f"{named} {value[where]:g} is not among {least} to {least + int(space.counts[where]) - 1}"


def chunk_fault(space: ArraySpace, actions: np.ndarray) -> str | None:
    """Why (length, action shape) is no chunk of actions of the space, in words; None when it is."""
    if actions.ndim != len(space.shape) + 1 or not len(actions):
        wanted = ["length", *space.shape]
        return f"the chunk has shape {list(actions.shape)}; a chunk of 1 or more actions has {wanted}"
    if _all_inside(space, actions):
        return None
    faults = ((index, action_fault(space, action)) for index, action in enumerate(actions))
    return next((f"action {index} of the chunk: {fault}" for index, fault in faults if fault), None)


def _all_inside(space: ArraySpace, actions: np.ndarray) -> bool:
    """Whether all actions of a chunk are plainly in a bounded space: the common case, in two comparisons."""
    if space.inside is None:
        return False
    if actions.shape[1:] != space.shape or actions.dtype != space.dtype:
        return False
    # What is not a number is in no bounds; neither is what is infinite, where the bounds are finite.
    low, high = space.inside
    inside = (actions >= low) & (actions <= high)
    return bool(inside.all()) and bool(np.isfinite(actions).all())
