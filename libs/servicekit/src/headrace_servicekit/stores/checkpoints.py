"""Checkpoints of a run in a store: uploaded, read back, listed once they are whole, pruned, fetched. Knows no tensors.

URL/RUN/run.json                           the run's id and spec
URL/RUN/checkpoints/lineage-E/step-N/      the files of the local checkpoint, the claim of its lineage and model.json
URL/RUN/checkpoints/lineage-E/step-N/upload.json
                                           size and digest of each, written last: without it there is no checkpoint
URL/RUN/export, recordings, videos         copies of the run's folders of these names
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from headrace_schema.progress import counter

from headrace_servicekit.failpoints import failpoint_sync
from headrace_servicekit.stores.files import Store, digest_of
from headrace_servicekit.stores.problems import StoreProblem

MANIFEST, RUN, CLAIM, MODEL = "upload.json", "run.json", "claim.json", "model.json"
_NAME = re.compile(r"lineage-([1-9]\d*)/step-(0|[1-9]\d*)")


@dataclass(frozen=True)
class Remote:
    """A whole checkpoint in a store."""

    name: str
    run: str
    step: int
    """Steps in it."""
    number: int
    """Of the policy version that it holds."""
    base: str
    """Checkpoint that its lineage began with, "" for the initial model and for another run's."""
    files: Mapping[str, Mapping[str, Any]]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(int(each["size"]) for each in self.files.values())

    @property
    def place(self) -> tuple[int, int]:
        """Lineage and the step in its name."""
        return _place(self.name)


