"""Statistics of a LeRobot data set, by episode and of all, as LeRobot 0.6.1 makes them. Knows no file.

An episode's quantiles are exact here; those of a data set are, as there, the means of its episodes' by their counts.
Shapes: T steps of an episode, N numbers of a feature.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np

Statistics = dict[str, dict[str, np.ndarray]]
"""By feature and kind: (N,) numbers, (3, 1, 1) of a camera in 0 to 1, and the count (1,)."""
QUANTILES = {f"q{percent:02d}": percent / 100 for percent in (1, 10, 50, 90, 99)}
FEWEST_PICTURES, MOST_PICTURES, POWER = 100, 10_000, 0.75
"""Pictures of an episode that are looked at: T ** POWER of T, and between these."""
LARGE, SEEN = 300, 150
"""Sides of a picture from which on every so many pixels are looked at, and about how many of a side."""


def episode_statistics(
    numbers: Mapping[str, np.ndarray], pictures: Mapping[str, Sequence[bytes]]
) -> Statistics:
    """Those of an episode: of (T, N) numbers and of T picture files by feature."""
    found = {feature: _kinds(rows, len(rows)) for feature, rows in numbers.items()}
    for feature, files in pictures.items():
        seen = [_seen(files[place]) for place in _places(len(files))]
        kinds = _kinds(np.concatenate([each.reshape(-1, 3) for each in seen]) / 255, len(seen))
        found[feature] = {
            kind: row if kind == "count" else row.reshape(3, 1, 1) for kind, row in kinds.items()
        }
    return found


def merged(episodes: Sequence[Statistics]) -> Statistics:
    """Those of all episodes, which have the same features."""
    return {feature: _merged([each[feature] for each in episodes]) for feature in episodes[0]}


def _kinds(rows: np.ndarray, count: int) -> dict[str, np.ndarray]:
    exact = rows.astype(np.float64)
    kinds = {"min": exact.min(0), "max": exact.max(0), "mean": exact.mean(0), "std": exact.std(0)}
    quantiles = zip(QUANTILES, np.quantile(exact, list(QUANTILES.values()), axis=0), strict=True)
    return {**kinds, "count": np.array([count]), **dict(quantiles)}


def _merged(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    shares = np.array([float(each["count"][0]) for each in parts])
    shares /= shares.sum()

    def mean(values: Sequence[np.ndarray]) -> np.ndarray:
        return np.asarray(np.tensordot(shares, np.stack(values), axes=1))

    middle = mean([each["mean"] for each in parts])
    spread = mean([each["std"] ** 2 + (each["mean"] - middle) ** 2 for each in parts])
    return {
        "min": np.min([each["min"] for each in parts], axis=0),
        "max": np.max([each["max"] for each in parts], axis=0),
        "mean": middle,
        "std": np.sqrt(spread),
        "count": np.sum([each["count"] for each in parts], axis=0),
        **{kind: mean([each[kind] for each in parts]) for kind in QUANTILES},
    }


def _places(count: int) -> list[int]:
    """Places of the pictures that are looked at, at even distances."""
    seen = max(min(count, FEWEST_PICTURES), min(int(count**POWER), MOST_PICTURES))
    places: list[int] = np.round(np.linspace(0, count - 1, seen)).astype(int).tolist()
    return places


def _seen(file: bytes) -> np.ndarray:
    from PIL import Image

    picture = np.asarray(Image.open(io.BytesIO(file), formats=("PNG",)))
    side = max(picture.shape[:2])
    apart = side // SEEN if side >= LARGE else 1
    return picture[::apart, ::apart]
