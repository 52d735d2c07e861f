"""Which files, folders and programs the strings of a spec name; whether users' code may read them is `confine`'s."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from headrace_schema.references import secret_file


def named_paths(given: object, closed: Iterable[Path], base: Path) -> list[str]:
    """Folders of the files, and the folders, that the strings of a JSON value name below `base`.

    PATH:NAME counts as PATH. Of a file in the home directory, in a `closed` folder or at the top, and of one with a
    secret, itself alone; of a `closed` folder no secret.
    """
    if isinstance(given, dict):
        return [path for each in given.values() for path in named_paths(each, closed, base)]
    if isinstance(given, list | tuple):
        return [path for each in given for path in named_paths(each, closed, base)]
    if not isinstance(given, str) or not given or len(given) > 4096 or "\0" in given:
        return []
    if secret := secret_file(given):
        own = any(os.path.realpath(secret).startswith(f"{os.path.realpath(each)}/") for each in closed)
        return [] if own or not os.path.isfile(secret) else [secret]
    text = given if ".py:" not in given else given.rpartition(":")[0]
    # Path's own ways raise where a user has neither HOME nor a name.
    path = (base / os.path.expanduser(text)).absolute()
    narrow = {Path("/"), Path(os.path.expanduser("~")), Path("/tmp"), *closed}
    if os.path.isdir(path):
        return [] if path in narrow or os.path.realpath(path) in map(str, narrow) else [str(path)]
    if not os.path.isfile(path):
        found = shutil.which(given) if "/" not in given and len(given) < 64 else None
        return _program(Path(found)) if found else []
    if os.access(path, os.X_OK) and path.parent.name in ("bin", "sbin"):
        return _program(path)
    return [str(path)] if path.parent in narrow else [str(path.parent)]


def _program(path: Path) -> list[str]:
    """What a program in a folder of programs needs, and what it links to, as a Python of a virtual environment does."""
    found = []
    for _ in range(8):
        prefix = path.parent.parent
        found += [str(path.parent), *(str(prefix / name) for name in ("lib", "lib64", "pyvenv.cfg"))]
        if not path.is_symlink():
            break
        path = Path(os.path.abspath(path.parent / path.readlink()))
    return [each for each in found if os.path.exists(each)]
