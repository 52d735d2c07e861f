"""Variants of an environment, drawn anew for each episode: to train on many, or to judge beyond what was trained on.

What acts on observations and actions works on every environment; the rest are *knobs*, which an environment has or has
not. Everything follows from the seed of a reset. Knows no backend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from headrace_servicekit.problems import nearest
from headrace_servicekit.registry import Options
from headrace_servicekit.rpc.episodes import is_image
from pydantic import Field

from headrace_simulator.backends.base import (
    Backend,
    BackendError,
    Knob,
    Observation,
    SimulatedEnvironment,
    Transition,
)
from headrace_simulator.backends.options import parse
from headrace_simulator.spaces import ArraySpace

KEY = "variant"
_STREAM = 0x76617279
"""Beside a reset's seed: a variant draws nothing that the environment draws."""
_LONGEST = 100
Span = float | Annotated[list[float], Field(min_length=2, max_length=2)]
"""A value, or the least and the most of one that is drawn uniformly for each episode."""


class Semantics(Options):
    """What the task is said to be."""

    instruction: str = Field(default="", description="words in place of the task's own")
    perturbation: str = Field(
        default="", description="other objects, places or words, by a name that the simulator gives to them"
    )


class Variant(Options):
    """What differs from the environment as it is."""

    vision: dict[str, Span] = Field(default={}, description="noise, brightness, and knobs of the environment")
    semantic: Semantics = Semantics()
    execution: dict[str, Span] = Field(
        default={},
        description="action_noise, action_delay, observation_noise, random_start, and knobs of the environment",
    )

    @property
    def spans(self) -> dict[str, tuple[float, float]]:
        """Least and most by name, "execution.gravity", sorted."""
        parts = {"execution": self.execution, "vision": self.vision}
        found = {f"{part}.{name}": span for part, named in parts.items() for name, span in named.items()}
        return {name: _ends(span) for name, span in sorted(found.items())}


class _Asked(Options):
    variant: Variant = Variant()


_LIMITS = {
    "vision.noise": (0.0, 1.0),
    "vision.brightness": (0.0, 10.0),
    "execution.action_noise": (0.0, 10.0),
    "execution.action_delay": (0, _LONGEST),
    "execution.observation_noise": (0.0, np.inf),
    "execution.random_start": (0, _LONGEST),
}
"""What works on every environment, and the values that it takes."""


def split(options: Mapping[str, Any], backend: Backend, name: str) -> tuple[Variant, dict[str, Any]]:
    """The variant among an environment's options, and those that make the environment for it.

    Raises BackendError for a variant that is wrong, and for a perturbation that the environment does not have.
    """
    others = {key: value for key, value in options.items() if key != KEY}
    asked = {KEY: options[KEY]} if KEY in options else {}
    variant = parse(_Asked, asked).variant
    wanted = variant.semantic.perturbation
    return variant, {**others, **_perturbed(backend, name, wanted)} if wanted else others


def _perturbed(backend: Backend, name: str, wanted: str) -> Mapping[str, Any]:
    known: Callable[[str], Mapping[str, Mapping[str, Any]]] = getattr(backend, "perturbations", lambda _: {})
    have = known(name)
    if wanted not in have:
        has = f"it has: {_list(have)}" if have else "it has none"
        reason = f"{name} has no perturbation {wanted!r}{_hint(wanted, have)}; {has}"
        raise _refused("semantic.perturbation", reason)
    return have[wanted]


def varied(environment: SimulatedEnvironment, variant: Variant) -> SimulatedEnvironment:
    """The environment in this variant. Raises BackendError where it cannot have one."""
    if variant == Variant():
        return environment
    knobs: Mapping[str, Knob] = getattr(environment, "knobs", {})
    for name, span in variant.spans.items():
        _check(environment, knobs, name, span)
    if variant.semantic.instruction and not environment.instruction:
        raise _refused("semantic.instruction", "the task says nothing in words; leave it out")
    return VariedEnvironment(environment, variant, knobs)


