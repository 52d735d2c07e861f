"""Loads scorers, tries them on a probe, judges answers. Runs in child processes; knows no pipe and no weight.

Scorers are other people's code and may raise anything: `_call` is the one place that catches it all.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeVar

from headrace_reward import scorers
from headrace_reward.scorers.base import Answer, Score, Scorer, ScorerError

_RESULT = TypeVar("_RESULT")
# Raised by a scorer's own code whatever the answer is: the scorer is at fault, and its author can mend it.
_CODE_FAULTS = (SyntaxError, ImportError, NameError)
_BLANK = Answer(prompt="", completion="", reference="", metadata={})
_MODULE = "headrace_user_scorer_"
SIGNATURE = (
    "def score(prompt: str, completion: str, reference: str, metadata: dict) -> float | dict[str, float]"
)


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
    """Calls the user's function, in whose folder it may import."""

    def __init__(
        self, function: Callable[[str, str, str, Mapping[str, object]], Score], folder: _Folder
    ) -> None:
        self._function, self._folder = function, folder

    def score(self, answer: Answer) -> Score:
        """What the function returns."""
        self._folder.activate()
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


def _load_user_scorer(path: Path, function_name: str) -> UserScorer:
    """Imports the file and takes the function; whatever the file raises goes through.

    Raises:
        ScorerError: the function is missing or takes other arguments.
    """
    folder = _Folder.of(path.parent)
    folder.activate()
    function = getattr(_import(path), function_name, None)
    if not callable(function):
        raise ScorerError("name", f"{path}: there is no function {function_name!r}; write {SIGNATURE}")
    try:
        inspect.signature(function).bind("", "", "", {})
    except TypeError as error:
        raise ScorerError("name", f"{path}:{function_name}: {error}; write {SIGNATURE}") from error
    return UserScorer(function, folder)


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


@dataclass(frozen=True)
class Raised:
    """Other people's code raised."""

    error: BaseException
    detail: str


@dataclass(frozen=True)
class LoadedScorer:
    """A scorer that can be called."""

    part: str
    """Name of its score among the parts; unique within its set."""
    scorer: Scorer
    digest: str
    """Over its code and the versions of the packages it stands on."""


@dataclass(frozen=True)
class Judgement:
    """What the scorers of a set said about one answer."""

    parts: Mapping[str, float]
    scores: Mapping[str, float]
    """One score a scorer, by part name: what the weights apply to."""
    fault: Literal["", "answer", "scorer"] = ""
    detail: str = ""


def load(name: str, options: Mapping[str, Any], part: str, directory: Path) -> LoadedScorer:
    """Makes one scorer.

    Raises:
        ScorerError: there is none, its options are wrong, or its code cannot be imported.
    """
    made = _call(lambda: _build(name, options, directory))
    if isinstance(made, Raised):
        if isinstance(made.error, ScorerError):
            raise made.error
        raise ScorerError("name", f"{name} cannot be loaded: {made.detail}")
    return LoadedScorer(part, *made)


def probe(loaded: LoadedScorer) -> None:
    """Tries a scorer on a blank question.

    Raises:
        ScorerError: its code is at fault whatever the answer, or it returns no number.
    """
    tried = _call(_scoring(loaded, _BLANK))
    if isinstance(tried, Raised):
        # Anything else may be the blank question's fault; if it is not, the first answer says so.
        if isinstance(tried.error, _CODE_FAULTS):
            raise ScorerError("name", f"{loaded.part} fails on any answer: {tried.detail}")
    elif (wrong := _type_fault(tried)) is not None:
        raise ScorerError("name", f"{loaded.part} {wrong}; return a float, or a dict of floats")


def judge(loaded: list[LoadedScorer], answer: Answer) -> Judgement:
    """Asks every scorer of a set, until one fails."""
    parts: dict[str, float] = {}
    scores: dict[str, float] = {}
    for each in loaded:
        said = _call(_scoring(each, answer))
        if isinstance(said, Raised):
            fault: Literal["answer", "scorer"] = "scorer" if _broken(each, answer) else "answer"
            return Judgement(parts, scores, fault, f"{each.part}: {said.detail}")
        wrong = _type_fault(said) or _value_fault(said)
        if wrong is not None:
            return Judgement(parts, scores, "scorer", f"{each.part} {wrong}")
        if isinstance(said, Mapping):
            parts.update({f"{each.part}/{key}": float(value) for key, value in said.items()})
        scores[each.part] = parts[each.part] = _total(said)
    return Judgement(parts, scores)


def _scoring(each: LoadedScorer, answer: Answer) -> Callable[[], Score]:
    return lambda: each.scorer.score(answer)


def _build(name: str, options: Mapping[str, Any], directory: Path) -> tuple[Scorer, str]:
    if is_user_scorer(name):
        if options:
            raise ScorerError("options", "a scorer of your own takes no options; put them into its file")
        path, function = locate(name, directory)
        return _load_user_scorer(path, function), _digest_of(path.read_bytes(), ())
    chosen = scorers.choose(name, options)
    source = inspect.getsourcefile(inspect.unwrap(chosen.plugin.factory()))
    code = Path(source).read_bytes() if source else b""
    return chosen.build(), _digest_of(code, chosen.plugin.packages)


def _digest_of(code: bytes, packages: tuple[str, ...]) -> str:
    versions = ",".join(f"{package}=={metadata.version(package)}" for package in packages)
    return hashlib.blake2b(code + b"\0" + versions.encode(), digest_size=16).hexdigest()


def _broken(each: LoadedScorer, answer: Answer) -> bool:
    """Whether the same question fails with any answer: the right one, none, a number."""
    probes = {answer.reference, "", "0"} - {answer.completion}
    return all(
        isinstance(_call(_scoring(each, replace(answer, completion=text, token_count=0))), Raised)
        for text in sorted(probes)
    )


def _total(said: Score) -> float:
    return math.fsum(map(float, said.values())) if isinstance(said, Mapping) else float(said)


def _type_fault(said: object) -> str | None:
    for key, value in said.items() if isinstance(said, Mapping) else [(None, said)]:
        # numpy and torch scalars have __float__; text that float() would read has not.
        if not (hasattr(type(value), "__float__") and (key is None or isinstance(key, str))):
            where = "" if key is None else f" for {key!r}"
            return f"returned {type(value).__name__}{where}, not a number"
    return None


def _value_fault(said: Score) -> str | None:
    number = _call(lambda: _total(said))
    if isinstance(number, Raised):
        return f"returned what is no number: {number.detail}"
    return None if math.isfinite(number) else f"returned {number}, not a finite number"


def _call(function: Callable[[], _RESULT]) -> _RESULT | Raised:
    try:
        return function()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - other people's code raises anything
        return Raised(error, _describe(error))


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"
