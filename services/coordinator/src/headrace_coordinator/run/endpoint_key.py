"""The key that clients of an online run show, in a file of the run."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def endpoint_key(directory: str | Path) -> str:
    """The key of the run with this directory; made the first time, and the same from then on."""
    path = Path(directory) / "endpoint-key"
    try:
        return path.read_text(encoding="ascii")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    key = f"sk-headrace-{secrets.token_urlsafe(32)}"
    part = path.with_suffix(".part")
    with os.fdopen(
        os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii"
    ) as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    return key
