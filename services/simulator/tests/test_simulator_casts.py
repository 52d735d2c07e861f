"""Values that an environment gives in another type than it declares: kept where none changes, else it is lost."""

from __future__ import annotations

import re

import numpy as np
import pytest
from gymnasium import spaces
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.rpc.errors import message_of
from headrace_simulator.backends.gymnasium_spaces import Observations
from headrace_simulator.spaces import ArraySpace, action_fault, flag, picture

OK, LOST = simulator_pb2.OUTCOME_STATUS_OK, simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
WHOLE = [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
FLOATS = [np.float16, np.float32, np.float64]


def box(dtype) -> spaces.Box:
    whole = np.dtype(dtype).kind in "iu"
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if whole else (-np.inf, np.inf)
    return spaces.Box(low, high, (2,), dtype)


@pytest.mark.parametrize("declared", [*WHOLE, *FLOATS, np.bool_])
@pytest.mark.parametrize("given", [*WHOLE, *FLOATS, np.bool_, np.complex64, np.str_, np.object_])
def test_values_arrive_as_they_were_given_or_not_at_all(given, declared):
    """Each type into each other one: small values, and the largest that the given type has."""
    space = box(declared) if declared is not np.bool_ else spaces.Box(0, 1, (2,), np.int8)
    show = Observations(space)
    kind, goal = np.dtype(given).kind, show.spaces[0].dtype
    values = [np.array([0, 1]).astype(given)]
    if kind in "iu":
        values += [np.array([np.iinfo(given).max, np.iinfo(given).min], given)]
    if kind == "f":
        values += [np.array([0.25, 0.75], given), np.array([np.finfo(given).max, 0], given)]
    for value in values:
        try:
            (found,) = show({"": value}[""]).values()
        except ValueError as error:
            assert str(value.dtype) in str(error) and str(goal) in str(error)
            continue
        assert found.dtype == goal
        if kind == "f":
            np.testing.assert_allclose(found.astype(np.float64), value.astype(np.float64), rtol=1e-3)
        else:
            assert [int(each) for each in found] == [int(each) for each in value]
    with_fractions = np.array([0.25, 0.75])
    if goal.kind in "iu":
        with pytest.raises(ValueError, match=f"float64, where {goal} is declared"):
            show(with_fractions)


@pytest.mark.parametrize(
    ("space", "value", "words"),
    [
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), np.zeros((8, 8, 3)), "float64, where uint8"),
        (
            spaces.Box(0, 255, (3, 8, 8), np.uint8),
            np.full((3, 8, 8), 300),
            "holds 300 of type int64, which uint8",
        ),
        (spaces.Box(0, 255, (8, 8), np.uint8), np.full((8, 8), -1), "holds -1 of type int64, which uint8"),
        (spaces.Box(0, 1, (1,), np.int32), [2**31], "holds 2147483648 of type int64, which int32"),
        (spaces.Box(0, 1, (1,), np.int64), [np.nan], "float64, where int64"),
        (spaces.Box(0, 1, (1,), np.int64), np.array([2**63], np.uint64), "of type uint64, which int64"),
        (spaces.Box(0, 1, (1,), np.uint64), [-1], "of type int64, which uint64"),
        (spaces.Box(-1, 1, (1,), np.float32), [1e300], "holds 1e[+]300 of type float64, which float32"),
        (spaces.Box(-1, 1, (1,), np.float32), [2**24 + 1], "of type int64, which float32"),
        (spaces.Discrete(3), 1.5, "float64, where int64"),
        (spaces.Discrete(3), 3, "is 3, which is not in Discrete[(]3[)]"),
        (spaces.Discrete(3, start=5), 4, "is 4, which is not in Discrete"),
        (spaces.MultiDiscrete([2, 3]), [2, 0], "which is not in MultiDiscrete"),
        (spaces.MultiDiscrete([2, 3]), [0, -1], "which is not in MultiDiscrete"),
        (spaces.MultiBinary(2), [0.5, 1.0], "float64, where int8"),
        (
            spaces.Dict({"a": spaces.Tuple([spaces.Box(0, 9, (1,), np.uint8)])}),
            {"a": ([0.5],)},
            "'a.0' .*float64",
        ),
    ],
)
def test_what_would_be_lost_names_both_types(space, value, words):
    with pytest.raises(ValueError, match=words):
        Observations(space)(value)


