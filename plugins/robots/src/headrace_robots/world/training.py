"""Trains a world model on real episodes, judges it on held-out ones, and writes it as a new version. Needs torch.

Every member learns from episodes' steps drawn again with replacement (bagging), with a mean squared error of changes
and rewards and a cross entropy of ends: what the members disagree about is what the data did not tell.
Shapes: M members, B steps of a batch, I inputs, O outputs: changes of a state's S numbers, the reward, a logit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from headrace_robots.policies.directory import written_aside
from headrace_robots.world.data import DataProblem, RealEpisode, check_finite, longest, mean_interval
from headrace_robots.world.model import (
    CONFIG,
    FIRST,
    STARTS,
    WEIGHTS,
    Space,
    WorldConfig,
    WorldModel,
    WorldNotReadable,
    described,
    load_config,
    load_world,
    read,
)

MOST_STARTS = 1 << 16
HORIZONS = (10, 50)
"""Actions after which held-out episodes are compared with what the model makes of their actions alone."""
CERTAIN = 0.99
"""Share of held-out steps at which the members disagree less than the threshold, at least."""


@dataclass(frozen=True)
class Training:
    """How to train. `heldout` is the share of episodes that are not learned from, `tolerance` the error of a change at
    which an episode is cut, in standard deviations of the changes.
    """

    members: int = 5
    hidden: int = 128
    steps: int = 4000
    batch: int = 256
    lr: float = 1e-3
    heldout: float = 0.2
    tolerance: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class Real:
    """The real environment."""

    backend: str
    task: str
    observations: tuple[Space, ...]
    action: Space


def train(
    real: Real,
    episodes: list[RealEpisode],
    directory: Path,
    how: Training,
    sources: Mapping[str, int],
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> WorldModel:
    """Writes the model to `directory`, whose next version it is, and returns it. Raises DataProblem.

    `sources` are names and episodes of what was read; `progress` gets the step and its loss now and then.
    """
    check_finite(episodes)
    if len(episodes) < 2:
        raise DataProblem("one episode is held out to judge the model, and there is one in all; collect more")
    order = np.random.default_rng(how.seed).permutation(len(episodes))
    count = min(len(episodes) - 1, max(1, round(how.heldout * len(episodes))))
    held, learned = ([episodes[place] for place in part] for part in (order[:count], order[count:]))
    if not all(any(len(each.states_TS) > 1 for each in part) for part in (held, learned)):
        raise DataProblem(
            "no action of the learned or of the held-out episodes has a known outcome; collect more"
        )
    parts = _fitted(real.action, learned, how, progress)
    starts_NS, first_N = _starts(episodes, how.seed)
    steps = sum(len(each.actions_TA) for each in episodes)
    config = WorldConfig(
        number=_number_after(directory),
        backend=real.backend,
        task=real.task,
        observations=real.observations,
        action=real.action,
        members=how.members,
        hidden=how.hidden,
        terminates=any(each.terminated for each in episodes),
        longest=longest(episodes),
        threshold=1.0,
        data={
            "episodes": len(episodes),
            "heldout_episodes": len(held),
            "steps": steps,
            "training_steps": how.steps,
            "seed": how.seed,
            **{f"episodes of {name}": number for name, number in sources.items()},
        },
        errors={},
    )
    tensors = {name: tensor.numpy() for name, tensor in parts.items()}
    tensors |= {STARTS: starts_NS.astype(np.float32), FIRST: first_N.astype(np.uint8)}
    model = WorldModel(config, tensors, "")
    errors, threshold = judged(model, held, how.tolerance)
    config = config.model_copy(update={"errors": errors, "threshold": threshold})
    with written_aside(directory) as aside:
        (aside / CONFIG).write_text(described(config))
        save_file({name: torch.from_numpy(array) for name, array in tensors.items()}, aside / WEIGHTS)
    return load_world(directory)


def judged(
    model: WorldModel, held: Sequence[RealEpisode], tolerance: float
) -> tuple[dict[str, tuple[float, ...]], float]:
    """Errors on held-out episodes, and the disagreement at which an error of `tolerance` is to be expected.

    That is told by how large errors are beside disagreements on these episodes; CERTAIN of their steps stay below it.
    Of a state as a share of what its numbers vary by (of a change: of what they change by); in each member, of which
    the mean is told.
    """
    spread_S = np.concatenate([each.states_TS for each in held]).std(0) + 1e-8
    change_S = model.change_std
    figures: dict[str, list[float]] = {}
    disagreements, wrongs = list[np.ndarray](), list[np.ndarray]()
    for each in held:
        known = min(len(each.actions_TA), len(each.states_TS) - 1)
        states_TS, actions_TA = each.states_TS[: len(each.actions_TA)], each.actions_TA
        own: dict[str, list[float]] = {}
        for member in range(model.config.members):
            found = model.predict(states_TS.astype(np.float64), actions_TA, np.full(len(states_TS), member))
            if known:
                wrong_TS = found.states_NS[:known] - each.states_TS[1 : known + 1]
                own.setdefault("change", []).append(_rms(wrong_TS / change_S))
                wrongs.append(np.abs(wrong_TS / change_S).max(1))
            own.setdefault("reward", []).append(float(np.abs(found.rewards_N - each.rewards_T).mean()))
            if model.config.terminates:
                ends_T = np.arange(len(actions_TA)) == len(actions_TA) - 1
                right = found.ended_N == (ends_T & each.terminated)
                own.setdefault("ends told wrongly", []).append(float(1 - right.mean()))
            for steps in HORIZONS:
                if known >= steps:
                    wrong_NS = _open_loop(model, each, member, steps) / spread_S
                    own.setdefault(f"state after {steps} actions", []).append(_rms(wrong_NS))
        disagreements.append(found.disagreement_N)
        for name, values in own.items():
            figures.setdefault(name, []).append(float(np.mean(values)))
    told_N = np.concatenate(disagreements)
    expected = _rms(np.concatenate(wrongs)) / max(_rms(told_N), 1e-9)
    threshold = max(float(np.quantile(told_N, CERTAIN)), tolerance / max(expected, 1e-9))
    return {name: mean_interval(values) for name, values in figures.items()}, threshold


def _open_loop(model: WorldModel, real: RealEpisode, member: int, steps: int) -> np.ndarray:
    """(N, S) how far the model is off after so many of an episode's actions, from each N-th of its states on."""
    starts = np.arange(0, min(len(real.actions_TA), len(real.states_TS) - 1) - steps + 1, steps)
    states_NS, members_N = real.states_TS[starts].astype(np.float64), np.full(len(starts), member)
    for step in range(steps):
        states_NS = model.predict(states_NS, real.actions_TA[starts + step], members_N).states_NS
    wrong_NS: np.ndarray = states_NS - real.states_TS[starts + steps]
    return wrong_NS


