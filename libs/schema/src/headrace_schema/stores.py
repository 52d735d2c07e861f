"""Paths of a spec that are addresses of object stores, and where a host keeps its copies of them. Asks no store.

`s3://`, `gs://`, `az://` (or `abfs://`) and `file://`. Credentials are the store's own affair and stand in no spec.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator

from headrace_schema.problems import path as key_path

SCHEMES = ("s3", "gs", "az", "abfs", "file")
PATH_KEYS = frozenset(
    {"path", "critic_path", "demonstrations", "model", "file", "files", "folder", "dataset"}
)
"""Last words of keys whose values are paths: a text elsewhere, such as an answer, is never taken for an address."""
DESTINATIONS = frozenset({"store"})
"""Sections whose addresses are written to, and not read before a run."""
_ADDRESS = re.compile(rf"(?:{'|'.join(SCHEMES)})://\S+")


def is_remote(path: object) -> bool:
    """Whether a path is the address of a store."""
    return isinstance(path, str) and _ADDRESS.fullmatch(path) is not None


def checked(url: str) -> str:
    """An address without the slash at its end. Raises ValueError for what is none, and for one with credentials."""
    if not is_remote(url):
        raise ValueError(f"give an address such as s3://BUCKET/FOLDER ({', '.join(SCHEMES)})")
    parts = urlsplit(url)
    if (parts.scheme not in ("az", "abfs") and "@" in parts.netloc) or ":" in parts.netloc:
        raise ValueError(
            "the address has a user or password in it; leave them out: credentials come from the environment or the "
            "store's own files of the service that uses it"
        )
    if parts.query or parts.fragment:
        raise ValueError("the address ends in a query; leave out what begins with ? or #")
    if not (parts.path.strip("/") if parts.scheme == "file" else parts.netloc):
        raise ValueError("the address names no bucket or folder; write such as s3://BUCKET/FOLDER")
    if ".." in parts.path.split("/"):
        raise ValueError("the address has '..' in it; write the whole path")
    return url.rstrip("/")


StoreUrl = Annotated[str, AfterValidator(checked)]
"""Where to write in a store."""


def remote_paths(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Key and address of each path of a spec, as JSON, that is read from a store."""
    found: list[tuple[str, str]] = []

    def note(at: tuple[str | int, ...], url: str) -> str:
        found.append((key_path(at), url))
        return url

    _mapped(spec, note)
    yield from found


def with_paths(spec: Any, local: Callable[[str], str]) -> Any:
    """JSON of a spec with what `local` says of each address that is read from a store; itself where there is none."""
    changed = False

    def look(_at: tuple[str | int, ...], url: str) -> str:
        nonlocal changed
        changed = True
        return local(url)

    made = _mapped(spec, look)
    return made if changed else spec


def cache_folder() -> Path:
    """This user's copies of what stores hold: HEADRACE_STORE_CACHE, else below the folder of caches."""
    if named := os.environ.get("HEADRACE_STORE_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace" / "stores"


def looked_at(url: str) -> Path:
    """Folder of a model's small files (its configuration), where a service has looked at the model."""
    return cache_folder() / f"looked-at-{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:24]}"


def described(path: str) -> Path:
    """Where a model's configuration is read from here: its directory, or what was looked at of a store's."""
    return looked_at(path) if is_remote(path) else Path(os.path.expanduser(path))


def _mapped(
    value: Any, look: Callable[[tuple[str | int, ...], str], str], at: tuple[str | int, ...] = ()
) -> Any:
    if isinstance(value, Mapping):
        return {
            key: each if not at and key in DESTINATIONS else _mapped(each, look, (*at, str(key)))
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mapped(each, look, (*at, index)) for index, each in enumerate(value)]
    named = next((part for part in reversed(at) if isinstance(part, str)), "")
    return look(at, value) if named in PATH_KEYS and is_remote(value) else value
