"""What a fleet lets its users' specs do: `open`, whatever they say; `contained`, nothing that is code or reach.

Code is what a spec has executed: files and modules of Python, commands, a model's own code. Reach is what it has
opened: addresses, folders, variables and files with secrets. A spec of a contained fleet may hold such a value only
where the allow-list of its admin has it; what plug-ins of the fleet do by name is theirs. Admins are not contained.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, TypeGuard

from headrace_schema.problems import explain, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.base import Section
from headrace_schema.yaml_text import YamlProblem, read_yaml
from headrace_servicekit.contained.settings import CONTAINED, OPEN
from pydantic import Field, ValidationError

TEXTS = (
    *("name", "data.prompt.*", "data.options.answer", "environment.instructions.*", "sampling.stop*"),
    *("evaluation.baseline_prefill", "placement.*", "suite.options.prompt*"),
)
"""Keys whose values are text to a model, or names of devices: nothing opens or executes them."""
COMMANDS = re.compile(r"(?:.*\.)?(?:command|commands|cmd|args|argv|python|mcp|entrypoint)(?:[.\[].*)?")
"""Keys below which everything is a program, or given to one."""
SWITCHES = {"sandbox": ("best_effort",), "network": (True, "host", "bridge")}
"""Last words of keys, and the values that open a wall."""
VARIABLES = re.compile(r"(?:.*\.)?env(?:\[\d+\])?")
"""Lists of variables that users' code is given."""
HOSTS = re.compile(r"(?:.*\.)?network\.allow(?:\[\d+\])?")
"""Lists of hosts that a container reaches."""
NAMES = re.compile(r"(?:.*\.)?(?:name|source|backend|engine|tasks?(?:\[\d+\])?)")
"""Keys whose value may be MODULE:NAME, which is imported."""
CLASSES = re.compile(r"(?:.*\.)?(?:\w+_cls|\w*plugins?|logits_processors?)(?:\[\d+\])?")
"""Options of engines whose value is imported, with a colon or a dot."""
OWN = "name a file or folder that is yours"
_FOLDERS = re.compile(r"(?:.*\.)?(?:\w*_)?(?:path|dataset|folder|dir|directory)s?(?:\[\d+\])?")
"""Keys whose folder is read with all that lies below it."""
_PATHS = re.compile(r"(?:.*\.)?(?:\w*_)?(?:path|file|folder|dir|directory)s?(?:\[\d+\])?")
_UP = re.compile(r"(?:^|/)\.\.(?:/|$)")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_REFERENCE = re.compile(r"(?:(?:Bearer|Basic|Token) )?(?:env|file):")
_PYTHON = re.compile(r"\.py(?::|$)")
_MODULE = re.compile(r"[\w./-]+:[\w.-]+")


class AllowList(Section):
    """What a contained fleet's users may have in a spec all the same."""

    allow: dict[str, list[Annotated[str, Field(min_length=1)]]] = Field(
        default={}, description="patterns of keys, without places in lists, and the patterns of values there"
    )


class BadTrust(ValueError):
    """An allow-list that cannot be used; one sentence."""


@dataclass(frozen=True)
class Trust:
    """The level of a fleet, and its allow-list."""

    level: str = OPEN
    allow: Mapping[str, list[str]] = field(default_factory=dict)

    def problems(self, spec: Mapping[str, Any], free: tuple[Path, ...] = ()) -> Iterator[KeyProblemView]:
        """A problem for each value of a spec that is code or reach and not allowed; paths below `free` are."""
        if self.level == OPEN:
            return
        for key, value in _leaves(spec, ""):
            what = _what(key, value)
            if what and not self._allowed(key, value, free):
                reason = f"is {what}, and this fleet is contained"
                fix = f"leave it out, or ask an admin to allow it: allow: {{{_plain(key)}: [{str(value)[:80]}]}}"
                yield problem(key, reason, fix)

    def _allowed(self, key: str, value: Any, free: tuple[Path, ...]) -> bool:
        text, plain = str(value), _plain(key)
        texts = [text]
        if _is_here(key, text):
            texts = [text := os.path.abspath(text)]
        if text.startswith("/"):
            path, colon, rest = text.partition(".py:")
            where = Path(path + colon.removesuffix(":")).resolve()  # a link is what it leads to
            if not colon and any(where.is_relative_to(folder.resolve()) for folder in free):
                return True
            texts.append(f"{where}:{rest}" if colon else str(where))
        patterns = [each for name, found in self.allow.items() if fnmatchcase(plain, name) for each in found]
        return all(any(fnmatchcase(each, pattern) for pattern in patterns) for each in texts)


