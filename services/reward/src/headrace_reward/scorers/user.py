"""A user's own scorer, `path/to/file.py:function`. Runs the file: called in child processes only."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from headrace_reward.scorers.base import Answer, Score, ScorerError

SIGNATURE = (
    "def score(prompt: str, completion: str, reference: str, metadata: dict) -> float | dict[str, float]"
)


def is_user_scorer(name: str) -> bool:
    """Whether a name means a file rather than a registered scorer."""
    return ".py:" in name or name.endswith(".py")


class UserScorer:
    """Calls the user's function."""

    def __init__(self, function: Callable[[str, str, str, Mapping[str, object]], Score]) -> None:
        self._function = function

    def score(self, answer: Answer) -> Score:
        """What the function returns."""
        return self._function(answer.prompt, answer.completion, answer.reference, dict(answer.metadata or {}))


def locate(name: str, directory: Path) -> tuple[Path, str]:
    """Splits a name into an existing file and a function's name.

    Raises:
        ScorerError: there is no such file, or the function is not named.
    """
    path_text, _, function = name.rpartition(":")
    if not path_text or not function.isidentifier():
        raise ScorerError("name", f"{name}: name the function too, as {name.split(':')[0]}:score")
    path = (directory / path_text).resolve()
    if not path.is_file():
        raise ScorerError("name", f"{name}: no such file {path}; paths start at {directory} or are absolute")
    return path, function


def load(path: Path, function_name: str) -> UserScorer:
    """Imports the file and takes the function; whatever the file raises goes through.

    Raises:
        ScorerError: the function is missing or takes other arguments.
    """
    function = getattr(_import(path), function_name, None)
    if not callable(function):
        raise ScorerError("name", f"{path}: there is no function {function_name!r}; write {SIGNATURE}")
    try:
        inspect.signature(function).bind("", "", "", {})
    except TypeError as error:
        raise ScorerError("name", f"{path}:{function_name}: {error}; write {SIGNATURE}") from error
    return UserScorer(function)


def _import(path: Path) -> ModuleType:
    module_name = f"headrace_user_scorer_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ScorerError("name", f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Its neighbours are importable, as when the file is run as a script.
    sys.path.insert(0, str(path.parent))
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
