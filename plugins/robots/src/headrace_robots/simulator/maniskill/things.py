"""Things to put on a plate: bodies of primitives, or models of a folder. Knows no simulator."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace_simulator.backends.base import BackendError

KEY = "options_json.assets_dir"
TRAINED = 16
"""Of the 25 things, those that are trained on; the others are unseen ones."""
_THINGS, _PLATES = "more_carrot", "more_plate"
_VISUALS = ("textured.obj", "textured.dae", "textured.glb")
Shape = Literal["box", "cylinder", "sphere", "model"]
_COLOURS = {
    "red": (0.8, 0.1, 0.1),
    "orange": (0.9, 0.5, 0.1),
    "yellow": (0.9, 0.85, 0.2),
    "blue": (0.1, 0.2, 0.8),
    "purple": (0.5, 0.1, 0.6),
}


@dataclass(frozen=True)
class Thing:
    """A body; `size` is that of its bounding box in metres."""

    name: str
    shape: Shape
    size: tuple[float, float, float]
    colour: tuple[float, float, float] = (0.7, 0.7, 0.7)
    density: float = 1000.0
    scale: float = 1.0
    collision: str = ""
    visual: str = ""


@dataclass(frozen=True)
class Catalogue:
    """25 things, and the plate."""

    things: list[Thing]
    plate: Thing


def primitives() -> Catalogue:
    """Boxes, cylinders and balls of five colours, and a round plate."""
    forms: list[tuple[str, Shape, tuple[float, float, float]]] = [
        ("cube", "box", (0.035, 0.035, 0.035)),
        ("bar", "box", (0.08, 0.025, 0.025)),
        ("can", "cylinder", (0.04, 0.04, 0.06)),
        ("coin", "cylinder", (0.05, 0.05, 0.015)),
        ("ball", "sphere", (0.04, 0.04, 0.04)),
    ]
    things = [
        Thing(f"{colour} {word}", shape, size, rgb)
        for word, shape, size in forms
        for colour, rgb in _COLOURS.items()
    ]
    return Catalogue(things, Thing("plate", "cylinder", (0.14, 0.14, 0.012), (0.9, 0.9, 0.85)))


def from_assets(assets_dir: str) -> Catalogue:
    """The things of `assets_dir`/more_carrot, and the first plate of `assets_dir`/more_plate.

    Raises BackendError, which says what is missing.
    """
    if not assets_dir:
        raise BackendError(
            KEY,
            "its things are models that no package and no registry has: give the folder that holds more_carrot and "
            "more_plate (published with RLinf's ManiSkill assets), or use PutOnPlatePrimitives-v1, which needs none",
        )
    folder = Path(os.path.expanduser(assets_dir))
    things, plates = _listed(folder / _THINGS), _listed(folder / _PLATES)
    return Catalogue(things, plates[0])


def _listed(folder: Path) -> list[Thing]:
    listing = folder / "model_db.json"
    try:
        found = json.loads(listing.read_text(encoding="utf-8"))
        things = [_model(folder / name, entry) for name, entry in found.items()]
    except OSError as error:
        raise BackendError(KEY, f"there is no {listing} to read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BackendError(KEY, f"{listing} is no list of models: {error!r}") from error
    if not things:
        raise BackendError(KEY, f"{listing} lists no model")
    return things


def _model(folder: Path, entry: dict[str, Any]) -> Thing:
    scales = entry.get("scale", [1.0])
    scale = float(scales[0] if isinstance(scales, list) else scales)
    low, high = entry["bbox"]["min"], entry["bbox"]["max"]
    x, y, z = (scale * (float(b) - float(a)) for a, b in zip(low, high, strict=True))
    collision, visuals = folder / "collision.obj", [folder / name for name in _VISUALS]
    visual = next((file for file in visuals if file.is_file()), None)
    if visual is None or not collision.is_file():
        missing = collision if visual is not None else f"{folder}/textured.obj, .dae or .glb"
        raise BackendError(KEY, f"there is no {missing}")
    return Thing(
        str(entry.get("name", folder.name)),
        "model",
        (x, y, z),
        density=float(entry.get("density", 1000.0)),
        scale=scale,
        collision=str(collision),
        visual=str(visual),
    )
