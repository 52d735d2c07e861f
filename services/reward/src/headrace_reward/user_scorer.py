"""Functions of a user's file as scorers: found, imported beside their neighbours, called by their parameters' names.

No argument is given by its place alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

from headrace_servicekit.process.confine import explained

from headrace_reward.scorers.base import Answer, ScorerError

SIGNATURE = "def score(prompt: str, completion: str, reference: str, metadata: dict) -> float | dict[str, float] | None"


def _turns(answer: Answer, text: str, role: str) -> Any:
    """As TRL gives it: text, or messages where the data's prompts are messages."""
    return [{"role": role, "content": text}] if answer.messages else text


def _tokens(answer: Answer) -> Answer:
    """The answer, where its tokens are known."""
    if not answer.prompt_ids:
        raise LookupError(
            "it takes tokens, and this answer comes without: of a file, write raw_prompt, raw_completion, prompt_ids "
            "and completion_ids"
        )
    return answer


def _group(answer: Answer) -> list[str]:
    if not answer.group:
        raise LookupError(
            "it takes the group, which only stages that wait for groups have (reward.give: [group])"
        )
    return list(answer.group)


def _ground_truth(answer: Answer) -> Any:
    """As the row of verl has it: a number stays one, and an object too. `data.options.answer` may name another text,
    to learn from; the reference is of rows without one."""
    section = (answer.metadata or {}).get("reward_model")
    given = section.get("ground_truth") if isinstance(section, Mapping) else None
    return answer.reference if given is None else given


