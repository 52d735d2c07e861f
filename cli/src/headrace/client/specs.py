"""Run specs from files, with `a.b=c` overrides. Knows no schema: keys are the coordinator's to judge."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.client.errors import HeadraceError, Problem
from headrace_schema.yaml_text import YamlProblem, read_yaml

if TYPE_CHECKING:
    from headrace.client.models import Run

Spec = Mapping[str, Any] | str | Path
Overrides = Mapping[str, Any] | Iterable[str]
CHECK_S = 120.0
"""Beside the scorers' loading: a coordinator waits for instances that are being restarted, and for an environment."""


def _mistake(key: str, problem: str, fix: str) -> HeadraceError:
    return HeadraceError("INVALID", f"{key}: {problem}; {fix}", [Problem(key, problem, fix)], status=422)


def load_spec(spec: Spec, overrides: Overrides = ()) -> dict[str, Any]:
    """The spec as a dictionary of its own, overrides applied.

    `spec` is a dictionary or the path of a YAML file. `overrides` is a dictionary of dotted keys, or a list
    of `key=value` whose values are read as YAML. Raises HeadraceError INVALID for files that cannot be read
    and for keys that do not lead into a mapping or a list.

    Paths, those of overrides too, are relative to the file's folder, else to the working directory, and come back
    absolute; `~` and `$VAR` are expanded.

    List items are numbered: `reward.scorers.0.weight=2` or `reward.scorers[0].weight=2`.

    >>> load_spec({"steps": 1, "optimizer": {}}, ["steps=20", "optimizer.lr=1.0e-5"])
    {'steps': 20, 'optimizer': {'lr': 1e-05}}
    """
    loaded: dict[str, Any] = copy.deepcopy(dict(spec)) if isinstance(spec, Mapping) else _read(Path(spec))
    for key, value in _pairs(overrides):
        _assign(loaded, key, value)
    try:
        json.dumps(loaded, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        fix = "use texts, finite numbers, truth values, lists and dictionaries"
        raise _mistake("the spec", f"cannot be written as JSON ({error})", fix) from error
    folder = Path.cwd() if isinstance(spec, Mapping) else Path(spec).parent
    _make_paths_absolute(loaded, folder)
    for path in PATHS:
        _make_absolute(loaded, path.split("."), folder)
    return loaded


def fork_spec(run: Run, at: int | None = None, overrides: Overrides = ()) -> dict[str, Any]:
    """The spec of a run that continues from a checkpoint of `run`: of step `at`, or the newest valid one."""
    own = {key: value for key, value in run.spec.items() if key != "after"}
    return load_spec({**own, "from_checkpoint": {"run": run.id, "step": at}}, overrides)


def load_specs(spec: Spec, overrides: Overrides = ()) -> list[dict[str, Any]]:
    """As `load_spec`, of each document of a YAML file; overrides apply to the only one.

    A document whose `after` names one before it follows that one. Raises HeadraceError INVALID.
    """
    documents = [spec] if isinstance(spec, Mapping) else _documents(Path(spec))
    if len(documents) == 1:
        return [load_spec(spec, overrides)]
    if [*_pairs(overrides)]:
        fix = "write the values into the file, or submit its documents one by one"
        raise _mistake(str(spec), f"has {len(documents)} runs, and an override is of one", fix)
    assert not isinstance(spec, Mapping)
    folder = Path(spec).parent
    found = [load_spec(document) for document in documents]
    for each in found:
        _make_paths_absolute(each, folder)
        for path in PATHS:
            _make_absolute(each, path.split("."), folder)
    return found


def _read(path: Path) -> dict[str, Any]:
    found = _documents(path)
    if len(found) > 1:
        fix = "submit it with `headrace run submit`, which takes several"
        raise _mistake(str(path), f"has {len(found)} documents, and one run is asked about", fix)
    return found[0]


def _documents(path: Path) -> list[dict[str, Any]]:
    """The mappings that a YAML file holds, at least one."""
    try:
        text = path.read_text(encoding="utf-8")
        starts = [0, *(each.end() for each in DOCUMENTS.finditer(text)), len(text)]
        parts = [(text.count("\n", 0, first), text[first:last]) for first, last in pairwise(starts)]
        # Blank lines in the place of other documents: problems name lines of the file.
        found = ["\n" * above + DOCUMENTS.sub("", part) for above, part in parts if CONTENT.search(part)]
        loaded = [read_yaml(part) for part in found] or [None]
    except OSError as error:
        raise _mistake(
            str(path), f"cannot be read ({error.strerror})", "name an existing YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise _mistake(str(path), f"is not UTF-8 at byte {error.start}", "save it as UTF-8") from error
    except YamlProblem as error:
        raise _mistake(str(path), str(error), error.fix) from error
    if not all(isinstance(each, dict) for each in loaded):
        raise _mistake(str(path), "is not a mapping of keys", "start from one of the files in examples/")
    return loaded


DOCUMENTS = re.compile(r"^---(?=\s|$)", re.MULTILINE)
"""What begins a document of a YAML file."""
CONTENT = re.compile(r"^(?!---(?:\s|$))[ \t]*[^#\s]", re.MULTILINE)
PATHS = (
    "rollout.engine_options.speculative.model",
    "trainer.warmup.demonstrations",
    *(
        f"{options}.{key}"
        for options in ("data.options", "evaluation.data.*.options", "suite.options", "suite.options.options")
        for key in ("dataset", "parts.*.options.dataset")
    ),
    "reward.scorers.*.name",
    "reward.evaluation.*.name",
    "reward.stages.*.*.name",
    *(
        f"{environment}.{key}"
        for environment in ("environment", "suite.options.environment")
        for key in (
            "tasks.*",
            "instructions.@",
            "options.tools.*",
            "options.mcp.*.command.*",
        )
    ),
    "agent.python",
    "agent.command.*",
    "agent.task",
)
"""Keys whose values may be paths (behind @: the keys below it), beside all of `PATH_KEYS`; in those of `NAMES` a word
without a slash or a suffix may be something else.
"""
PATH_KEYS = re.compile(r"path|\w+_path")
"""Last parts of keys, wherever they stand, whose values are paths."""
FILE_REFERENCE = re.compile(r"((?:\w+ )?file:)(?!//)(\S[^\n]*)")
"""A secret that lies in a file."""
NAMES = ("name", "dataset", "task")


def _make_paths_absolute(spec: Any, folder: Path) -> None:
    """Makes the values of `PATH_KEYS`, and references to files, absolute, in place and at every depth."""
    for key, value in spec.items() if isinstance(spec, dict) else enumerate(spec):
        if isinstance(value, dict | list):
            _make_paths_absolute(value, folder)
        elif isinstance(value, str) and value and PATH_KEYS.fullmatch(str(key)):
            spec[key] = _absolute(value, folder, named=False)
        elif isinstance(value, str) and (found := FILE_REFERENCE.fullmatch(value)):
            spec[key] = found[1] + _absolute(found[2], folder, named=False)


def _make_absolute(spec: Any, keys: Sequence[str], folder: Path) -> None:
    """Makes a path below a key absolute, in place: the services have another home and another working directory."""
    key, rest = keys[0], keys[1:]
    if rest:
        if isinstance(spec, dict):
            below = list(spec.values()) if key == "*" else [spec.get(key)]
        else:
            below = spec if key == "*" and isinstance(spec, list) else []
        for each in below:
            _make_absolute(each, rest, folder)
    elif key == "@" and isinstance(spec, dict):
        named = {_absolute(name, folder, named=True): value for name, value in spec.items()}
        spec.clear()
        spec.update(named)
    elif key == "*" and isinstance(spec, list):
        spec[:] = [_absolute(each, folder, named=True) if isinstance(each, str) else each for each in spec]
    elif isinstance(spec, dict) and isinstance(spec.get(key), str) and spec[key]:
        spec[key] = _absolute(spec[key], folder, named=key in NAMES)


def _absolute(text: str, folder: Path, *, named: bool) -> str:
    """Relative to the spec's folder, else to the working directory; `~` and `$VAR` are this machine's.

    What is not there stays as it is: a Hugging Face id, or a path that only the services see. `file.py:function` keeps
    its function. A link stays one: a virtual environment's Python, named by what it links to, is another.
    """
    expanded = os.path.expanduser(os.path.expandvars(text))
    file, colon, function = expanded.rpartition(":") if ".py:" in expanded else (expanded, "", "")
    if named and "/" not in file and not colon:
        return text
    for place in (folder, Path.cwd()):
        if (place / file).exists():
            return f"{(place / file).absolute()}{colon}{function}"
    return expanded


def _pairs(overrides: Overrides) -> Iterable[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        yield from overrides.items()
        return
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise _mistake(item, "is not key=value", "write for example optimizer.lr=2.0e-5")
        try:
            yield key, read_yaml(text)
        except YamlProblem as error:
            fix = f"{error.fix}, or quote the value: 'key=\"a: b\"'"
            raise _mistake(key, f"{text[:80]!r} is not a YAML value: {error.problem}", fix) from error


def _assign(target: Any, key: str, value: Any) -> None:
    parts = key.replace("[", ".").replace("]", "").split(".")
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth]) or "the spec"
        position: Any = _position(target, part, here, key)
        if depth == len(parts) - 1:
            target[position] = value
        else:
            if isinstance(target, dict) and target.get(position) is None:
                target[position] = {}
            target = target[position]


def _position(target: Any, part: str, here: str, key: str) -> str | int:
    if isinstance(target, dict):
        return part
    if not isinstance(target, list):
        raise _mistake(key, f"{here} is a value ({target!r}), not a section", f"override {here} itself")
    if not part.isdigit() or int(part) >= len(target):
        raise _mistake(key, f"{here} is a list of {len(target)}", f"use {here}.0 to {here}.{len(target) - 1}")
    return int(part)


def checking_s(spec: dict[str, Any]) -> float:
    """How long a coordinator may check a spec, in seconds: a fleet loads its scorers first."""
    from headrace_schema.sections.scoring import RewardSection
    from pydantic import ValidationError

    try:
        return RewardSection.model_validate(spec.get("reward")).opening_s + CHECK_S
    except ValidationError:
        return CHECK_S  # the coordinator says what is wrong with it
