"""The loop that holds a robot: what moves it, what stops it, and what its episodes come to."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from headrace_robots.simulator.robot import Limit
from headrace_robots.simulator.robot.body import Fault
from headrace_robots.simulator.robot.setup import read_setup
from headrace_robots.simulator.robot.station import ACTING, IDLE, RESET, STOPPED, Clocks, Station
from headrace_simulator.backends.base import BackendError
from pydantic import ValidationError
from robot_arm import Arm, Events, Leader, arm_setup

WAIT_S = 30.0


def row(lift, turn=0.0):
    return np.array([lift, turn], np.float32)


def until(condition, what):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.005)


@pytest.fixture
def stations(tmp_path):
    """Starts stations of the setup with these changes."""
    started = []

    def start(clocks=None, **changes):
        station = Station(arm_setup(**changes), tmp_path / "stop", clocks)
        station.start()
        started.append(station)
        return station

    yield start
    for station in started:
        station.close()
        assert not station.setup.robot.is_connected


class Waiting:
    """What a reset comes to, in a thread."""

    def __init__(self, station, owner):
        self.found = None
        self._thread = threading.Thread(target=self._ask, args=(station, owner))
        self._thread.start()

    def _ask(self, station, owner):
        try:
            self.found = station.reset(owner, 1)
        except Fault as fault:
            self.found = fault

    def result(self):
        self._thread.join(WAIT_S)
        return self.found


def test_an_episode_acts_at_the_rate_and_ends_as_the_setup_judges(stations):
    station, owner = stations(rate_hz=50), object()
    begun = station.reset(owner, 3)
    np.testing.assert_allclose(begun.observation["state"], [0, 0])
    began = time.monotonic()
    found = [station.act(owner, row(lift)) for lift in (0.2, 0.4, 0.6, 0.8, 1.0)]
    assert time.monotonic() - began > 4 / 50
    assert [round(each.verdict.reward, 2) for each in found] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert found[-1].verdict.success and found[-1].verdict.ended and station.state == IDLE
    with pytest.raises(Fault, match="the episode has ended"):
        station.act(owner, row(0))


def test_a_reset_shows_what_it_has_led_to(stations):
    robot = Arm()
    station = stations(robot=robot, on_reset=lambda seed: robot.position.update({"turn.pos": seed / 10}))
    for seed in (3, 4):
        assert station.reset(station, seed).observation["state"][1] == pytest.approx(seed / 10)


def test_without_actions_the_robot_holds_and_then_the_episode_fails(stations):
    station, owner = stations(silence_s=0.5), object()
    station.reset(owner, 0)
    station.act(owner, row(0.1))
    sent = station.setup.robot.sent
    before = len(sent)
    until(lambda: len(sent) > before + 3, "the watchdog's hold")
    assert all(each["lift.pos"] == pytest.approx(0.1) for each in sent[before:])
    until(lambda: station.state == IDLE, "the end of the episode")
    with pytest.raises(Fault, match=r"no action came for .* \(silence_s 0\.5\): the link is lost"):
        station.act(owner, row(0.2))
    assert station.setup.robot.position["lift.pos"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (row(0, 1.5), r"limits\.turn\.pos: 1\.5 is outside of -1 to 1; lower the policy's bounds"),
        (
            row(0.9),
            r"limits\.lift\.pos\.speed: 0\.9 after 0 is 90 a second, above 20; raise it, set slow_down",
        ),
        (row(np.nan), r"limits\.lift\.pos: nan is outside"),
        (
            row(0.1, -0.9),
            r"workspace: it would hit the table; the action was lift\.pos 0\.1, turn\.pos -0\.9",
        ),
    ],
)
def test_an_action_outside_of_the_limits_moves_nothing_and_names_the_key(stations, action, words):
    def table(seen, given):
        return "it would hit the table" if given["turn.pos"] < -0.5 else None

    station, owner = stations(workspace=table), object()
    station.reset(owner, 0)
    with pytest.raises(Fault, match=words):
        station.act(owner, action)
    assert station.setup.robot.position == {"lift.pos": 0.0, "turn.pos": 0.0}
    station.reset(owner, 0)
    assert station.act(owner, row(0.1)).verdict.reward == pytest.approx(0.1)


def test_an_action_that_is_too_fast_can_be_slowed_down(stations):
    station, owner = stations(slow_down=True), object()
    station.reset(owner, 0)
    assert station.act(owner, row(0.9)).verdict.reward == pytest.approx(0.2)


@pytest.mark.parametrize("way", ["file", "call"])
def test_a_stop_holds_until_a_person_clears_it_and_then_one_confirms(stations, way):
    station, owner = stations(), object()
    station.reset(owner, 0)
    station.act(owner, row(0.2))
    station.stop_file.write_text("by hand") if way == "file" else station.stop("ada")
    until(lambda: station.state == STOPPED, "the stop")
    held = len(station.setup.robot.sent)
    for _ in range(2):
        with pytest.raises(Fault, match="emergency stop is on; a person on its host clears it"):
            station.act(owner, row(0.4))
    waiting = Waiting(station, owner)
    station.say("confirmed")  # nobody begins an episode of a robot that is stopped
    time.sleep(0.1)
    assert waiting.found is None and len(station.setup.robot.sent) == held
    station.clear()
    until(lambda: station.state == RESET, "the reset")
    assert waiting.found is None, "after a stop a person confirms, whatever the setup says"
    station.say("confirmed")
    assert waiting.result().observation["state"].shape == (2,)


def test_a_stop_calls_what_the_setup_says_and_outlives_the_process(stations, tmp_path):
    called = threading.Event()
    station = stations(on_stop=called.set)
    station.stop("ada")
    assert called.wait(WAIT_S)
    again = stations()
    until(lambda: again.state == STOPPED, "the stop of the process before")


def test_a_person_confirms_resets_and_the_robot_moves_home_within_its_speed(stations):
    station, owner = stations(confirm_reset=True, home={"lift.pos": 0.5, "turn.pos": 0.0}), object()
    waiting = Waiting(station, owner)
    until(lambda: station.setup.robot.position["lift.pos"] == pytest.approx(0.5), "the way home")
    steps = np.diff([each["lift.pos"] for each in station.setup.robot.sent])
    assert steps.max() <= 0.2 + 1e-9 and waiting.found is None
    station.say("confirmed", "grace")
    assert waiting.result().observation["state"][0] == pytest.approx(0.5)
    assert station.operator == "grace"


def test_what_a_person_does_is_told_with_the_author_and_within_the_limits(stations):
    leader = Leader()
    station, owner = stations(teleoperator=leader, operator="ada"), object()
    station.reset(owner, 0)
    assert station.act(owner, row(0.1)).done_A is None
    leader.events[Events.IS_INTERVENTION] = True
    until(lambda: station.setup.robot.position["lift.pos"] > 0.2, "the person's control")
    leader.goal["lift.pos"] = 5.0
    found = station.act(owner, row(-0.1))
    assert found.author == "ada"
    # Since the policy's last action the person may have moved for some ticks, each within the speed and the limit.
    assert 0.1 < found.done_A[0] <= 1.0 and found.verdict.reward == pytest.approx(found.done_A[0], abs=1e-6)
    leader.events[Events.IS_INTERVENTION] = False
    leader.events[Events.SUCCESS] = True
    try:
        last = station.act(owner, row(0.8))
        assert last.verdict.success and last.verdict.ended
    except Fault as fault:  # the person's arm had come to the goal by itself
        assert "ended" in str(fault)


def test_an_episode_that_the_person_wants_again_fails(stations):
    station, owner = stations(), object()
    station.reset(owner, 0)
    station.say("again", "ada")
    with pytest.raises(Fault, match="ada asked for the episode again"):
        station.act(owner, row(0.1))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (float("nan"), r"observation 'lift\.pos' is nan; look at the sensor"),
        (RuntimeError("bus timeout"), "the robot's code raised RuntimeError.*bus timeout"),
    ],
)
def test_a_robot_that_shows_no_numbers_is_named_and_held_where_it_was(stations, broken, words):
    station, owner = stations(), object()
    station.reset(owner, 0)
    station.act(owner, row(0.1))
    station.setup.robot.broken = broken
    until(lambda: station.state == IDLE, "the end of the episode")
    with pytest.raises(Fault, match=words):
        station.act(owner, row(0.2))
    assert station.setup.robot.sent[-1]["lift.pos"] == pytest.approx(0.1)
    waiting = Waiting(station, owner)
    time.sleep(0.05)
    assert waiting.found is None, "no episode begins with it"
    station.setup.robot.broken = None
    assert waiting.result().observation["state"][0] == pytest.approx(0.1)


@pytest.mark.parametrize("clock", ["wall", "ticks"])
def test_a_clock_that_leaps_ends_the_episode(stations, clock):
    leapt = threading.Event()

    def wall():
        return time.time() + (3600 if clock == "wall" and leapt.is_set() else 0)

    def monotonic():
        return time.monotonic() + (3600 if clock == "ticks" and leapt.is_set() else 0)

    station, owner = stations(Clocks(monotonic, wall), leap_s=600, silence_s=7200), object()
    station.reset(owner, 0)
    leapt.set()
    until(lambda: station.state != ACTING, "the end of the episode")
    with pytest.raises(Fault, match=r"clock: .* by -?3600\.0 s \(leap_s 600\)"):
        station.act(owner, row(0.1))
    station.reset(owner, 0)
    station.act(owner, row(0.1))


def test_the_episodes_of_two_callers_come_one_after_the_other(stations):
    station, first, second = stations(silence_s=0.5), object(), object()
    station.reset(first, 0)
    station.act(first, row(0.1))
    other = Waiting(station, second)
    station.act(first, row(0.2))
    assert other.found is None
    station.leave(first)
    assert other.result().observation["state"][0] == pytest.approx(0.2)
    with pytest.raises(Fault):
        station.act(first, row(0.3))
    station.act(second, row(0.3))
    third = Waiting(station, first)  # whose turn comes when the second has been silent
    assert third.result().observation["state"][0] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"limits": {"lift.pos": Limit(low=-1, high=1)}},
            "limits: 'turn.pos' of the robot's action_features has none",
        ),
        ({"robot": object()}, "object has no observation_features, which LeRobot's interface of a Robot has"),
        ({"teleoperator": object()}, "LeRobot's interface of a Teleoperator"),
        ({"home": {"lift.pos": 3.0, "turn.pos": 0.0}}, r"home: lift\.pos 3 is outside of limits\.lift\.pos"),
        ({"watchdog_s": 90.0}, "watchdog_s: the robot holds before its episode fails"),
        ({"rate": 3}, "rate"),
    ],
)
def test_a_setup_that_is_wrong_says_which_key(changes, words):
    with pytest.raises(ValidationError, match=words):
        arm_setup(**changes)
    with pytest.raises(ValidationError, match="low 1 is not below high -1"):
        Limit(low=1, high=-1)


def test_a_robot_that_does_not_show_what_holds_it_needs_the_action():
    class Torques(Arm):
        @property
        def observation_features(self):
            return {"angle": float}

    with pytest.raises(ValidationError, match=r"hold: the robot shows no 'lift\.pos'"):
        arm_setup(robot=Torques())


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("not_a_setup", "not_a_setup returned a Arm; return a RobotSetup"),
        ("without_a_limit", r"limits: 'turn\.pos' of the robot's action_features has none"),
        ("nothing", "there is no function 'nothing'"),
    ],
)
def test_a_robot_file_that_is_wrong_is_named(place, words):
    file = Path(__file__).with_name("robot_arm.py")
    with pytest.raises(BackendError, match=words) as refused:
        read_setup(f"{file}:{place}")
    assert refused.value.field == "HEADRACE_SIMULATOR_ROBOT"


def test_an_arm_that_rests_outside_of_its_limits_moves_home_at_their_speeds(stations):
    arm = Arm()
    arm.position["lift.pos"] = -1.5
    station, owner = stations(robot=arm, home={"lift.pos": 0.0, "turn.pos": 0.0}), object()
    station.reset(owner, 1)
    heights = [-1.5, *(each["lift.pos"] for each in arm.sent)]
    assert max(abs(after - before) for before, after in pairwise(heights)) < 20 / 100 + 1e-6
    assert heights[-1] == 0


def test_the_next_action_follows_what_a_robot_has_made_of_the_last(stations):
    class Careful(Arm):
        def send_action(self, action):
            """No more than 0.1 at once, as LeRobot's max_relative_target has it; it says what it sent on."""
            return super().send_action(
                {
                    name: min(max(value, self.position[name] - 0.1), self.position[name] + 0.1)
                    for name, value in action.items()
                }
            )

    arm = Careful()
    station, owner = stations(robot=arm, slow_down=True), object()
    station.reset(owner, 1)
    for _ in range(4):
        station.act(owner, row(0.5))
    assert [round(each["lift.pos"], 3) for each in arm.sent[:4]] == [0.1, 0.2, 0.3, 0.4]
    with pytest.raises(Fault, match=r"lift.pos.speed: -0.4 after 0\.4"):
        station.setup.slow_down = False
        station.act(owner, row(-0.4))


def test_a_device_without_calibration_is_refused_as_nobody_can_be_asked(tmp_path):
    class Fresh(Arm):
        id = "follower"
        is_calibrated = False

        def connect(self, calibrate=True):
            assert not calibrate, "LeRobot would wait for a person at a terminal"
            super().connect()

    arm = Fresh()
    with pytest.raises(BackendError, match=r"follower has no calibration.* lerobot-calibrate"):
        Station(arm_setup(robot=arm), tmp_path / "stop").start()
    assert not arm.is_connected
