"""Variants: what differs from the environment as it is follows from the seed, and what it cannot have is refused."""

from __future__ import annotations

import json

import grpc
import numpy as np
import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.rpc.errors import message_of

OK = simulator_pb2.OUTCOME_STATUS_OK
PENDULUM = "Pendulum-v1"


async def seen(simulator, arrays, variant, seeds=(3, 4, 3), name=PENDULUM, **fields):
    """By seed, the states of four steps, and what the reset said of the variant."""
    pool = await simulator.open(name, options={"variant": variant}, **fields)
    found = {}
    for seed in seeds:
        begun = await pool.reset(seed=seed)
        states = [arrays(begun)[""]]
        for _ in range(4):
            outcome = await pool.act(np.array([0.5], np.float32))
            assert outcome.status == OK, outcome.detail
            states.append(arrays(outcome)[""])
        found.setdefault(seed, []).append((np.stack(states), json.loads(begun.info_json)))
    return found


@pytest.mark.parametrize(
    ("name", "span"),
    [
        ("g", [0.5, 2.0]),
        ("action_noise", [0.1, 0.5]),
        ("action_delay", [1, 3]),
        ("observation_noise", 0.1),
        ("random_start", [2, 9]),
    ],
)
async def test_a_seed_decides_the_variant_and_the_variant_changes_the_episode(simulator, arrays, name, span):
    found = await seen(simulator, arrays, {"execution": {name: span}})
    plain = await seen(simulator, arrays, {})
    key = f"execution.{name}"
    (first, told), (again, told_again) = found[3]
    np.testing.assert_array_equal(first, again)
    assert told[key] == told_again[key]
    least, most = span if isinstance(span, list) else (span, span)
    assert least <= told[key] <= most
    assert (told[key] != found[4][0][1][key]) == (least < most), "another seed, another variant"
    assert not np.allclose(first, plain[3][0][0]), "the episode is another one"


async def test_a_knob_goes_back_to_what_the_environment_was_made_with(simulator, arrays):
    """Factors are of the nominal value, however many episodes there were."""
    found = await seen(simulator, arrays, {"execution": {"g": 1.0}})
    plain = await seen(simulator, arrays, {})
    np.testing.assert_array_equal(found[3][1][0], plain[3][0][0])


async def test_pictures_are_disturbed_alike_in_one_episode(simulator, environment_file, arrays):
    name = f"{environment_file}:make_env"
    variant = {"vision": {"noise": 0.5, "brightness": 2.0}}
    pool = await simulator.open(name, options={"variant": variant})
    pictures = []
    for seed in (1, 2, 1):
        pictures.append(arrays(await pool.reset(seed=seed))["camera.rgb.front"].astype(int))
        for _ in range(10):
            outcome = await pool.act([0.0, 0.0])
        pictures.append(arrays(outcome)["camera.rgb.front"].astype(int))
    assert outcome.status == OK
    np.testing.assert_array_equal(pictures[0], pictures[4])
    assert pictures[0].std() > 20 and not np.array_equal(pictures[0], pictures[2])
    # The plain picture is one of the step's number: twice as bright and half hidden, ten steps are 10 more.
    assert set(np.unique(pictures[1] - pictures[0])) <= {9, 10, 11}


@pytest.mark.parametrize(
    ("variant", "key", "words"),
    [
        ({"execution": {"gravty": 1.0}}, "execution.gravty", "it has: "),
        ({"execution": {"g": [2.0, 1.0]}}, "execution.g", "write the least first"),
        ({"execution": {"random_start": 1000}}, "execution.random_start", "it may be 0 to 100"),
        ({"vision": {"noise": 0.5}}, "vision.noise", "shows no images"),
        ({"semantic": {"instruction": "swing up"}}, "semantic.instruction", "says nothing in words"),
        ({"visoin": {}}, "visoin", "vision"),
    ],
)
async def test_what_an_environment_cannot_have_is_refused_with_its_key(simulator, variant, key, words):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await simulator.open(PENDULUM, options={"variant": variant})
    text = message_of(raised.value)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert text.startswith(f"options_json.variant.{key}: ") and words in text


async def test_discrete_actions_take_no_noise(simulator):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await simulator.open("CartPole-v1", options={"variant": {"execution": {"action_noise": 0.1}}})
    assert "not numbers between bounds" in message_of(raised.value)
    pool = await simulator.open(
        "CartPole-v1", options={"variant": {"execution": {"random_start": 3, "gravity": 2.0}}}
    )
    assert (await pool.reset(seed=1)).status == OK
