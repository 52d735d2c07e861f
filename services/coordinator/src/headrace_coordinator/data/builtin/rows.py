"""Rows of a table as items: their keys, the forms of data sets that many people use, and which rows are left out.

Knows no file: a source gives rows, and names the row that is wrong.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, Self

from headrace_schema.problems import Impossible, choose, problem, show
from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.data.sources import DataSource

Row = Mapping[str, Any]
Share = Annotated[float, Field(ge=0, le=1)]
Form = Literal["plain", "gsm8k", "math", "aime", "gpqa"]
LETTERS = "ABCD"


class PassRate(BaseModel):
    """Bounds of a measured pass rate; rows outside are left out: what is always right or wrong teaches nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    key: str = Field(default="pass_rate", description="key of a row's pass rate, from 0 to 1")
    at_least: Share = Field(default=0.0, description="rows below are left out")
    at_most: Share = Field(default=1.0, description="rows above are left out")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.at_least > self.at_most:
            raise ValueError(f"at_least, {self.at_least}, is above at_most, {self.at_most}")
        return self


class RowSource(DataSource):
    """A source that reads rows; its subclasses say from where."""

    form: Form = Field(default="plain", description="how rows are written: plain, gsm8k, math, aime, gpqa")
    question: str = Field(default="", description="key of the question; default: the form's (`question`)")
    answer: str = Field(default="", description="key of the answer; default: the form's (`answer`)")
    longest_question: Annotated[int, Field(strict=True, ge=0)] = Field(
        default=0,
        description="characters of the longest question; rows with longer ones are left out; 0: all",
    )
    pass_rate: PassRate | None = Field(default=None, description="keeps rows within a measured pass rate")

    def row_item(self, row: Row, place: str, key: str) -> DataItem | None:
        """The item of a row, or None when it is left out. `Impossible` names `key` and the row's `place`."""
        try:
            item = item_of(row, self.form, Keys(self.question, self.answer))
            kept = self._kept(item, row)
        except BadRow as bad:
            self.wrong(key, place, bad.reason, bad.fix)
        return item if kept else None

    def wrong(self, key: str, place: str, reason: str, fix: str) -> NoReturn:
        """Raises `Impossible` for a row."""
        raise Impossible([problem(key, f"{place} {reason}", fix)])

    def _kept(self, item: DataItem, row: Row) -> bool:
        if self.longest_question and len(item.question) > self.longest_question:
            return False
        if self.pass_rate is None:
            return True
        text = text_of(row, self.pass_rate.key)
        try:
            rate = float(text)
        except ValueError:
            rate = -1.0
        if not 0 <= rate <= 1:
            raise BadRow(f"has {text!r} as {self.pass_rate.key!r}", "write a number from 0 to 1")
        return self.pass_rate.at_least <= rate <= self.pass_rate.at_most


class BadRow(ValueError):
    """What is wrong with a row, and how to mend it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


@dataclass(frozen=True)
class Keys:
    """The row's keys of question and answer, in the case of the row; empty: those of the form."""

    question: str = ""
    answer: str = ""


def item_of(row: Row, form: Form, keys: Keys) -> DataItem:
    """The item of a row; other texts and numbers of the row are template fields. Raises `BadRow`."""
    return _READERS[form](row, keys)


def _plain(row: Row, keys: Keys) -> DataItem:
    return _item(row, keys.question or "question", keys.answer or "answer", lambda text: text)


def _gsm8k(row: Row, keys: Keys) -> DataItem:
    """GSM8K: a worked solution that ends with "#### 72"; the answer is what follows."""
    return _item(row, keys.question or "question", keys.answer or "answer", _after_hashes)


def _math(row: Row, keys: Keys) -> DataItem:
    """MATH and MATH-500: `problem`, and `answer` or else the last box of `solution`."""
    answer = keys.answer or ("answer" if "answer" in row else "solution")
    boxed = answer == "solution"
    return _item(row, keys.question or "problem", answer, _last_box if boxed else lambda text: text)


