"""config.json of a Hugging Face id: from this host's cache, else from the hub. Knows nothing of what it says.

The cache is read as huggingface_hub lays it out, and its variables are obeyed (HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE,
HF_ENDPOINT, HF_TOKEN). Nothing is written.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
ANSWER_S = 5.0
"""Longest wait for the hub: a submission is not held up by it."""
KEPT_S = 60.0
"""For how long it is remembered that there was no answer."""
MOST_BYTES = 4 * 2**20
TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True)
class HubConfig:
    """What config.json says ({} where it is not to be had), and then why not."""

    config: Mapping[str, Any]
    missing: str = ""


def hub_config(model: str, revision: str | None = None) -> HubConfig:
    """Of an id such as Qwen/Qwen2.5-7B; kept in this process, a failure for KEPT_S."""
    key = (model, revision or "main", os.environ.get("HF_HUB_CACHE", ""), os.environ.get("HF_HOME", ""))
    found, until = _known.get(key, (None, 0.0))
    if found is None or time.monotonic() > until:
        found = _cached(model, revision or "main") or _asked(model, revision or "main")
        _known[key] = found, time.monotonic() + KEPT_S if found.missing else float("inf")
    return found


_known: dict[tuple[str, ...], tuple[HubConfig | None, float]] = {}


def hub_cache() -> Path:
    """The folder of this user's downloaded models."""
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    return _home() / "hub"


def _home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser()


def _cached(model: str, revision: str) -> HubConfig | None:
    folder = hub_cache() / f"models--{model.replace('/', '--')}"
    try:
        reference = folder / "refs" / revision
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
        found = json.loads((folder / "snapshots" / commit / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return HubConfig(found) if isinstance(found, dict) else None


def _asked(model: str, revision: str) -> HubConfig:
    """From the hub itself. A proxy is found by its variables, as urllib finds it."""
    if any(os.environ.get(name, "").upper() in TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return HubConfig({}, "HF_HUB_OFFLINE is set")
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not endpoint.startswith(("https://", "http://")):
        return HubConfig({}, f"HF_ENDPOINT is {endpoint!r}, which is no address")
    request = urllib.request.Request(f"{endpoint.rstrip('/')}/{model}/resolve/{revision}/config.json")
    if token := _token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # nosec B310 - http or https
            found = json.loads(answer.read(MOST_BYTES))
    except urllib.error.HTTPError as error:
        return HubConfig({}, f"{endpoint} answers {error.code} {error.reason}")
    except (OSError, ValueError) as error:
        return HubConfig({}, f"{endpoint} cannot be asked: {getattr(error, 'reason', error)}")
    return HubConfig(found) if isinstance(found, dict) else HubConfig({}, "it is no JSON object")


def _token() -> str:
    if token := os.environ.get("HF_TOKEN"):
        return token
    try:
        return Path(os.environ.get("HF_TOKEN_PATH") or _home() / "token").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
