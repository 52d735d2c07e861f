"""A success classifier: a small network that tells by a picture whether a task is done; its training.

A directory has `success.json` and `model.safetensors`. Needs torch; knows no scorer.
Shapes: N frames, H × W pixels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from headrace_schema.sections.base import Count, Section
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from headrace_robots.policies.directory import written_aside

CONFIG, WEIGHTS, FORMAT = "success.json", "model.safetensors", 1


class ClassifierProblem(Exception):
    """A classifier cannot be read or trained; the message says what to change."""


class SuccessConfig(Section):
    """What `success.json` says."""

    format: Count = FORMAT
    camera: str = Field(description="whose pictures it reads")
    pixels: Count = Field(default=64, ge=16, description="height and width that pictures are resized to")
    channels: Count = Field(default=3, description="of a picture")
    data: dict[str, float] = Field(default_factory=dict, description="what it was learned from")
    errors: dict[str, tuple[float, ...]] = Field(
        default_factory=dict, description="on held-out episodes: the share, and its 95% interval"
    )


def new_network(config: SuccessConfig) -> nn.Module:
    """Three convolutions, their mean over the picture's places and a logit, of random weights."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((config.channels, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
    # Where the thing lies matters: a mean over the whole picture would not tell.
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * 16, 1))


def as_read(config: SuccessConfig, frames: Sequence[np.ndarray]) -> Tensor:
    """(N, channels, pixels, pixels) from -1 to 1 of uint8 frames (H, W, channels)."""
    rows = []
    for frame in frames:
        image = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None].float()
        size = (config.pixels, config.pixels)
        rows.append(functional.interpolate(image, size, mode="bilinear", antialias=True))
    return torch.cat(rows) / 127.5 - 1


def probabilities(
    network: nn.Module, config: SuccessConfig, frames: Sequence[np.ndarray], batch: int
) -> list[float]:
    """Of each frame, that it shows a success."""
    found: list[float] = []
    with torch.inference_mode():
        for first in range(0, len(frames), batch):
            rows = as_read(config, frames[first : first + batch])
            logits = network(rows.to(next(network.parameters()).device))
            found += torch.sigmoid(logits[:, 0]).tolist()
    return found


def load_success(directory: Path) -> tuple[SuccessConfig, nn.Module]:
    """Configuration and network, in eval mode. Raises ClassifierProblem."""
    try:
        config = SuccessConfig.model_validate(json.loads((directory / CONFIG).read_text()))
        if config.format != FORMAT:
            raise ValueError(f"its format is {config.format}, and {FORMAT} is read")
        network = new_network(config)
        network.load_state_dict(load_file(directory / WEIGHTS))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = f"{directory} is no success classifier that can be read ({str(error)[:300]})"
        raise ClassifierProblem(f"{reason}; `headrace success train` writes one") from error
    return config, network.eval()


@dataclass(frozen=True)
class Labelled:
    """An episode's pictures, (N, H, W, channels) uint8, and whether each shows a success."""

    frames: np.ndarray
    labels_N: np.ndarray


def train(
    camera: str,
    episodes: Sequence[Labelled],
    directory: Path,
    *,
    steps: int,
    heldout: float,
    seed: int,
    pixels: int,
) -> SuccessConfig:
    """Writes a classifier, judged on episodes that it has not seen; an existing one is replaced.

    Raises ClassifierProblem where there is nothing to tell apart.
    """
    order = np.random.default_rng(seed).permutation(len(episodes))
    count = max(1, round(heldout * len(episodes)))
    held, learned = ([episodes[place] for place in part] for part in (order[:count], order[count:]))
    labels_N = np.concatenate([each.labels_N for each in learned]) if learned else np.zeros(0, np.bool_)
    if not 0 < labels_N.sum() < len(labels_N):
        found = f"{int(labels_N.sum())} of {len(labels_N)} pictures of {len(learned)} episodes show a success"
        raise ClassifierProblem(f"{found}; give episodes with some that do and some that do not")
    config = SuccessConfig(camera=camera, pixels=pixels, channels=episodes[0].frames.shape[-1])
    network = _fitted(config, learned, labels_N, steps, seed)
    told_N = (
        np.array(probabilities(network, config, [frame for each in held for frame in each.frames], 64)) >= 0.5
    )
    right_N = np.concatenate([each.labels_N for each in held])
    errors = {"right": _share(told_N == right_N)}
    for name, wanted in (("successes told as such", True), ("failures told as such", False)):
        if (own_N := right_N == wanted).any():
            errors[name] = _share(told_N[own_N] == wanted)
    data = {
        "episodes": len(episodes),
        "heldout_episodes": count,
        "pictures": sum(len(e.labels_N) for e in episodes),
    }
    config = config.model_copy(update={"errors": errors, "data": data})
    with written_aside(directory) as aside:
        (aside / CONFIG).write_text(config.model_dump_json(indent=2) + "\n")
        save_file({name: each.contiguous() for name, each in network.state_dict().items()}, aside / WEIGHTS)
    return config


def _fitted(
    config: SuccessConfig, episodes: Iterable[Labelled], labels_N: np.ndarray, steps: int, seed: int
) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = new_network(config)
    rows_N = torch.cat([as_read(config, [*each.frames]) for each in episodes])
    wanted_N = torch.from_numpy(labels_N).float()
    # Both kinds are drawn as often: few pictures of an episode show its success.
    weights_N = torch.where(wanted_N > 0, 1 / wanted_N.sum(), 1 / (1 - wanted_N).sum())
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for _ in range(steps):
        drawn = torch.multinomial(weights_N, 32, replacement=True, generator=generator)
        loss = functional.binary_cross_entropy_with_logits(network(rows_N[drawn])[:, 0], wanted_N[drawn])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return network.eval()


def _share(right_N: np.ndarray) -> tuple[float, float, float]:
    """The share that is right, and Wilson's 95% interval, of pictures as if each were drawn by itself."""
    count, share, z = len(right_N), float(right_N.mean()), 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return share, middle - half, middle + half