class RemoteRun:
    """What a store has of one run, below URL/RUN. All methods raise StoreProblem."""

    def __init__(self, url: str) -> None:
        self._store = Store(url)
        self.url = self._store.url

    def describe(self, run: Mapping[str, Any]) -> None:
        """Keeps the run's id and spec, which a run that continues it is compared with."""
        self._store.write(RUN, json.dumps(run, sort_keys=True).encode())

    def description(self) -> dict[str, Any]:
        """What `describe` was given."""
        found = json.loads(self._store.read(RUN))
        if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
            raise StoreProblem(f"{self.url}/{RUN} is no run's", "name the address of a run, URL/RUN")
        return found

    def upload(self, root: Path, name: str, facts: Mapping[str, Any]) -> Remote:
        """Copies a checkpoint of the run's folder of checkpoints, reads it back, and lists it.

        What was uploaded of it before stays, where its digests are the same.
        """
        folder, below = root / name, f"checkpoints/{name}"
        sources = {file.name: file for file in sorted(folder.iterdir()) if file.is_file()}
        lineage = root / f"{PurePosixPath(name).parent}.json"
        sources |= {kept: file for kept, file in ((CLAIM, lineage), (MODEL, root / MODEL)) if file.is_file()}
        digests = {
            own: {"size": file.stat().st_size, "digest": digest_of(file)} for own, file in sources.items()
        }
        before = self._store.listing(below)
        if f"{below}/{MANIFEST}" in before:
            known = self._manifest(name)
            if known is not None and known.files == digests and _complete(known, before):
                return known
            self._store.remove([f"{below}/{MANIFEST}"])
        counter().begin(sum(file.stat().st_size for file in sources.values()), "bytes")
        for own, file in sources.items():
            self._upload_one(file, f"{below}/{own}", str(digests[own]["digest"]))
            counter().add(file.stat().st_size)
        sealed = {"name": name, "base": _base(lineage), **facts, "files": digests}
        data = json.dumps(sealed, sort_keys=True).encode()
        failpoint_sync("stores.before_manifest")
        self._store.write(f"{below}/{MANIFEST}", data)
        if self._store.read(f"{below}/{MANIFEST}") != data:
            raise StoreProblem(
                f"{self.url}/{below}/{MANIFEST} reads otherwise than it was written", "try again"
            )
        found = self._manifest(name)
        assert found is not None
        return found

    def _upload_one(self, file: Path, name: str, digest: str) -> None:
        failpoint_sync("stores.upload")
        self._store.upload(file, name)
        if self._store.digest(name) != digest:
            self._store.remove([name])
            raise StoreProblem(
                f"{self.url}/{name} reads otherwise than it was written", "try again", lasting=False
            )

    def whole(self) -> list[Remote]:
        """Checkpoints all of whose files are there in their sizes, newest first."""
        listed = self._store.listing("checkpoints")
        names = [
            name.removeprefix("checkpoints/").removesuffix(f"/{MANIFEST}")
            for name in listed
            if name.endswith(f"/{MANIFEST}")
        ]
        found = [each for name in names if (each := self._manifest(name)) is not None]
        return sorted((each for each in found if _complete(each, listed)), key=_order, reverse=True)

    def live(self) -> list[Remote]:
        """The whole ones of the newest lineage and of what it stands on, newest first, as they are live on a disk."""
        found = self.whole()
        lineage, most = (found[0].place[0] if found else 0), float("inf")
        kept: list[Remote] = []
        while lineage:
            own = [each for each in found if each.place[0] == lineage and each.place[1] <= most]
            kept += own
            base = own[0].base if own else next((e.base for e in found if e.place[0] == lineage), "")
            before, most = _place(base) if base else (0, 0)
            lineage = before if before < lineage else 0
        return kept

    def prune(self, keep: int, retained: Collection[str]) -> list[str]:
        """Deletes all but the `keep` newest live ones and the `retained`, with what uploads that were cut off left.

        Each loses its manifest first. Names of those that are gone.
        """
        kept = {*(each.name for each in self.live()[:keep]), *retained}
        folders: dict[str, list[str]] = {}
        for name in self._store.listing("checkpoints"):
            folders.setdefault(str(PurePosixPath(name).parent).removeprefix("checkpoints/"), []).append(name)
        gone = [name for name in folders if _NAME.fullmatch(name) and name not in kept]
        for name in gone:
            files = sorted(folders[name], key=lambda file: not file.endswith(f"/{MANIFEST}"))
            self._store.remove(files)
        return gone

    def fetch(self, remote: Remote, root: Path) -> Path:
        """Writes a checkpoint into a run's folder of checkpoints, verified; one that is there stays."""
        place = root / remote.name
        if place.is_dir():
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.partial")
        try:
            for own, facts in remote.files.items():
                name = f"checkpoints/{remote.name}/{own}"
                self._store.download(name, aside / own)
                if digest_of(aside / own) != facts["digest"]:
                    reason = f"{self.url}/{name} has another digest than when it was uploaded"
                    raise StoreProblem(reason, "name an older checkpoint", code="DAMAGED")
            lineage = root / f"{PurePosixPath(remote.name).parent}.json"
            for own, target in ((CLAIM, lineage), (MODEL, root / MODEL)):
                if (aside / own).is_file():
                    if target.exists():
                        (aside / own).unlink()
                    else:
                        os.rename(aside / own, target)
            os.rename(aside, place)
        except OSError as error:
            raise StoreProblem(f"{place} cannot be written: {error.strerror}", "make room") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return place

    def fetch_newest(
        self, root: Path, wanted: Callable[[Remote], bool] = lambda _each: True
    ) -> tuple[Remote | None, list[str]]:
        """The newest live checkpoint that is wanted, in the folder; and why newer ones are not used."""
        damaged: list[str] = []
        for each in filter(wanted, self.live()):
            try:
                self.fetch(each, root)
            except StoreProblem as problem:
                if problem.code != "DAMAGED":
                    raise
                damaged.append(problem.reason)
                continue
            return each, damaged
        return None, damaged

    def copy(self, folder: Path, name: str, known: dict[str, tuple[int, int]]) -> int:
        """Copies files of a folder that are new or have changed since; `known` is kept by the caller. How many."""
        copied = 0
        for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
            below = file.relative_to(folder)
            if not file.is_file() or any(part.startswith(".") for part in below.parts):
                continue
            state, target = file.stat(), f"{name}/{below.as_posix()}".lstrip("/")
            if known.get(target) == (state.st_size, state.st_mtime_ns):
                continue
            self._upload_one(file, target, digest_of(file))
            known[target] = state.st_size, state.st_mtime_ns
            copied += 1
        return copied

    def _manifest(self, name: str) -> Remote | None:
        try:
            said = json.loads(self._store.read(f"checkpoints/{name}/{MANIFEST}"))
            files = {str(own): dict(facts) for own, facts in said["files"].items()}
            safe = all("/" not in own and own not in ("", ".", "..") for own in files)
            if not safe or said["name"] != name or not _NAME.fullmatch(name):
                return None
            step, number = int(said["step"]), int(said["number"])
            return Remote(name, str(said["run"]), step, number, str(said["base"]), files)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def probe(url: str) -> None:
    """Writes, reads back and deletes a small object. Raises StoreProblem where a run could not keep anything there."""
    store, name, data = Store(url), f".probe-{uuid.uuid4().hex}", uuid.uuid4().bytes
    store.write(name, data)
    if store.read(name) != data:
        raise StoreProblem(f"{url} gives back other bytes than were written", "name another place")
    store.remove([name])


def _complete(remote: Remote, listed: Mapping[str, Any]) -> bool:
    below = f"checkpoints/{remote.name}"
    return all(
        f"{below}/{own}" in listed and listed[f"{below}/{own}"].size == facts["size"]
        for own, facts in remote.files.items()
    )


def _base(claim: Path) -> str:
    try:
        said = json.loads(claim.read_text())
        return "" if said["base_run"] else str(said["base_checkpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _place(name: str) -> tuple[int, int]:
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _order(remote: Remote) -> tuple[int, int]:
    return remote.place
