"""Loads scorers, tries them on a probe, judges answers. Runs in child processes; knows no pipe and no weight.

Scorers are other people's code and may raise anything: `_call` is the one place that catches it all.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from headrace_schema.references import Unread, resolved
from headrace_servicekit.causes import cause_first, first_of, raised
from headrace_servicekit.process.confine import explained

from headrace_reward import scorers
from headrace_reward.scorers.base import BLANK, Answer, AnswerFailed, Score, Scorer, ScorerError, Unavailable
from headrace_reward.user_scorer import UserScorer, is_user_scorer, load_user_scorer, locate

_RESULT = TypeVar("_RESULT")


class NoScores(Exception):
    """A function of batches did not return a list with one score for each answer."""


# Raised by a scorer's own code whatever the answer is: the scorer is at fault, and its author can mend it.
_CODE_FAULTS = (SyntaxError, ImportError, NameError, NoScores)
NOBODY = "every scorer abstained; of each kind of item one must return a number"
TOTAL = "score"
"""The key of a returned dict that is the whole score; the others are shown beside it."""
TURNS = "turns"
"""The key of a returned dict with the score of each turn of the policy's, which add up to the whole."""
Fault = Literal["", "answer", "scorer", "unavailable"]
_LOOP = asyncio.new_event_loop()
"""Of coroutines: one for the whole process, as their clients keep connections that belong to a loop."""


@dataclass(frozen=True)
class Raised:
    """Other people's code raised."""

    error: BaseException
    detail: str


@dataclass
class LoadedScorer:
    """A scorer that can be called."""

    part: str
    """Name of its score among the parts; unique within its set."""
    scorer: Scorer
    digest: str
    """Over its code and the versions of the packages it stands on."""
    abstains: bool = False
    """Whether it has returned None for an answer."""

    @property
    def batched(self) -> bool:
        """Whether it judges several answers in one call."""
        own = (
            self.scorer.batched
            if isinstance(self.scorer, UserScorer)
            else hasattr(self.scorer, "score_batch")
        )
        return own

    @property
    def at_once(self) -> bool:
        """Whether several answers take less than one after the other: in one call, or in coroutines."""
        if self.batched:
            return True
        if isinstance(self.scorer, UserScorer):
            return self.scorer.concurrent
        return inspect.iscoroutinefunction(self.scorer.score)


@dataclass(frozen=True)
class Judgement:
    """What the scorers of a set said about one answer."""

    parts: Mapping[str, float]
    scores: Mapping[str, float]
    """One score a scorer that did not abstain, by part name: what the weights apply to."""
    turns: Mapping[str, list[float]] = field(default_factory=dict)
    """Scores by turn, of scorers that gave them, by part name."""
    fault: Fault = ""
    detail: str = ""


def answer_of(fields: Mapping[str, Any]) -> Answer:
    """An answer by its fields as JSON, in which pictures are their shape and their bytes in base64."""
    pictures = fields.get("pictures")
    if not pictures:
        return Answer(**fields)
    import numpy as np  # whose threads a confined child, which may begin few, would not survive

    decoded = {
        camera: np.frombuffer(base64.b64decode(each["data"]), np.uint8).reshape(each["shape"])
        for camera, each in pictures.items()
    }
    return Answer(**{**fields, "pictures": decoded})


def load(
    name: str, options: Mapping[str, Any], part: str, directory: Path, give: Collection[str] = ()
) -> LoadedScorer:
    """Makes one scorer; `give` is `reward.give`.

    Raises:
        ScorerError: there is none, its options are wrong, or its code cannot be imported.
    """
    made = _call(lambda: _build(name, options, directory, give))
    if isinstance(made, Raised):
        if isinstance(made.error, ScorerError):
            raise made.error
        raise ScorerError("name", f"{name} cannot be loaded: {made.detail}")
    return LoadedScorer(part, *made)


def probe(loaded: LoadedScorer) -> None:
    """Tries a scorer on a blank question.

    Raises:
        ScorerError: its code is at fault whatever the answer, it says so itself, or it returns no number.
    """
    tried = _said(loaded, [BLANK])[0]
    if isinstance(tried, Raised):
        if isinstance(tried.error, ScorerError):
            raise tried.error
        # Anything else may be the blank question's fault; if it is not, the first answer says so.
        if isinstance(tried.error, _CODE_FAULTS):
            raise ScorerError("name", f"{loaded.part} fails on any answer: {tried.detail}")
    elif (wrong := _type_fault(tried)) is not None:
        raise ScorerError("name", f"{loaded.part} {wrong}; return a float, a dict of floats, or None")


