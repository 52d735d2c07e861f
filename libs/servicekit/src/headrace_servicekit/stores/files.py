"""A path of a spec as a local path: models and data of a store are fetched into a folder of this user's caches.

What was fetched is kept under the names, sizes and versions that the store lists: when these change, it is fetched
anew.
Processes of one host fetch a thing once: a lock stands beside each.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import xxhash
from headrace_schema.stores import cache_folder, checked, is_remote, looked_at, with_paths
from pydantic import BaseModel

from headrace_servicekit.stores.problems import StoreProblem, explain

FETCHED = "fetched.json"
"""Beside the fetched files: their sizes and digests."""
BLOCK_BYTES = 16 * 2**20
AT_ONCE = 4
"""Files that are fetched at a time."""
SMALL_BYTES = 8 * 2**20
"""Largest file of a model that is fetched to look at the model."""
_ROOM_BYTES = 2**28
"""Bytes that stay free on the disk of the cache."""
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "retries": {"mode": "standard", "max_attempts": 4},
            "connect_timeout": 10,
            "read_timeout": 60,
        },
        "use_listings_cache": False,
    },
    "gs": {"use_listings_cache": False},
    "az": {"anon": False},
    "abfs": {"anon": False},
    "file": {"auto_mkdir": True},
}
_Section = TypeVar("_Section", bound=BaseModel)


@dataclass(frozen=True)
class Entry:
    """A file in a store; `version` differs when its content does, where the store says so."""

    size: int
    version: str


class Store:
    """The files below an address. All methods raise StoreProblem."""

    def __init__(self, url: str) -> None:
        """Credentials are found by the store's own conventions."""
        try:
            self.url = checked(url)
        except ValueError as error:
            raise StoreProblem(f"{url.partition('://')[0]}://…: {error}", "correct the address") from error
        import fsspec

        self.scheme = self.url.partition("://")[0]
        with self.explained("read"):
            self._files, self._root = fsspec.core.url_to_fs(self.url, **_OPTIONS[self.scheme])

    @contextmanager
    def explained(self, verb: str, name: str = "") -> Iterator[None]:
        """Errors of the packages below, as StoreProblem."""
        try:
            yield
        except Exception as error:
            raise explain(error, f"{self.url}/{name}".rstrip("/"), verb) from error

    def path(self, name: str) -> str:
        """A name below the address, as the package wants it."""
        return f"{self._root}/{name}" if name else str(self._root)

    def listing(self, below: str = "") -> dict[str, Entry]:
        """All files below a name of the address, by their names below the address; "" for an object that is it."""
        with self.explained("read", below):
            found = self._files.find(self.path(below), detail=True)
        return {
            name.removeprefix(str(self._root)).lstrip("/"): Entry(int(each["size"]), _version(each))
            for name, each in found.items()
            if not name.endswith("/")
        }

    def check_bucket(self) -> None:
        """Raises StoreProblem where the bucket is not there, or cannot be listed."""
        with self.explained("read"):
            self._files.ls(str(self._root).partition("/")[0] if self.scheme != "file" else "/")

    def read(self, name: str) -> bytes:
        """A small object."""
        with self.explained("read", name):
            return bytes(self._files.cat_file(self.path(name)))

    def write(self, name: str, data: bytes) -> None:
        """A small object, whole or not at all."""
        with self.explained("write", name):
            if self.scheme == "file":
                self._write_file(Path(self.path(name)), data)
            else:
                self._files.pipe_file(self.path(name), data)

    @staticmethod
    def _write_file(path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.partial")
        aside.write_bytes(data)
        os.replace(aside, path)

    def upload(self, file: Path, name: str) -> None:
        """A file of any size, in parts where the store has them."""
        size, more = file.stat().st_size, {}
        if self.scheme == "s3":
            # S3 takes 10,000 parts; a few in flight at a time bound the memory.
            more = {"chunksize": max(2 * BLOCK_BYTES, -(-size // 9000)), "max_concurrency": 4}
        with self.explained("write", name):
            self._files.put_file(str(file), self.path(name), **more)

    def digest(self, name: str) -> str:
        """xxh3-128 of an object as the store gives it back."""
        found = xxhash.xxh3_128()
        with self.explained("read", name):
            with self._files.open(self.path(name), "rb", block_size=BLOCK_BYTES, cache_type="none") as file:
                while block := file.read(BLOCK_BYTES):
                    found.update(block)
        return str(found.hexdigest())

    def download(self, name: str, file: Path) -> None:
        """Writes an object to a new file, durably."""
        with self.explained("read", name):
            file.parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(self.path(name), str(file))
            with file.open("rb") as written:
                os.fsync(written.fileno())

    def remove(self, names: list[str]) -> None:
        """Deletes objects; what is gone already is no error."""
        with self.explained("delete"):
            for name in names:
                try:
                    self._files.rm_file(self.path(name))
                except FileNotFoundError:
                    continue


def digest_of(file: Path) -> str:
    """xxh3-128 of a local file."""
    found = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            found.update(block)
    return str(found.hexdigest())


def local(url: str) -> Path:
    """A file or folder of a store on this host; any other path as it is. Raises StoreProblem."""
    if not is_remote(url):
        return Path(url)
    store = Store(url)
    if store.scheme == "file":
        return Path(store.path(""))
    found = _listed(store)
    place = _fetched(store, found, cache_folder() / _key(store.url, found))
    _addresses[str(place)] = store.url
    return place


def addressed(spec: Any) -> Any:
    """JSON of a spec with the addresses that `local` was given here in place of what it returned."""
    if isinstance(spec, dict):
        return {key: addressed(each) for key, each in spec.items()}
    if isinstance(spec, list):
        return [addressed(each) for each in spec]
    return _addresses.get(spec, spec) if isinstance(spec, str) else spec


_addresses: dict[str, str] = {}
"""Local path → address, of what this process has fetched."""


def look(url: str) -> list[str]:
    """Names of a model's files in a store; its small JSON files are then where `described` reads them.

    Raises StoreProblem.
    """
    store = Store(url)
    found = _listed(store)
    folder = looked_at(store.url)
    with _locked(folder):
        shutil.rmtree(folder, ignore_errors=True)
        for name, entry in found.items():
            if name.endswith(".json") and "/" not in name and entry.size <= SMALL_BYTES:
                store.download(name, folder / name)
    return sorted(found)


def localized(section: _Section, key: str = "") -> _Section:
    """A section of a spec in which local paths stand for all addresses of stores; itself where it has none.

    Fetches them. Raises StoreProblem, whose reason begins with `key`.
    """

    def fetch(url: str) -> str:
        try:
            return str(local(url))
        except StoreProblem as error:
            raise StoreProblem(
                f"{key}: {error.reason}" if key else error.reason,
                error.fix,
                lasting=error.lasting,
                code=error.code,
            ) from error

    given = section.model_dump(mode="json")
    made = with_paths(given, fetch)
    return section if made is given else type(section).model_validate(made)


def _listed(store: Store) -> dict[str, Entry]:
    found = store.listing()
    if not found:
        store.check_bucket()
        raise StoreProblem(f"{store.url}: there is nothing of that name", "check the path")
    for name in found:
        if ".." in PurePosixPath(name).parts:
            raise StoreProblem(f"{store.url} holds {name!r}, which is no name of a file", "remove it")
    return found


def _key(url: str, found: Mapping[str, Entry]) -> str:
    listing = json.dumps([url, *sorted((name, each.size, each.version) for name, each in found.items())])
    return hashlib.sha256(listing.encode()).hexdigest()[:32]


def _fetched(store: Store, found: Mapping[str, Entry], folder: Path) -> Path:
    """The folder of what was listed, or the file where it is one; fetched unless it is there and whole."""
    base = store.url.rpartition("/")[2]
    names = {name: name or base for name in found}
    inside = folder / base if [*found] == [""] else folder / "files"
    places = {name: folder / base if not name else inside / name for name in found}
    with _locked(folder):
        if _whole(folder, places):
            return inside
        shutil.rmtree(folder, ignore_errors=True)
        # Files that are there whole stay, where an earlier fetch was cut off.
        aside = folder.with_name(f"{folder.name}.partial")
        _check_room(folder.parent, sum(each.size for each in found.values()), store.url)
        moved = {name: aside / place.relative_to(folder) for name, place in places.items()}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(_fetch_one, store, name, moved[name], found[name]) for name in found]:
                done.result()
        facts = {names[name]: _facts(place) for name, place in moved.items()}
        (aside / FETCHED).write_text(json.dumps({"url": store.url, "files": facts}))
        os.rename(aside, folder)
    return inside


def _fetch_one(store: Store, name: str, place: Path, entry: Entry) -> None:
    if place.is_file() and place.stat().st_size == entry.size:
        return
    store.download(name, place)
    if (size := place.stat().st_size) != entry.size:
        reason = f"{store.url}/{name} has {entry.size} bytes, and {size} came"
        raise StoreProblem(reason, "try again", lasting=False)


def _facts(file: Path) -> dict[str, object]:
    state = file.stat()
    return {"size": state.st_size, "changed": state.st_mtime_ns, "digest": digest_of(file)}


def _whole(folder: Path, places: Mapping[str, Path]) -> bool:
    """Whether a fetched folder has all of its files as they came; digests are compared of those touched since."""
    try:
        facts = json.loads((folder / FETCHED).read_text())["files"]
        for name, place in places.items():
            known, state = facts[name or place.name], place.stat()
            same = (state.st_size, state.st_mtime_ns) == (known["size"], known["changed"])
            if not same and (state.st_size != known["size"] or digest_of(place) != known["digest"]):
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _check_room(folder: Path, size: int, url: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < size + _ROOM_BYTES:
        reason = f"{url} has {size:,} bytes, and {free:,} are free below {folder}"
        raise StoreProblem(reason, "free the disk, or set HEADRACE_STORE_CACHE to a folder with room")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process of this host at a time, by a file beside the folder."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(f"{folder.name}.lock").open("w")
    except OSError as error:
        reason = f"{folder.parent} cannot be written: {error.strerror}"
        raise StoreProblem(reason, "set HEADRACE_STORE_CACHE to a folder that can") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _version(found: Mapping[str, Any]) -> str:
    for key in ("ETag", "etag", "generation", "md5Hash", "LastModified", "last_modified", "mtime"):
        if found.get(key) is not None:
            return str(found[key])
    return ""