def read_trust(level: str, path: Path | None) -> Trust:
    """The trust of a fleet by its level and the file of its allow-list; raises BadTrust."""
    if level not in (OPEN, CONTAINED):
        raise BadTrust(f"{level[:40]!r} is no level; use {OPEN} or {CONTAINED}")
    if path is None:
        return Trust(level)
    if level == OPEN:
        raise BadTrust(f"{path} allows what an open fleet allows already; set the level to {CONTAINED}")
    try:
        found = AllowList.model_validate(read_yaml(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, YamlProblem) as error:
        raise BadTrust(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        first = explain(error, AllowList)[0]
        raise BadTrust(f"{path}: {first.key}: {first.problem}; {first.fix}") from error
    return Trust(level, found.allow)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{index}]")
    elif value is not None:
        yield key, value


def _plain(key: str) -> str:
    return re.sub(r"\[\d+\]", "", key)


def _what(key: str, value: Any) -> str:
    """What a value would execute or open, in words; empty for one that does neither."""
    if any(fnmatchcase(_plain(key), each) for each in TEXTS):
        return ""
    if _plain(key).rpartition(".")[2] == "trust_remote_code" and value:
        return "a model's own code"
    opening = SWITCHES.get(_plain(key).rpartition(".")[2], ())
    if any(value is each or value == each for each in opening if type(each) is type(value)):
        return "what opens a wall"
    if COMMANDS.fullmatch(key):
        return "a command"
    if not isinstance(value, str) or not value:
        return ""
    if HOSTS.fullmatch(key):
        return "an address"
    if VARIABLES.fullmatch(key):
        return "a variable of the fleet's"
    if _PYTHON.search(value) or (NAMES.fullmatch(key) and _MODULE.fullmatch(value)):
        return "code of one's own"
    if _REFERENCE.match(value):
        return "a secret of the fleet's"
    if _ADDRESS.search(value):
        return "an address"
    if CLASSES.fullmatch(key):
        return "code of one's own"
    if value.startswith(("/", "~", "./")) or _UP.search(value) or _is_here(key, value):
        return "a path"
    return ""


def _is_here(key: str, value: str) -> bool:
    """Whether a value names something in the folder that the fleet was started in: a file, and no model of a hub."""
    named = "/" in value or "." in value or _PATHS.fullmatch(key)
    return bool(named) and len(value) < 1024 and not value.startswith(("/", "~")) and os.path.exists(value)


def foreign_paths(spec: Any, data_dir: Path, sees: Callable[[str], bool]) -> Iterator[KeyProblemView]:
    """A problem for each text that, as a path, leads into another's run or the fleet's own files, over links too."""
    for key, value in _leaves(spec, ""):
        if not _is_path(value) or "/" not in value or (place := _place(value, data_dir)) is None:
            continue
        if place[:1] == ("runs",) and len(place) > 1:
            if not sees(place[1]):
                yield problem(key, f"there is no {value[:200]}", OWN)
        elif place[:1] != ("models",):
            yield problem(key, f"{value[:200]} is the fleet's own", OWN)


def holding_paths(spec: Any, data_dir: Path) -> Iterator[KeyProblemView]:
    """A problem for each folder of a spec in which the data directory lies: what reads it would find all runs there."""
    for key, value in _leaves(spec, ""):
        if _is_path(value) and _FOLDERS.fullmatch(key):
            found = os.path.realpath(os.path.expanduser(value)).rstrip("/") + "/"
            if os.path.realpath(data_dir).startswith(found):
                yield problem(key, f"the fleet's own files are below {value[:200]}", OWN)


def _is_path(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) < 4096 and "\0" not in value


def _place(text: str, data_dir: Path) -> tuple[str, ...] | None:
    """The parts of a path, `file:` before it or not, behind the data directory; None for one that leads elsewhere."""
    path, _, _ = text.removeprefix("file:").partition(".py:")
    base = os.path.realpath(data_dir)
    found = os.path.realpath(os.path.expanduser(path if os.path.isabs(path) else os.path.abspath(path)))
    if found != base and not found.startswith(base + os.sep):
        return None
    return Path(found).relative_to(base).parts
