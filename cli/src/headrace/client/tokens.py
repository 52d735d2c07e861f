"""Finds the token of a fleet on this machine, and what its certificates come from. Knows no HTTP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import urlsplit

DATA_DIR = ".headrace"


def find_token(url: str) -> str:
    """HEADRACE_TOKEN, or the token of the fleet at `url` if it lies in HEADRACE_DATA_DIR or `.headrace`; or "".

    >>> import tempfile
    >>> os.environ["HEADRACE_DATA_DIR"] = tempfile.mkdtemp()
    >>> find_token("http://127.0.0.1:8470")
    ''
    """
    if token := os.environ.get("HEADRACE_TOKEN"):
        return token
    return fleet_token(url, Path(os.environ.get("HEADRACE_DATA_DIR") or DATA_DIR))


def fleet_token(url: str, data_dir: Path) -> str:
    """The token of the fleet that `data_dir` describes, if it is the one at `url`; or ""."""
    state_file = data_dir / "fleet.json"
    try:
        if state_file.stat().st_uid != os.getuid():
            return ""  # another user's file could name any file of ours
        state = json.loads(state_file.read_text(encoding="utf-8"))
        if not same_place(url, state["url"]) or not state["token_file"]:
            return ""
        return Path(state["token_file"]).read_text(encoding="ascii").strip()
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def find_ca(url: str) -> Path | None:
    """HEADRACE_CA_FILE, else the authority of the fleet at `url` if that lies in HEADRACE_DATA_DIR or `.headrace`."""
    if named := os.environ.get("HEADRACE_CA_FILE"):
        return Path(named)
    return fleet_ca(url, Path(os.environ.get("HEADRACE_DATA_DIR") or DATA_DIR))


def fleet_ca(url: str, data_dir: Path) -> Path | None:
    """The authority of the fleet that `data_dir` describes, if it is the one at `url` and encrypted; or None."""
    file = data_dir / "tls" / "ca.pem"
    try:
        state = json.loads((data_dir / "fleet.json").read_text(encoding="utf-8"))
        ours = url.startswith("https:") and same_place(url, state["url"]) and file.is_file()
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return file if ours else None


def same_place(one: str, other: str) -> bool:
    """Whether two URLs name one server; localhost is 127.0.0.1."""

    def place(url: str) -> tuple[str, int | None]:
        parts = urlsplit(url)
        return (parts.hostname or "").replace("localhost", "127.0.0.1"), parts.port

    return place(one) == place(other)