def judge(loaded: list[LoadedScorer], answers: Sequence[Answer]) -> Iterator[Judgement]:
    """Asks every scorer of a set about each answer, until one fails; judgements come in the answers' order.

    Where a scorer judges several `at_once`, all come at once; else each as soon as it is there.
    """
    if any(each.at_once for each in loaded):
        yield from _judge_at_once(loaded, answers)
    else:
        for answer in answers:
            yield from _judge_at_once(loaded, [answer])


def _judge_at_once(loaded: list[LoadedScorer], answers: Sequence[Answer]) -> list[Judgement]:
    found = [Judgement({}, {}) for _ in answers]
    for each in loaded:
        asked = [place for place, judgement in enumerate(found) if not judgement.fault]
        for place, said in zip(asked, _said(each, [answers[place] for place in asked]), strict=True):
            found[place] = _with(found[place], each, answers[place], said)
    return [
        replace(each, fault="scorer", detail=NOBODY) if not each.scores and not each.fault else each
        for each in found
    ]


def _with(sofar: Judgement, each: LoadedScorer, answer: Answer, said: Any) -> Judgement:
    """A judgement with what one more scorer said."""
    parts, scores, turns = dict(sofar.parts), dict(sofar.scores), dict(sofar.turns)
    if isinstance(said, Raised):
        return Judgement(parts, scores, turns, *_blame(each, answer, said))
    each.abstains = each.abstains or said is None
    if each.abstains:
        parts[f"{each.part}/abstained"] = float(said is None)
    if said is None:
        return Judgement(parts, scores, turns)
    wrong = _type_fault(said) or _value_fault(said) or _turns_fault(said, answer)
    if wrong is not None:
        return Judgement(parts, scores, turns, "scorer", f"{each.part} {wrong}")
    if isinstance(said, Mapping):
        if set(said) - {TOTAL, TURNS}:  # Beside its turns alone, the total has nothing to tell.
            parts |= {f"{each.part}/{key}": float(value) for key, value in said.items() if _is_number(value)}
        if TURNS in said:
            turns[each.part] = [float(value) for value in said[TURNS]]
    scores[each.part] = parts[each.part] = _total(said)
    return Judgement(parts, scores, turns)


def _blame(each: LoadedScorer, answer: Answer, raised: Raised) -> tuple[Fault, str]:
    """Whose fault it is that a scorer raised, and what to say of it."""
    error = raised.error
    if isinstance(error, AnswerFailed):
        return "answer", f"{each.part}: {error}"
    if isinstance(error, ScorerError):
        fault: Fault = "unavailable" if isinstance(error, Unavailable) else "scorer"
        return fault, f"{each.part}: {cause_first(error.message, '', error.field)}"
    return "scorer" if _broken(each, answer) else "answer", f"{each.part}: {raised.detail}"


def _said(each: LoadedScorer, answers: Sequence[Answer]) -> list[Any]:
    """What a scorer says of each answer, or `Raised`."""
    if each.batched:
        scorer: Any = each.scorer
        said = _call(lambda: _awaited([scorer.score_batch(list(answers))])[0])
        if isinstance(said, Raised) and len(answers) > 1:  # Which one was it?
            return [one for answer in answers for one in _said(each, [answer])]
        return [said] * len(answers) if isinstance(said, Raised) else _one_each(said, len(answers))
    called = [_call(partial(each.scorer.score, answer)) for answer in answers]
    return _awaited(called)


def _one_each(said: object, count: int) -> list[Any]:
    """The entries of what a function of batches returned."""
    entries = _call(lambda: list(cast("Iterable[Any]", said)))
    if isinstance(entries, Raised) or isinstance(said, (str, Mapping)) or len(entries) != count:
        what = f"{len(entries)} scores" if isinstance(entries, list) else type(said).__name__
        reason = f"returned {what} for {count} answers; return a list with one score an answer"
        return [Raised(NoScores(reason), reason)] * count
    return entries


def _awaited(called: Sequence[Any]) -> list[Any]:
    """The results of calls, of which those that are coroutines run side by side."""
    if not any(inspect.isawaitable(each) for each in called):
        return list(called)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _LOOP.run_until_complete(_gathered(called))
    with ThreadPoolExecutor(1) as thread:  # in this process, whose own loop waits for the answer
        return thread.submit(lambda: _LOOP.run_until_complete(_gathered(called))).result()