def _rms(values: np.ndarray) -> float:
    return float(math.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _fitted(
    action: Space, episodes: Sequence[RealEpisode], how: Training, progress: Callable[[int, float], None]
) -> dict[str, Tensor]:
    """The networks' tensors, by the names of `WorldConfig.shapes`."""
    inputs, wanted, known = _rows(action, episodes)
    generator = torch.Generator().manual_seed(how.seed)
    norms = {
        "input_mean": inputs.mean(0),
        "input_std": _width(inputs),
        "output_mean": _mean(wanted[:, :-1], known),
        "output_std": _std(inputs, wanted[:, :-1], known),
    }
    inputs = (inputs - norms["input_mean"]) / norms["input_std"]
    wanted[:, :-1] = (wanted[:, :-1] - norms["output_mean"]) / norms["output_std"]
    layers = _layers(inputs.shape[1], wanted.shape[1], how, generator)
    optimizer = torch.optim.AdamW(layers.values(), lr=how.lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.steps)
    own_MN = torch.randint(len(inputs), (how.members, len(inputs)), generator=generator)
    size = wanted.shape[1] - 2
    for step in range(how.steps):
        drawn_MB = own_MN.gather(1, torch.randint(len(inputs), (how.members, how.batch), generator=generator))
        found_MBO, want_MBO = _forward(layers, inputs[drawn_MB]), wanted[drawn_MB]
        error_MBO = (found_MBO[..., :-1] - want_MBO[..., :-1]).square()
        # What came behind an end is not known; what was earned by it is.
        error_MBO = torch.cat([error_MBO[..., :size] * known[drawn_MB, None], error_MBO[..., size:]], -1)
        ends = functional.binary_cross_entropy_with_logits(found_MBO[..., -1], want_MBO[..., -1])
        loss = error_MBO.mean() + ends
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 500 == 499:
            progress(step + 1, float(loss.detach()))
    if not all(torch.isfinite(tensor).all() for tensor in layers.values()):
        raise DataProblem("the networks are not finite after training; lower --lr")
    return {**norms, **{name: tensor.detach() for name, tensor in layers.items()}}


def _rows(action: Space, episodes: Sequence[RealEpisode]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, what is wanted of the outputs, and whether the changes among it are known, a row an action."""
    inputs, wanted, known = [], [], []
    for each in episodes:
        steps = len(each.actions_TA)
        states_TS = each.states_TS.astype(np.float64)
        behind_TS = (
            states_TS[1 : steps + 1] if not each.terminated else np.vstack([states_TS[1:], states_TS[-1:]])
        )
        ends_T = np.zeros((steps, 1))
        ends_T[-1] = each.terminated
        inputs.append(np.concatenate([states_TS[:steps], read(action, each.actions_TA)], 1))
        wanted.append(np.concatenate([behind_TS - states_TS[:steps], each.rewards_T[:, None], ends_T], 1))
        known.append(np.arange(steps) < len(states_TS) - 1)
    numbers: list[Any] = [np.concatenate(part) for part in (inputs, wanted, known)]
    first, second, third = (torch.from_numpy(part).float() for part in numbers)
    return first, second, third


def _width(rows: Tensor) -> Tensor:
    """Standard deviations; 1 of a number that never differs."""
    found = rows.std(0, correction=0)
    return torch.where(found < 1e-6, torch.ones_like(found), found)


def _mean(wanted: Tensor, known: Tensor) -> Tensor:
    return torch.cat([wanted[known > 0, :-1].mean(0), wanted[:, -1:].mean(0)])


def _std(inputs: Tensor, wanted: Tensor, known: Tensor) -> Tensor:
    """Of changes and rewards. What stays, or moves by rounding alone, has a width at which no error of it counts: with
    1, a goal that never moves would drift.
    """
    size = wanted.shape[1] - 1
    states_NS = inputs[:, :size]
    least_S = torch.maximum(1e-3 * states_NS.std(0, correction=0), 1e-5 * states_NS.abs().amax(0))
    found_S = wanted[known > 0, :size].std(0, correction=0)
    return torch.cat([torch.maximum(found_S, least_S.clamp(min=1e-8)), _width(wanted[:, size:])])


def _layers(inputs: int, outputs: int, how: Training, generator: torch.Generator) -> dict[str, Tensor]:
    sizes, found = (inputs, how.hidden, how.hidden, outputs), dict[str, Tensor]()
    for place in range(3):
        width = 1 / math.sqrt(sizes[place])
        weight = torch.empty(how.members, sizes[place], sizes[place + 1])
        found[f"weight.{place}"] = weight.uniform_(-width, width, generator=generator).requires_grad_()
        found[f"bias.{place}"] = torch.zeros(how.members, 1, sizes[place + 1]).requires_grad_()
    return found


def _forward(layers: Mapping[str, Tensor], rows_MBI: Tensor) -> Tensor:
    """(M, B, O)."""
    found = rows_MBI
    for place in range(3):
        found = torch.baddbmm(layers[f"bias.{place}"], found, layers[f"weight.{place}"])
        if place < 2:
            found = functional.silu(found)
    return found


def _starts(episodes: Sequence[RealEpisode], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(N, S) states from which an action was taken, at most MOST_STARTS, and which of them were an episode's first."""
    states_NS = np.concatenate([each.states_TS[: len(each.actions_TA)] for each in episodes])
    first_N = np.concatenate([np.arange(len(each.actions_TA)) == 0 for each in episodes])
    if len(states_NS) > MOST_STARTS:
        others = np.random.default_rng(seed).permutation(np.flatnonzero(~first_N))
        kept = np.sort(np.concatenate([np.flatnonzero(first_N), others])[:MOST_STARTS])
        states_NS, first_N = states_NS[kept], first_N[kept]
    return states_NS, first_N


def _number_after(directory: Path) -> int:
    """The number of the next version there. Raises DataProblem for a directory of something else."""
    if not directory.exists():
        return 1
    try:
        return load_config(directory).number + 1
    except WorldNotReadable as error:
        raise DataProblem(
            f"{directory} is there, and no world model that a new version could follow ({error})"
        ) from error
