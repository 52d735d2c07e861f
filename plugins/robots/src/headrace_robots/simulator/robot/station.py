"""The loop that holds a robot: at a fixed rate it looks, then acts, holds or does what a person does.

Who asks for an action waits for what it led to. Nothing that is asked from outside ends a stop, begins an episode that
no person has confirmed, or moves the robot beyond its limits. Knows no wire.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from headrace_servicekit.causes import raised
from headrace_simulator.backends.base import BackendError, Observation

from headrace_robots.simulator.robot.body import Body, Fault
from headrace_robots.simulator.robot.setup import RobotSetup, Verdict

IDLE, RESET, ACTING, STOPPED = "idle", "waits for a reset", "acts", "stopped"
_NEAR = 1e-6
_ROOM = 0.25
"""Of a period: how long a tick waits for the next action of a chunk."""
_LOOK_S = 0.5
"""How often one that waits looks whether its caller is still there."""


NOTHING = Verdict()


@dataclass(frozen=True)
class Seen:
    """What an action, or a reset, led to. `done_A` is what a person, `author`, did in place of the action."""

    observation: Observation
    verdict: Verdict = NOTHING
    done_A: np.ndarray | None = None
    author: str = ""


@dataclass
class _Asked:
    """An action, or a reset (without one), that `owner` waits for."""

    owner: object
    action: dict[str, float] | None = None
    seed: int | None = None
    sent: bool = False
    done_A: np.ndarray | None = None
    author: str = ""
    answer: Seen | Fault | None = None


@dataclass
class Marks:
    """What the operator has said since it was last looked at."""

    confirmed: bool = False
    success: bool = False
    failure: bool = False
    again: bool = False


@dataclass
class Clocks:
    """The time that ticks follow, and the one that people read."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


def _connect(key: str, device: Any) -> None:
    """Connects without a calibration, for which LeRobot's classes ask a person at a terminal that is not there."""
    device.connect(calibrate=False)
    if not getattr(device, "is_calibrated", True):
        name = getattr(device, "id", None) or type(device).__name__
        device.disconnect()
        raise BackendError(
            key,
            f"{name} has no calibration, or its motors hold another one; run lerobot-calibrate for it at a terminal "
            "of this host, with the same port and id",
        )