def test_what_is_not_finite_stays_so_and_floats_may_round():
    (found,) = Observations(spaces.Box(-9, 9, (3,), np.float32))(np.array([np.nan, np.inf, 0.1])).values()
    assert (
        found.dtype == np.float32
        and np.isnan(found[0])
        and np.isinf(found[1])
        and found[2] == np.float32(0.1)
    )


@pytest.mark.parametrize("value", [True, False, 0, 1, 1.0, np.float32(0), np.bool_(True), np.array([1])])
def test_a_flag_is_a_bool_of_any_type(value):
    assert flag("terminated", value) is bool(value)


@pytest.mark.parametrize("value", [float("nan"), 0.5, 2, -1, "False", None, [0, 1], np.zeros(2)])
def test_what_is_no_flag_is_named(value):
    with pytest.raises(ValueError, match=r"terminated is .* and no bool"):
        flag("terminated", value)


@pytest.mark.parametrize(
    "frame", [np.zeros((4, 4, 3)), np.ones((4, 4, 3), np.float32), np.full((4, 4, 3), 256)]
)
def test_a_picture_of_floats_is_none(frame):
    with pytest.raises(ValueError, match=f"{frame.dtype}.*uint8"):
        picture(frame)
    assert picture(np.full((4, 4, 3), 200)).dtype == np.uint8


def test_an_action_that_its_space_does_not_hold_is_refused():
    space = ArraySpace("", np.dtype(np.int8), (1,), np.array([-100], np.int8), np.array([100], np.int8))
    assert action_fault(space, np.array([100])) is None
    assert "holds 300 of type int64, which int8" in action_fault(space, np.array([300]))
    single = ArraySpace("", np.dtype(np.float32), (1,))
    assert "holds 1e+300 of type float64, which float32" in action_fault(single, np.array([1e300]))


ENVIRONMENT = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Casts(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, at=0, what="picture"):
        self.at, self.what, self.steps = at, what, 0

    def observe(self):
        shown = np.full((8, 8, 3), 200, np.uint8)
        return shown / 255 if self.what == "picture" and self.steps >= self.at else shown

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        now = self.steps >= self.at
        reward = 1e39 if now and self.what == "reward" else 1.0
        success = float("nan") if now and self.what == "success" else True
        ended = float("nan") if now and self.what == "terminated" else False
        return self.observe(), reward, ended, False, {"success": success}

    def render(self):
        return np.full((8, 8, 3), 0.8)


def many(num_envs, **options):
    return gymnasium.vector.SyncVectorEnv([lambda: Casts(**options)] * num_envs)
"""


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("picture", "float64.*uint8"),
        ("reward", "a reward of 1e[+]39, which is not finite in float32"),
        ("success", "info.'success'. is .*nan"),
        ("terminated", "terminated is .*nan"),
    ],
)
async def test_an_environment_whose_values_would_change_is_lost(simulator, tmp_path, what, words, together):
    if together and what in ("picture", "terminated"):
        pytest.skip("Gymnasium's vector casts these itself, before anyone sees them")
    (tmp_path / "casts.py").write_text(ENVIRONMENT)
    name = "casts.py:many" if together else "casts.py:Casts"
    pool = await simulator.open(name, options={"at": 2, "what": what}, vectorized=together)
    assert (await pool.reset()).status == OK
    assert (await pool.act(np.int64(1))).status == OK
    lost = await pool.act(np.int64(1))
    assert lost.status == LOST
    assert re.search(words, lost.detail), lost.detail
    assert (await pool.reset()).status == OK


async def test_a_rendered_picture_of_floats_is_refused(simulator, tmp_path):
    (tmp_path / "casts.py").write_text(ENVIRONMENT)
    pool = await simulator.open("casts.py:Casts", options={"at": 9})
    await pool.reset()
    with pytest.raises(Exception) as raised:
        await pool.stub.Render(simulator_pb2.RenderRequest(pool=pool.opened.pool, environments=[0]))
    assert "the picture that it renders is of type float64, where uint8" in message_of(raised.value)