async def _gathered(called: Sequence[Any]) -> list[Any]:
    async def result(each: Any) -> Any:
        if not inspect.isawaitable(each):
            return each
        try:
            return await each
        except (Exception, SystemExit) as error:  # noqa: BLE001 - other people's code raises anything
            return Raised(error, _describe(error))

    return list(await asyncio.gather(*map(result, called)))


def _build(
    name: str, options: Mapping[str, Any], directory: Path, give: Collection[str]
) -> tuple[Scorer, str]:
    if is_user_scorer(name):
        path, function = locate(name, directory)
        code = path.read_bytes() + json.dumps(options, sort_keys=True).encode()
        return load_user_scorer(path, function, give, _with_secrets(options)), _digest_of(code, ())
    chosen = scorers.choose(name, options)
    source = inspect.getsourcefile(inspect.unwrap(chosen.plugin.factory()))
    code = Path(source).read_bytes() if source else b""
    return scorers.built(chosen), _digest_of(code, chosen.plugin.packages)


def _with_secrets(options: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = resolved(options)
    except Unread as error:
        raise ScorerError(f"options.{error.key}", str(error)) from error
    return found


def _digest_of(code: bytes, packages: tuple[str, ...]) -> str:
    versions = ",".join(f"{package}=={metadata.version(package)}" for package in packages)
    return hashlib.blake2b(code + b"\0" + versions.encode(), digest_size=16).hexdigest()


def _broken(each: LoadedScorer, answer: Answer) -> bool:
    """Whether the same question fails with any answer: the right one, none, a number."""
    probes = {answer.reference, "", "0"} - {answer.completion}
    return all(
        isinstance(_said(each, [replace(answer, completion=text, token_count=0)])[0], Raised)
        for text in sorted(probes)
    )


def _total(said: Score) -> float:
    """The score; of a dict its `score`, as verl's functions name it, else the sum of its turns, or of all."""
    if not isinstance(said, Mapping):
        return float(said)
    if TOTAL in said:
        return float(said[TOTAL])
    return math.fsum(map(float, said[TURNS] if TURNS in said else said.values()))


def _is_number(value: object) -> bool:
    # numpy and torch scalars have __float__; text that float() would read has not.
    return hasattr(type(value), "__float__")


def _type_fault(said: object) -> str | None:
    if said is None:
        return None
    entries = dict(said).items() if isinstance(said, Mapping) else [(None, said)]
    for key, value in entries:
        if isinstance(said, Mapping) and (TOTAL in said or TURNS in said) and key != TOTAL:
            continue  # Beside a named total anything may be told; what is a number is shown.
        if not (_is_number(value) and (key is None or isinstance(key, str))):
            where = "" if key is None else f" for {key!r}"
            return f"returned {type(value).__name__}{where}, not a number"
    return None


def _value_fault(said: Score) -> str | None:
    number = _call(lambda: _total(said))
    if isinstance(number, Raised):
        return f"returned what is no number: {number.detail}"
    return None if math.isfinite(number) else f"returned {number}, not a finite number"


def _turns_fault(said: Score, answer: Answer) -> str | None:
    if not isinstance(said, Mapping) or TURNS not in said:
        return None
    turns, expected = said[TURNS], len(answer.episode["rewards"]) if answer.episode is not None else 1
    if not isinstance(turns, Sequence) or not all(_is_number(each) and math.isfinite(each) for each in turns):
        return f"returned turns that are no list of finite numbers: {str(turns)[:80]}"
    if answer == BLANK:
        return None
    if len(turns) != expected:
        return f"returned {len(turns)} turns of an answer with {expected}; return a number for each assistant turn"
    total, added = _total(said), math.fsum(map(float, turns))
    if not math.isclose(total, added, rel_tol=1e-6, abs_tol=1e-9):
        return f"returned score {total:g}, and turns that add up to {added:g}; leave score out, or let it be their sum"
    return None


def _call(function: Callable[[], _RESULT]) -> _RESULT | Raised:
    try:
        return function()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - other people's code raises anything
        return Raised(error, _describe(error))


def _describe(error: BaseException) -> str:
    return f"{raised(error, 300)}{explained(first_of(error))}"
