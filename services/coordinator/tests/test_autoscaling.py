"""The number of instances follows what runs want, within bounds; and what is shown of it."""

import pytest
from admission_parts import fleet, submit
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.autoscaler import SETTLE_S, Autoscaler, Bounds, parse_bounds

COOLDOWN_S = 300.0


class Log:
    """An event log's state and clock."""

    def __init__(self):
        self.state, self.at = fleet(), 0.0

    def monotonic(self):
        return self.at


@pytest.fixture
def log():
    return Log()


def scaler(log, refusal=""):
    asked = []

    async def scale(kind, count):
        asked.append((kind, count))
        if refusal:
            raise Refused("INVALID", refusal)

    return Autoscaler(log, scale, {"rollout": Bounds(1, 3)}, COOLDOWN_S), asked


async def test_it_grows_at_once_within_its_bounds_and_shrinks_after_the_cooldown(log):
    autoscaler, asked = scaler(log)
    await autoscaler.look()
    assert asked == [], "one is there, and the least is one"
    run = submit(log.state, "a", rollouts=5)
    await autoscaler.look()
    await autoscaler.look()
    assert asked == [("rollout", 3)]
    run.intent = "PAUSE"
    for at in (SETTLE_S, SETTLE_S + COOLDOWN_S - 1):
        log.at = at
        await autoscaler.look()
    assert len(asked) == 1
    log.at = SETTLE_S + COOLDOWN_S
    await autoscaler.look()
    assert asked[1:] == [("rollout", 1)]


async def test_fewer_for_a_moment_begins_the_cooldown_anew(log):
    autoscaler, asked = scaler(log)
    run = submit(log.state, "a", rollouts=2)
    await autoscaler.look()
    for at, intent in ((100.0, "PAUSE"), (350.0, "RUN"), (351.0, "PAUSE"), (401.0, "PAUSE")):
        log.at, run.intent = at, intent
        await autoscaler.look()
    assert asked == [("rollout", 2)]


async def test_a_refusal_is_kept_and_tried_again_later(log):
    autoscaler, asked = scaler(log, "this host can hold 1")
    submit(log.state, "a", rollouts=2)
    await autoscaler.look()
    await autoscaler.look()
    assert len(asked) == 1 and autoscaler.scalings["rollout"].problem == "this host can hold 1"
    log.at = SETTLE_S
    await autoscaler.look()
    assert len(asked) == 2


@pytest.mark.parametrize("text", ["rollout", "rollout=3", "rollout=3:1", "rolout=1:2", "rollout=1:99999"])
def test_bounds_that_cannot_be_are_refused(text):
    assert parse_bounds("rollout=1:8, reward=0:4") == {"rollout": Bounds(1, 8), "reward": Bounds(0, 4)}
    with pytest.raises(ValueError, match="write KIND=LEAST:MOST"):
        parse_bounds(text)


async def test_services_are_shown_with_what_is_wanted(api, spec_json):
    await api.post("/v1/runs", json={**spec_json, "rollout": {"instances": 2}})
    services = {each["kind"]: each for each in (await api.get("/v1/services")).json()["services"]}
    assert list(services) == ["rollout", "trainer", "simulator", "reward"]
    assert (services["rollout"]["instances"], services["rollout"]["wanted"]) == (3, 2)
    assert services["rollout"]["least"] is None, "the policy is off"