class Station:
    """One robot. `start` connects to it and begins the loop; `close` holds, ends it and disconnects."""

    def __init__(self, setup: RobotSetup, stop_file: Path, clocks: Clocks | None = None) -> None:
        self.setup, self.body, self.stop_file = setup, Body(setup), stop_file
        self.operator, self.state, self.why = setup.operator, IDLE, ""
        self.taken_over = False
        """Whether the operator acts with the teleoperator, as said on the page."""
        self._clocks, self._marks = clocks or Clocks(), Marks()
        self._changed = threading.Condition()
        self._resets: list[_Asked] = []
        self._asked: _Asked | None = None
        """The action that the episode's owner waits for; in RESET the reset."""
        self._owner: object = None
        self._seen: Mapping[str, Any] = {}
        """What the robot showed last that was whole and finite."""
        self._before: dict[str, float] | None = None
        """The last action that was sent, or where the robot stood."""
        self._holding: dict[str, float] | None = None
        self._acted_at = 0.0
        self._offset: float | None = None
        self._must_confirm = self._stop_in_memory = self._closed = False
        self._loop = threading.Thread(target=self._run, name="robot", daemon=True)

    def start(self) -> None:
        """Raises BackendError for a device without calibration, and what its connect raises."""
        _connect("robot", self.setup.robot)
        if self.setup.teleoperator is not None:
            _connect("teleoperator", self.setup.teleoperator)
        self._loop.start()

    def close(self) -> None:
        """Ends the loop after one more hold."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._loop.is_alive():
            self._loop.join()
        for each in (self.setup.teleoperator, self.setup.robot):
            if each is not None:
                each.disconnect()

    # What the coordinator's side asks

    def reset(self, owner: object, seed: int | None, gone: Callable[[], bool] = lambda: False) -> Seen:
        """Begins an episode of `owner` once a person has confirmed it; waits for the end of another's. Raises Fault."""
        asked = _Asked(owner, seed=seed)
        with self._changed:
            self._resets.append(asked)
        return self._wait(asked, gone)

    def act(self, owner: object, row_A: np.ndarray, gone: Callable[[], bool] = lambda: False) -> Seen:
        """Acts for one period. Raises Fault where the episode is over, or the action may not be done."""
        asked = _Asked(owner, self.body.action(row_A))
        with self._changed:
            if self.state != ACTING or self._owner is not owner:
                raise Fault(self.why or "no episode of this pool goes on; reset first")
            self._asked = asked
            self._changed.notify_all()
        return self._wait(asked, gone)

    def leave(self, owner: object) -> None:
        """Ends what an owner has asked for, and its episode."""
        with self._changed:
            self._resets = [each for each in self._resets if each.owner is not owner]
            if self._owner is owner and self.state in (ACTING, RESET):
                self.state, self.why = IDLE, "the simulator's process that acted has gone"
                self._asked = self._holding = None

    def _wait(self, asked: _Asked, gone: Callable[[], bool]) -> Seen:
        with self._changed:
            while asked.answer is None and not self._closed:
                if not self._changed.wait(_LOOK_S) and gone():
                    raise Fault("nobody waits for it any more")
        if isinstance(asked.answer, Seen):
            return asked.answer
        raise asked.answer or Fault("the robot's process ends")

    # What people say, on the robot's host

    def stop(self, why: str) -> None:
        """Stops the robot, until the file is removed."""
        try:
            self.stop_file.parent.mkdir(parents=True, exist_ok=True)
            self.stop_file.write_text(f"{why}\n")
        except OSError as error:  # a full disk keeps nobody from stopping
            self._stop_in_memory = True
            sys.stderr.write(f"robot: the stop is kept in memory alone: {error}\n")

    def clear(self) -> None:
        """Ends a stop. The next episode begins when a person confirms it, whatever the setup says."""
        self._stop_in_memory = False
        self.stop_file.unlink(missing_ok=True)

    def say(self, mark: str, operator: str = "") -> None:
        """Takes a mark of the operator's, by its name in `Marks`."""
        with self._changed:
            self.operator = operator or self.operator
            if mark != "confirmed" or self.state == RESET:  # of a reset that is asked for
                setattr(self._marks, mark, True)

    # The loop

    def _run(self) -> None:
        period, clocks = 1 / self.setup.rate_hz, self._clocks
        due = clocks.monotonic()
        while not self._closed:
            now = clocks.monotonic()
            try:
                self._tick(now, now - due)
            except Fault as fault:
                self._end(fault)
            except Exception as error:  # noqa: BLE001 - the robot's own code: whatever it is, the robot holds
                self._end(Fault(f"the robot's code raised {raised(error)}"))
            due = (now if now - due > period else due) + period
            clocks.sleep(max(0.0, due - clocks.monotonic()))
        if self.state != IDLE or self._holding is not None:
            self._hold_anyway()

    def _tick(self, now: float, late: float) -> None:
        self._look_at_stop()
        self._look_at_clocks(now, late)
        seen = self.setup.robot.get_observation()
        observation = self.body.arrays(seen)
        self._seen = seen
        if self.state == STOPPED:
            return
        events = self._events()
        self._answer(observation)
        if self._take_up():
            return  # what is seen now is of before it
        if self.state == RESET:
            self._prepare(observation, now)
        elif self.state != ACTING:
            if self._holding is not None:
                self._hold()
        elif self.taken_over or events.get("is_intervention", False):
            self._follow(now)
        elif (asked := self._next()) is not None and asked.action is not None:
            self._do(asked, asked.action, now)
        else:
            self._pause(now)

    def _take_up(self) -> bool:
        """Begins the next reset, if any: the owner's own at once, another's when no episode goes on."""
        with self._changed:
            for asked in self._resets:
                if self.state == IDLE or (self.state == ACTING and asked.owner is self._owner):
                    self._resets.remove(asked)
                    self.state, self.why, self._marks = RESET, "", Marks()
                    self._asked, self._owner = asked, asked.owner
                    self._before = self._holding = None
                    break
            else:
                return False
        if self.setup.on_reset is not None:
            self.setup.on_reset(asked.seed)
        return True

    def _prepare(self, observation: Observation, now: float) -> None:
        """Moves the robot home, then waits for a person."""
        if (home := self.setup.home) is not None:
            before = self._before or self.body.holding(self._seen)
            self._send(self.body.slowed(home, before))
            if any(abs(self._before[name] - home[name]) > _NEAR for name in self.body.names):  # type: ignore[index]
                return
        if (self.setup.confirm_reset or self._must_confirm) and not self._marks.confirmed:
            return
        self._marks, self._must_confirm = Marks(), False
        self.state, self._acted_at, self._holding = ACTING, now, None
        self._settle(Seen(observation))

    def _next(self) -> _Asked | None:
        """The action that is asked for; of a chunk the next one comes a moment after the one before was answered."""
        with self._changed:
            if self._asked is None:
                self._changed.wait(_ROOM / self.setup.rate_hz)
            return self._asked

    def _do(self, asked: _Asked, action: dict[str, float], now: float) -> None:
        before = self._before or self.body.holding(self._seen)
        if self.setup.slow_down:
            action = self.body.slowed(action, before)
        self.body.check(action, before, self._seen)
        self._send(action)
        asked.sent, self._acted_at = True, now

    def _follow(self, now: float) -> None:
        """Does what a person does, as far as the limits let them."""
        given = self.setup.teleoperator.get_action()
        own = {name: float(given[name]) for name in self.body.names}
        if not np.isfinite(list(own.values())).all():
            raise Fault(f"teleoperator: it gives {own}, which is not all finite; look at the device")
        before = self._before or self.body.holding(self._seen)
        own = self.body.slowed(self.body.within(own), before)
        if self.setup.workspace is not None and self.setup.workspace(self._seen, own):
            own = self.body.holding(self._seen)
        self._send(own)
        self._acted_at = now
        if (asked := self._next()) is not None:
            asked.sent, asked.done_A, asked.author = True, self.body.row(own), self.operator

    def _pause(self, now: float) -> None:
        """No action has come: the robot holds, and after a while the episode fails."""
        silent = now - self._acted_at
        if silent > self.setup.silence_s:
            raise Fault(
                f"no action came for {silent:.1f} s (silence_s {self.setup.silence_s:g}): the link is lost, or the "
                "policy too slow; the robot holds"
            )
        if silent > self.setup.watchdog_s:
            self._hold()

    def _send(self, action: dict[str, float]) -> None:
        """Sends an action; a robot that reduced it (LeRobot's max_relative_target) returns what it sent on."""
        self._before, self._holding = {**action, **(self.setup.robot.send_action(action) or {})}, None

    def _hold(self) -> None:
        if self._holding is None:
            self._holding = self.body.holding(self._seen)
        self.setup.robot.send_action(self._holding)
        self._before = self._holding

    def _hold_anyway(self) -> None:
        try:
            self._hold()
        except Exception as error:  # noqa: BLE001 - nothing more can be done for it
            sys.stderr.write(f"robot: it cannot be held: {raised(error)}\n")

    def _answer(self, observation: Observation) -> None:
        """What the action of the tick before led to."""
        asked = self._asked
        if self.state != ACTING or asked is None or not asked.sent:
            return
        marks, self._marks = self._marks, Marks()
        if marks.again:
            raise Fault(f"{self.operator} asked for the episode again")
        verdict = self.setup.judge(self._seen, self._before or {}) if self.setup.judge else None
        verdict = verdict or Verdict()
        if marks.success or marks.failure:
            reward = verdict.reward if self.setup.judge else float(marks.success)
            verdict = Verdict(reward, marks.success, True)
        if not np.isfinite(verdict.reward):
            raise Fault(f"judge: a reward of {verdict.reward}; give a number")
        if verdict.ended:
            self.state, self.why = IDLE, "the episode has ended"
            self._holding = self.body.holding(self._seen)
        self._settle(Seen(observation, verdict, asked.done_A, asked.author))

    def _settle(self, answer: Seen | Fault) -> None:
        with self._changed:
            if self._asked is not None:
                self._asked.answer, self._asked = answer, None
                self._changed.notify_all()

    def _end(self, fault: Fault) -> None:
        """An episode that goes on is over, and the robot holds; a reset goes on waiting, and says what is wrong."""
        if self.why != str(fault):
            sys.stderr.write(f"robot: {fault}\n")
        self.why = str(fault)
        if self.state == ACTING:
            self.state = IDLE
            self._settle(fault)
            self._hold_anyway()

    # What is looked at in each tick

    def _look_at_stop(self) -> None:
        stopped = self._stop_in_memory or self.stop_file.exists()
        if stopped and self.state != STOPPED:
            before, self.state = self.state, STOPPED
            self.why = "the robot's emergency stop is on; a person on its host clears it"
            self._must_confirm = True
            try:
                self.setup.on_stop() if self.setup.on_stop is not None else self._hold_anyway()
            finally:
                if before == RESET and self._asked is not None:
                    self._resets.insert(0, self._asked)
                    self._asked = None
                self._settle(Fault(self.why))
        elif not stopped and self.state == STOPPED:
            self.state, self.why, self._holding = IDLE, "the stop was cleared", None

    def _look_at_clocks(self, now: float, late: float) -> None:
        offset, before = self._clocks.wall() - now, self._offset
        self._offset, leap_s = offset, self.setup.leap_s
        if self.state != ACTING or before is None:
            return
        if abs(offset - before) > leap_s:
            raise Fault(
                f"clock: the host's clock leapt by {offset - before:.1f} s (leap_s {leap_s:g}); set it while no "
                "episode goes on"
            )
        if late > leap_s:
            raise Fault(
                f"clock: a tick came {late:.1f} s late (leap_s {leap_s:g}); the host was suspended, or the robot's "
                "code takes too long for rate_hz"
            )

    def _events(self) -> Mapping[str, bool]:
        """LeRobot's events of a teleoperator by their names, of one that has any."""
        ask = getattr(self.setup.teleoperator, "get_teleop_events", None)
        if ask is None:
            return {}
        events = {str(getattr(key, "value", key)): bool(value) for key, value in ask().items()}
        marks = self._marks
        marks.success |= events.get("success", False)
        marks.failure |= events.get("failure", False) or events.get("terminate_episode", False)
        marks.again |= events.get("rerecord_episode", False)
        return events
