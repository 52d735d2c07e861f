"""Which actions a space takes, and its way over the wire."""

from __future__ import annotations

import numpy as np
import pytest
from headrace_simulator.spaces import ArraySpace, action_fault, from_message, to_message

BOX = ArraySpace("", np.dtype(np.float64), (2,), np.array([-1.0, -np.inf]), np.array([1.0, np.inf]))
DISCRETE = ArraySpace("", np.dtype(np.int64), (), np.asarray(3), None, 4)


@pytest.mark.parametrize(
    ("space", "action", "fault"),
    [
        (BOX, np.array([1.0, 1e9]), None),
        (BOX, np.array([0.5, 0], np.float32), None),
        (BOX, np.array([1, 0]), None),
        (BOX, np.array([1.001, 0.0]), "out of its bounds"),
        (BOX, np.array([0.0, np.nan]), "not finite"),
        (BOX, np.array([0.0, np.inf]), "not finite"),
        (BOX, np.zeros(3), "shape [3]"),
        (BOX, np.zeros((1, 2)), "shape [1, 2]"),
        (BOX, np.zeros(2, np.bool_), "type bool"),
        (DISCRETE, np.asarray(3), None),
        (DISCRETE, np.asarray(6, np.int32), None),
        (DISCRETE, np.asarray(7), "not among 3 to 6"),
        (DISCRETE, np.asarray(2), "not among 3 to 6"),
        (DISCRETE, np.asarray(3.0), "type float64"),
        (DISCRETE, np.asarray([3]), "shape [1]"),
    ],
)
def test_action_faults(space, action, fault):
    found = action_fault(space, action)
    assert (found is None) if fault is None else (fault in found)


@pytest.mark.parametrize("space", [BOX, DISCRETE, ArraySpace("camera", np.dtype(np.uint8), (2, 3, 3))])
def test_spaces_survive_the_wire(space):
    again = from_message(to_message(space))
    assert (again.name, again.dtype, again.shape, again.discrete_count) == (
        space.name,
        space.dtype,
        space.shape,
        space.discrete_count,
    )
    np.testing.assert_equal((again.low, again.high), (space.low, space.high))
