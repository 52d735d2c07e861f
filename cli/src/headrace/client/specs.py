"""Run specs from files, with `a.b=c` overrides. Knows no schema: keys are the coordinator's to judge."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.client.errors import HeadraceError, Problem
from headrace_schema.yaml_text import YamlProblem, read_yaml

if TYPE_CHECKING:
    from headrace.client.models import Run

Spec = Mapping[str, Any] | str | Path
Overrides = Mapping[str, Any] | Iterable[str]


def _mistake(key: str, problem: str, fix: str) -> HeadraceError:
    return HeadraceError("INVALID", f"{key}: {problem}", [Problem(key, problem, fix)], status=422)


def load_spec(spec: Spec, overrides: Overrides = ()) -> dict[str, Any]:
    """The spec as a dictionary of its own, overrides applied.

    `spec` is a dictionary or the path of a YAML file. `overrides` is a dictionary of dotted keys, or a list
    of `key=value` whose values are read as YAML. Raises HeadraceError INVALID for files that cannot be read
    and for keys that do not lead into a mapping or a list.

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
    return loaded


def fork_spec(run: Run, at: int | None = None, overrides: Overrides = ()) -> dict[str, Any]:
    """The spec of a run that continues from a checkpoint of `run`: of step `at`, or the newest valid one."""
    return load_spec({**run.spec, "from_checkpoint": {"run": run.id, "step": at}}, overrides)


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _mistake(
            str(path), f"cannot be read ({error.strerror})", "name an existing YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise _mistake(str(path), f"is not UTF-8 at byte {error.start}", "save it as UTF-8") from error
    except YamlProblem as error:
        raise _mistake(str(path), str(error), error.fix) from error
    if not isinstance(loaded, dict):
        raise _mistake(str(path), "is not a mapping of keys", "start from one of the files in examples/")
    _make_absolute(loaded, path.parent)
    return loaded


def _make_absolute(spec: dict[str, Any], folder: Path) -> None:
    """Existing files and directories by absolute path: the services have another working directory."""
    _absolute(spec.get("model"), "path", folder)
    trainer = spec.get("trainer")
    _absolute(trainer.get("warmup") if isinstance(trainer, dict) else None, "demonstrations", folder)
    data = spec.get("data")
    _absolute(data.get("options") if isinstance(data, dict) else None, "path", folder)
    suite = spec.get("suite")
    options = suite.get("options") if isinstance(suite, dict) else None
    _absolute(options, "path", folder)
    _absolute(options, "dataset", folder)
    _absolute(options.get("options") if isinstance(options, dict) else None, "path", folder)
    reward = spec.get("reward")
    if isinstance(reward, dict):
        stages = reward.get("stages")
        found = [reward.get("scorers"), reward.get("evaluation")]
        found += stages.values() if isinstance(stages, dict) else []
        for scorers in found:
            for scorer in scorers if isinstance(scorers, list) else []:
                _absolute(scorer, "name", folder)


def _absolute(section: Any, key: str, folder: Path) -> None:
    """Relative to the spec's folder, else to the working directory; `file.py:function` keeps its function."""
    name = section.get(key) if isinstance(section, dict) else None
    if not isinstance(name, str) or not name:
        return
    file, colon, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    for place in (folder, Path.cwd()):
        if (place / file).exists() and ("/" in file or colon):
            section[key] = f"{(place / file).resolve()}{colon}{function}"
            return


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
        raise _mistake(key, f"{here} is a {type(target).__name__}, not a section", f"override {here} itself")
    if not part.isdigit() or int(part) >= len(target):
        raise _mistake(key, f"{here} is a list of {len(target)}", f"use {here}.0 to {here}.{len(target) - 1}")
    return int(part)