SINGLE: dict[str, Callable[[Answer], Any]] = {
    "prompt": lambda answer: answer.prompt,
    "completion": lambda answer: answer.completion,
    "reference": lambda answer: answer.reference,
    "metadata": lambda answer: dict(answer.metadata or {}),
    "messages": lambda answer: list(answer.messages),
    "finish_reason": lambda answer: answer.finish_reason,
    "token_count": lambda answer: answer.token_count,
    "raw_prompt": lambda answer: _tokens(answer).raw_prompt,
    "raw_completion": lambda answer: _tokens(answer).raw_completion,
    "prompt_ids": lambda answer: list(_tokens(answer).prompt_ids),
    "completion_ids": lambda answer: list(_tokens(answer).completion_ids),
    "group": lambda answer: _group(answer),
    "episode": lambda answer: answer.episode,
    # verl
    "data_source": lambda answer: (answer.metadata or {}).get("data_source", ""),
    "solution_str": lambda answer: answer.completion,
    "ground_truth": _ground_truth,
    "extra_info": lambda answer: dict((answer.metadata or {}).get("extra_info") or {}),
}
"""What a parameter of a function of one answer gets."""
BATCHED: dict[str, Callable[[Answer], Any]] = {
    "prompts": lambda answer: list(answer.messages) or answer.prompt,
    "completions": lambda answer: _turns(answer, answer.completion, "assistant"),
    "references": lambda answer: answer.reference,
    "metadata": lambda answer: dict(answer.metadata or {}),
    "messages": lambda answer: list(answer.messages),
    "finish_reasons": lambda answer: answer.finish_reason,
    "token_counts": lambda answer: answer.token_count,
    "episodes": lambda answer: answer.episode,
    "raw_prompts": lambda answer: _tokens(answer).raw_prompt,
    "raw_completions": lambda answer: _tokens(answer).raw_completion,
    "groups": lambda answer: _group(answer),
    # TRL
    "prompt_ids": lambda answer: list(_tokens(answer).prompt_ids),
    "completion_ids": lambda answer: list(_tokens(answer).completion_ids),
    # verl
    "data_sources": lambda answer: SINGLE["data_source"](answer),
    "solution_strs": lambda answer: answer.completion,
    "ground_truths": _ground_truth,
    "extra_infos": lambda answer: SINGLE["extra_info"](answer),
}
"""What each entry of a parameter of a function of batches is of one answer."""
MARKS = ("completions", "solution_strs")
"""The parameters by which a function of batches is known."""
OF_TOKENS = frozenset(
    {"raw_prompt", "raw_completion", "raw_prompts", "raw_completions", "prompt_ids", "completion_ids"}
)
"""Parameters that need `reward.give: [tokens]`."""
OF_GROUP = frozenset({"group", "groups"})
"""Parameters that need `reward.give: [group]`."""
OF_TRL_ALONE = ("trainer_state", "log_extra", "log_metric")
"""What only TRL's own trainer can give; functions that take `**kwargs` do without."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of one function. `columns` are parameters that get the data's column of that name."""

    names: tuple[str, ...]
    batched: bool
    columns: tuple[str, ...] = ()
    others: bool = False
    """The function takes `**kwargs`: of a batch, all other columns of the data."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The spec's, which verl calls reward_kwargs: the same for each answer."""

    @classmethod
    def of_function(
        cls,
        function: Callable[..., Any],
        give: Collection[str] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Arguments:
        """Reads a function's parameters; `give` is `reward.give`, `options` are values for parameters of its own.

        Raises TypeError naming a parameter that gets nothing, or an option that no parameter takes.
        """
        parameters = inspect.signature(function).parameters.values()
        if any(each.kind is each.VAR_POSITIONAL for each in parameters):
            raise TypeError("it takes *args, but arguments are given by name")
        named = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
        others = len(named) < len(parameters)
        if places := [each.name for each in named if each.kind is each.POSITIONAL_ONLY]:
            raise TypeError(f"its parameter {places[0]!r} can only be given by place")
        batched = any(each.name in MARKS for each in named)
        known = BATCHED if batched else SINGLE
        for name in (each.name for each in named):
            for what, those in (("tokens", OF_TOKENS), ("group", OF_GROUP)):
                if name in known and name in those and what not in give:
                    raise TypeError(f"it takes {name!r}, which scorers get with reward.give: [{what}]")
        if taken := sorted(name for name in options if name.lstrip("_") in known):
            raise TypeError(
                f"the option {taken[0]!r} is a parameter that the run itself gives; call it otherwise"
            )
        if not others and (lost := sorted(options.keys() - {each.name for each in named})):
            raise TypeError(f"it has no parameter {lost[0]!r}, which the options give")
        unknown = [each for each in named if each.name.lstrip("_") not in known and each.name not in options]
        wanted = [each.name for each in unknown if each.default is each.empty]
        if batched and (of_trl := [name for name in wanted if name in OF_TRL_ALONE]):
            raise TypeError(f"it takes {of_trl[0]!r}, which only TRL's trainer has")
        if wanted and not batched:
            raise TypeError(f"its parameter {wanted[0]!r} is none of {', '.join(known)}")
        names = tuple(each.name for each in named if each.name.lstrip("_") in known)
        if not names:
            raise TypeError(f"it takes none of {', '.join(known)}")
        return cls(names, batched, tuple(wanted), others, dict(options))

    def of(self, answer: Answer) -> dict[str, Any]:
        """The arguments of one answer; those of a function of batches are lists of one."""
        if self.batched:
            return self.of_batch([answer])
        return {**self.options, **{name: SINGLE[name.lstrip("_")](answer) for name in self.names}}

    def of_batch(self, answers: list[Answer]) -> dict[str, Any]:
        """The arguments of several answers. Raises LookupError naming a column that an item lacks."""
        given: dict[str, Any] = dict(self.options)
        given |= {name: [BATCHED[name.lstrip("_")](answer) for answer in answers] for name in self.names}
        rows = [_columns(answer) for answer in answers]
        columns = dict.fromkeys(
            [*self.columns, *((name for row in rows for name in row) if self.others else ())]
        )
        for name in columns:
            if name in given:
                continue
            if (
                name in self.columns
                and (lacking := next((row for row in rows if name not in row), None)) is not None
            ):
                known = ", ".join(lacking) or "none"
                raise LookupError(f"it takes the column {name!r}, which an item lacks; columns: {known}")
            given[name] = [row.get(name) for row in rows]
        return given


def _columns(answer: Answer) -> Mapping[str, Any]:
    """The columns of an item, as far as the answers of a row travel."""
    return {"answer": answer.reference, **(answer.metadata or {})}


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
    path = (directory / path_text).absolute()  # a link, as a cache of files has them, keeps its own name
    try:
        found, closed = path.is_file(), ""
    except PermissionError as error:  # by users' code, which may be another user than who wrote the file
        found, closed = False, f" that its user may see{explained(error)}"
    if not found:
        reason = f"no such file {path}{closed}; paths start at {directory} or are absolute"
        raise ScorerError("name", f"{name}: {reason}")
    return path, function


def load_user_scorer(
    path: Path,
    function_name: str,
    give: Collection[str] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> UserScorer:
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
        return UserScorer(function, Arguments.of_function(function, give, options), folder)
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