def _aime(row: Row, keys: Keys) -> DataItem:
    r"""AIME: `problem` or `question`, and an integer from 0 to 999, which some copies write as 033 or as 336^\circ."""
    question = keys.question or _first(row, ("problem", "question", "Problem", "Question"))
    return _item(row, question, keys.answer or _first(row, ("answer", "Answer")), _aime_integer)


def _gpqa(row: Row, keys: Keys) -> DataItem:
    """GPQA: four choices, in an order that depends on the question alone; the answer is a letter.

    The choices are the template fields A, B, C and D, and stand below the question as "A) …".
    """
    question_key = keys.question or "Question"
    right = text_of(row, keys.answer or "Correct Answer").strip()
    wrong = [text_of(row, f"Incorrect Answer {number}").strip() for number in (1, 2, 3)]
    question = text_of(row, question_key).strip()

    def order(choice: str) -> bytes:
        return hashlib.blake2b(f"{question}\0{choice}".encode(), digest_size=16).digest()

    choices = dict(zip(LETTERS, sorted([right, *wrong], key=order), strict=True))
    if len(set(choices.values())) < len(choices):
        raise BadRow("has two equal choices", "make the four choices differ")
    letter = next(letter for letter, choice in choices.items() if choice == right)
    shown = "\n".join(f"{letter}) {choice}" for letter, choice in choices.items())
    return DataItem(f"{question}\n\n{shown}", letter, {"stem": question, **choices}, _plain_row(row))


_READERS: dict[str, Callable[[Row, Keys], DataItem]] = {
    "plain": _plain,
    "gsm8k": _gsm8k,
    "math": _math,
    "aime": _aime,
    "gpqa": _gpqa,
}


def _item(row: Row, question_key: str, answer_key: str, read_answer: Callable[[str], str]) -> DataItem:
    question, answer = text_of(row, question_key), read_answer(text_of(row, answer_key))
    if not question.strip():
        raise BadRow(f"has an empty {question_key!r}", "write a question, or remove the row")
    rest = {key: value for key, value in _plain_row(row).items() if key not in (question_key, answer_key)}
    fields = {key: value for key, value in rest.items() if isinstance(value, (str, int, float))}
    return DataItem(question, answer, fields, rest)


def text_of(row: Row, key: str) -> str:
    """The text or number under a key, also as a list of one; raises `BadRow` for anything else."""
    if key not in row:
        raise BadRow(f"has no key {key!r}", choose(key, row, extra="or name another key in data.options"))
    value = row[key]
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise BadRow(f"has {show(value)} as {key!r}", "write text or a number")
    return str(value)


def _plain_row(row: Row) -> dict[str, Any]:
    """What travels to the scorers: JSON's types; anything else as its text."""
    return {key: _jsonable(value) for key, value in row.items()}


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (list, tuple)):
        return [_jsonable(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _jsonable(each) for key, each in value.items()}
    return str(value)


def _after_hashes(text: str) -> str:
    _, mark, answer = text.rpartition("####")
    if not mark:
        raise BadRow("has no '####' before its answer", "give GSM8K's own answers, or use form: plain")
    return answer.strip().replace(",", "")


def _last_box(text: str) -> str:
    start = text.rfind("\\boxed{")
    depth, first = 0, start + len("\\boxed{")
    for place in range(first, len(text)) if start >= 0 else ():
        if text[place] == "}" and depth == 0:
            return text[first:place].strip()
        depth += {"{": 1, "}": -1}.get(text[place], 0)
    raise BadRow("has no \\boxed{…} in its solution", "give MATH's own solutions, or a key `answer`")


def _aime_integer(text: str) -> str:
    found = re.fullmatch(r"\s*(\d{1,3})(?:\.0+)?(?:\^\{?\\circ\}?)?\s*", text)
    if not found:
        raise BadRow(f"has {text[:40]!r} as its answer", "AIME's answers are integers from 0 to 999")
    return str(int(found[1]))


def _first(row: Row, keys: tuple[str, ...]) -> str:
    return next((key for key in keys if key in row), keys[0])
