"""Carries what an agent left in its container over to the one where it is judged.

Everything that comes from there is untrusted: names, links, sizes and kinds of files. What may change how tests are
run stays as the image has it.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath

from headrace_containers.provider import MIB, Container
from headrace_containers.tasks.task import ROOT

MOST_BYTES = 256 * MIB
"""Of what one folder holds."""
MOST_ENTRIES = 50_000
_TIMEOUT_S = 120.0


class NotCarried(Exception):
    """What an agent left cannot be judged: the sentence says why."""


@dataclass(frozen=True)
class Left:
    """What an agent left in one folder, and the names in it that stay as the image has them."""

    folder: str
    archive: bytes
    """A tar file with nothing but folders, regular files, and links that stay in the folder."""
    files: frozenset[str]
    """Names of all that is no folder."""
    kept_out: tuple[str, ...]
    """Names that were not carried, as `restored` lists them."""


def is_restored(name: str, restored: Sequence[str]) -> bool:
    """Whether a name below the folder, or a folder above it, is one that stays as the image has it.

    >>> is_restored("tests/conftest.py", ["conftest.py"]), is_restored("tests/unit/a.py", ["tests/**"])
    (True, True)
    """
    parts = PurePosixPath(name).parts
    for pattern in restored:
        if "/" in pattern:
            if fnmatch(name, pattern) or fnmatch(name, pattern.removesuffix("/**")):
                return True
        elif any(fnmatch(part, pattern) for part in parts):
            return True
    return False


def take(container: Container, folder: str, restored: Sequence[str]) -> Left:
    """Reads a folder of an agent's container. Raises NotCarried."""
    ran = container.exec(
        ("tar", "-C", folder, "--exclude=.git", "-cf", "-", "."),
        cwd="/",
        timeout_s=_TIMEOUT_S,
        most_bytes=MOST_BYTES,
    )
    if ran.ended != "exit" or ran.left_out:
        slow = ran.ended == "time"
        what = f"was not read in {_TIMEOUT_S:g} s" if slow else f"has more than {MOST_BYTES // MIB} MiB"
        raise NotCarried(f"{folder} {what}")
    if not ran.stdout:
        raise NotCarried(f"{folder} cannot be read: {ran.stderr.decode(errors='replace')[-200:].strip()}")
    try:
        return _cleaned(folder, ran.stdout, restored)
    except tarfile.TarError as error:
        raise NotCarried(f"{folder} cannot be read: {error}") from error


def _cleaned(folder: str, given: bytes, restored: Sequence[str]) -> Left:
    """The members of an archive that may be carried, as a new archive."""
    made, kinds, kept_out, left = io.BytesIO(), dict[str, bytes](), list[str](), MOST_BYTES
    with (
        tarfile.open(fileobj=io.BytesIO(given), mode="r:") as source,
        tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for count, member in enumerate(source):
            left -= max(0, member.size)  # of a file with holes, what they stand for
            if count >= MOST_ENTRIES or left < 0:
                raise NotCarried(f"{folder} has more than {MOST_ENTRIES:,} files, or {MOST_BYTES // MIB} MiB")
            name = _name(member.name)
            if not name or name in kinds or _leads_elsewhere(name, kinds):
                continue
            if is_restored(name, restored):
                kept_out.append(name)
            elif (entry := _entry(member, name)) is not None:
                data = _content(source, member) if entry.isreg() else b""
                entry.size, kinds[name] = len(data), entry.type
                target.addfile(entry, io.BytesIO(data))
    files = frozenset(name for name, kind in kinds.items() if kind != tarfile.DIRTYPE)
    return Left(folder, made.getvalue(), files, tuple(kept_out))


def _content(source: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Of a file, or of the one that a hard link means."""
    try:
        file = source.extractfile(member)
    except KeyError as error:
        raise NotCarried(f"{member.name} is a link to nothing that is in the archive") from error
    return file.read() if file is not None else b""


def _leads_elsewhere(name: str, kinds: Mapping[str, bytes]) -> bool:
    """Whether something above a name is no folder: it would be written where that leads."""
    above = (str(each) for each in PurePosixPath(name).parents)
    return any(kinds.get(each, tarfile.DIRTYPE) != tarfile.DIRTYPE for each in above)


def _name(given: str) -> str:
    """A member's name below the folder; empty for the folder itself, and for one that leads out of it."""
    parts = [part for part in PurePosixPath(given).parts if part != "."]
    return "" if given.startswith("/") or ".." in parts else "/".join(parts)


def _entry(member: tarfile.TarInfo, name: str) -> tarfile.TarInfo | None:
    """A new entry with the kind, and whether it is executed, alone; None for what is not carried."""
    entry = tarfile.TarInfo(name)
    if member.isdir():
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    elif member.isreg() or member.islnk():
        entry.mode = 0o755 if member.mode & 0o100 else 0o644
    elif member.issym() and _stays(name, member.linkname):
        entry.type, entry.linkname = tarfile.SYMTYPE, member.linkname
    else:
        return None
    return entry


def _stays(name: str, target: str) -> bool:
    """Whether a link stays in the folder: it goes up at its beginning alone, as a folder on the way may be a link."""
    parts = PurePosixPath(target).parts
    up = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    return (
        not target.startswith("/") and ".." not in parts[up:] and up <= len(PurePosixPath(name).parent.parts)
    )


def put(container: Container, left: Left, user: str, restored: Sequence[str]) -> None:
    """Makes a folder of a fresh container what the agent left there. Raises NotCarried.

    Of what the image has there, all goes but what `restored` names.
    """
    old = [name for name in _there(container, left.folder, "! -type d") if not is_restored(name, restored)]
    _remove(container, left.folder, old, "-f")
    _remove(
        container,
        left.folder,
        [name for name in _there(container, left.folder, "-type d") if name in left.files],
        "-rf",
    )
    script = 'tar -C "$0" -xof - && chown -Rh "$1" "$0"'
    ran = container.exec(
        ("sh", "-c", script, left.folder, user), stdin=left.archive, cwd="/", user=ROOT, timeout_s=_TIMEOUT_S
    )
    if ran.exit_code:
        raise NotCarried(
            f"{left.folder} cannot be written: {ran.stderr.decode(errors='replace')[-200:].strip()}"
        )


def _there(container: Container, folder: str, kind: str) -> Iterator[str]:
    """Names of a kind below a folder of a fresh container."""
    script = f'mkdir -p "$0" && cd "$0" && find . -path ./.git -prune -o {kind} -print0'
    ran = container.exec(("sh", "-c", script, folder), cwd="/", user=ROOT, most_bytes=64 * MIB)
    for name in ran.stdout.decode(errors="surrogateescape").split("\0"):
        if name not in ("", "."):
            yield name.removeprefix("./")


def _remove(container: Container, folder: str, names: Sequence[str], how: str) -> None:
    if names:
        given = "\0".join(f"{folder}/{name}" for name in names).encode(errors="surrogateescape")
        container.exec(
            ("xargs", "-0", "rm", how, "--"), stdin=given, cwd="/", user=ROOT, timeout_s=_TIMEOUT_S
        )
