"""Whether a preset's directory is there already."""

from __future__ import annotations

from pathlib import Path


def is_complete(directory: Path) -> bool:
    """A model directory appears by one rename, so what is needed is there or nothing is."""
    return all(
        (directory / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json")
    )
