"""Functions of a user's file as scorers: found, imported beside their neighbours, called by their parameters' names."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from headrace_reward.arguments import SIGNATURE, Arguments
from headrace_reward.scorers.base import Answer, ScorerError

_MODULE = "headrace_user_scorer_"


def is_user_scorer(name: str) -> bool:
    """Whether a name means a file rather than a registered scorer."""
    return ".py:" in name or name.endswith(".py")


class _Folder:
    """The folder of user scorers. Their neighbours are importable while it is the active one.

    Two folders may have modules of one name, so those of the others are taken out of `sys.modules`.
    """

    _known: ClassVar[dict[Path, _Folder]] = {}
    _active: ClassVar[_Folder | None] = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own: dict[str, ModuleType] = {}
        self._count = 0

    @classmethod
    def of(cls, path: Path) -> _Folder:
        """The one object of a folder in this process."""
        return cls._known.setdefault(path, cls(path))

    def activate(self) -> None:
        """Makes this folder's modules importable in place of the former folder's."""
        if _Folder._active is self:
            return
        if _Folder._active is not None:
            _Folder._active._deactivate()
        _Folder._active = self
        sys.path.insert(0, str(self._path))
        sys.modules.update(self._own)
        self._count = len(sys.modules)

    def _deactivate(self) -> None:
        if len(sys.modules) != self._count:  # It has imported something since: most calls import nothing.
            tops = {name for name in sys.modules if "." not in name and self._holds(name)}
            self._own = {
                name: module for name, module in sys.modules.items() if name.partition(".")[0] in tops
            }
        for name in self._own:
            sys.modules.pop(name, None)
        with suppress(ValueError):
            sys.path.remove(str(self._path))

    def _holds(self, name: str) -> bool:
        """Whether a top-level module was imported from this folder."""
        module = sys.modules[name]
        file, folders = getattr(module, "__file__", None), list(getattr(module, "__path__", ()))
        if name.startswith(_MODULE):  # A user's own file, under a name of its own.
            return False
        return (file is not None and Path(file).parent == self._path) or str(self._path / name) in folders


class UserScorer:
    """Calls the user's function, in whose folder it may import.

    What comes back may be a coroutine; of a function of batches it is a sequence, one entry an answer.
    """

    def __init__(self, function: Callable[..., Any], arguments: Arguments, folder: _Folder) -> None:
        self._function, self._arguments, self._folder = function, arguments, folder
        self.batched = arguments.batched
        self.concurrent = inspect.iscoroutinefunction(function)

    def score(self, answer: Answer) -> Any:
        """What the function returns of one answer: a coroutine where it is one."""
        self._folder.activate()
        return self._function(**self._arguments.of(answer))

    def score_batch(self, answers: list[Answer]) -> Any:
        """What a function of batches returns of several answers."""
        self._folder.activate()
        return self._function(**self._arguments.of_batch(answers))


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


def load_user_scorer(path: Path, function_name: str, give: Collection[str] = ()) -> UserScorer:
    """Imports the file and takes the function; whatever the file raises goes through. `give` is `reward.give`.

    Raises:
        ScorerError: the function is missing or takes arguments that nobody can give it.
    """
    folder = _Folder.of(path.parent)
    folder.activate()
    function = getattr(_import(path), function_name, None)
    if not callable(function):
        raise ScorerError("name", f"{path}: there is no function {function_name!r}; write {SIGNATURE}")
    try:
        return UserScorer(function, Arguments.of_function(function, give), folder)
    except TypeError as error:
        raise ScorerError("name", f"{path}:{function_name}: {error}; write {SIGNATURE}") from error


def _import(path: Path) -> ModuleType:
    place = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    module_name = f"{_MODULE}{path.stem}_{place}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ScorerError("name", f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