class VariedEnvironment:
    """An environment in a variant."""

    def __init__(
        self, environment: SimulatedEnvironment, variant: Variant, knobs: Mapping[str, Knob]
    ) -> None:
        self.inner, self._spans, self._knobs = environment, variant.spans, knobs
        self.action_space, self.init_state_count = environment.action_space, environment.init_state_count
        self.instruction = variant.semantic.instruction or environment.instruction
        self.versions = getattr(environment, "versions", {})
        noisy = "execution.observation_noise" in self._spans
        self.observation_spaces = [
            replace(space, low=None, high=None) if noisy and space.dtype.kind == "f" else space
            for space in environment.observation_spaces
        ]
        self._random = np.random.default_rng(_STREAM)
        self._values: dict[str, float] = {}
        self._waiting: deque[np.ndarray] = deque()
        self._pictures: dict[str, np.ndarray] = {}

    def reset(
        self, seed: int | None, options: Mapping[str, Any], init_state: int | None
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Starts an episode in the variant that the seed, or the stream it began, gives; info has the values."""
        if seed is not None:
            self._random = np.random.default_rng([_STREAM, seed & (1 << 64) - 1])
        self._values = {name: float(self._random.uniform(*span)) for name, span in self._spans.items()}
        for name in self._values.keys() & self._knobs.keys():
            self._knobs[name](self._values[name])
        observation, info = self.inner.reset(seed, options, init_state)
        for _ in range(self._whole("execution.random_start")):
            step = self.inner.step(self._any_action())
            observation = step.observation
            if step.terminated or step.truncated:  # as it began, then
                observation, info = self.inner.reset(seed, options, init_state)
                break
        still = np.clip(np.zeros(self.action_space.shape), self.action_space.low, self.action_space.high)
        self._waiting = deque([still.astype(self.action_space.dtype)] * self._whole("execution.action_delay"))
        self._pictures = {
            space.name: self._random.integers(0, 256, space.shape).astype(np.float32)
            for space in self.observation_spaces
            if is_image(space.dtype, space.shape) and "vision.noise" in self._values
        }
        return self._seen(observation), {**info, **self._values}

    def step(self, action: np.ndarray) -> Transition:
        """Acts once."""
        return self.shown(self.inner.step(self.given(action)))

    def given(self, action: np.ndarray) -> np.ndarray:
        """What the environment gets now, where it is stepped by others than this."""
        self._waiting.append(self._disturbed(action))
        return self._waiting.popleft()

    def shown(self, transition: Transition) -> Transition:
        """What is seen of a step."""
        return replace(transition, observation=self._seen(transition.observation))

    def render(self) -> np.ndarray:
        """A picture."""
        return self.inner.render()

    def close(self) -> None:
        """Frees what it holds."""
        self.inner.close()

    def _whole(self, name: str) -> int:
        return round(self._values.get(name, 0.0))

    def _any_action(self) -> np.ndarray:
        space = self.action_space
        drawn = self._random.uniform(*_bounds(space))
        if space.categories:
            first = 0 if space.low is None else space.low
            category = first + np.floor(self._random.random(space.shape) * space.counts)
            drawn = np.where(space.counts > 0, category, drawn)
        return np.asarray(drawn).astype(space.dtype)

    def _disturbed(self, action: np.ndarray) -> np.ndarray:
        deviation = self._values.get("execution.action_noise", 0.0)
        if not deviation:
            return action
        low, high = _bounds(self.action_space)
        noisy: np.ndarray = action + self._random.normal(0.0, deviation, action.shape) * (high - low) / 2
        kept: np.ndarray = np.clip(noisy, low, high).astype(action.dtype)
        return kept

    def _seen(self, observation: Observation) -> dict[str, np.ndarray]:
        deviation = self._values.get("execution.observation_noise", 0.0)
        found = dict(observation)
        for space in self.observation_spaces:
            array = found[space.name]
            if is_image(space.dtype, space.shape):
                found[space.name] = self._shown(space.name, array)
            elif deviation and space.dtype.kind == "f":
                found[space.name] = array + self._random.normal(0.0, deviation, array.shape).astype(
                    array.dtype
                )
        return found

    def _shown(self, name: str, image: np.ndarray) -> np.ndarray:
        opacity, brightness = (
            self._values.get("vision.noise", 0.0),
            self._values.get("vision.brightness", 1.0),
        )
        if not opacity and brightness == 1.0:
            return image
        shown: np.ndarray = image.astype(np.float32) * brightness
        if opacity:
            shown = (1 - opacity) * shown + opacity * self._pictures[name]
        pixels: np.ndarray = np.clip(np.rint(shown), 0, 255).astype(np.uint8)
        return pixels


def _check(
    environment: SimulatedEnvironment, knobs: Mapping[str, Knob], name: str, span: tuple[float, float]
) -> None:
    least, most = span
    if least > most:
        raise _refused(name, f"{least:g} to {most:g} holds no value; write the least first")
    if name in knobs:
        return
    if name not in _LIMITS:
        have = [*_LIMITS, *knobs]
        raise _refused(
            name, f"this environment has no such variant{_hint(name, have)}; it has: {_list(have)}"
        )
    if name == "execution.random_start" and not getattr(environment, "steps_alone", True):
        raise _refused(name, "an environment that is stepped together with others takes no step alone")
    low, high = _LIMITS[name]
    if not low <= least <= most <= high:
        raise _refused(name, f"is {least:g} to {most:g}; it may be {low:g} to {high:g}")
    images = [each for each in environment.observation_spaces if is_image(each.dtype, each.shape)]
    if name.startswith("vision.") and not images:
        raise _refused(name, "this environment shows no images; ask for them among its options")
    space = environment.action_space
    whole = not space.categories and space.low is not None and space.high is not None
    if name in ("execution.action_noise", "execution.action_delay") and not whole:
        raise _refused(name, "the actions of this environment are not numbers between bounds")
    if name == "execution.random_start" and not (whole or space.categories):
        raise _refused(name, "the actions of this environment have no bounds to draw them from")


def _refused(name: str, why: str) -> BackendError:
    return BackendError(f"options_json.{KEY}.{name}", why)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _hint(name: str, known: Iterable[str]) -> str:
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else ""


def _ends(span: Span) -> tuple[float, float]:
    return (span, span) if isinstance(span, float | int) else (span[0], span[1])


def _bounds(space: ArraySpace) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of a space; those that are not finite count as -1 and 1."""
    low, high = (
        np.full(space.shape, np.nan) if bound is None else np.asarray(bound, np.float64)
        for bound in (space.low, space.high)
    )
    return np.where(np.isfinite(low), low, -1.0), np.where(np.isfinite(high), high, 1.0)
