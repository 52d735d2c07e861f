"""Rows of a table as items: their keys, their form, and which rows are left out.

Knows no file: a source gives rows, and names the row that is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, NoReturn, Self

from headrace_schema.problems import Impossible, problem
from headrace_schema.progress import counter
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from typing_extensions import override

from headrace_coordinator.data.builtin.forms import Form, item_of
from headrace_coordinator.data.builtin.pictures import Keys
from headrace_coordinator.data.builtin.values import BadRow, Row, row_bytes, share_of
from headrace_coordinator.data.items import DataItem
from headrace_coordinator.data.sources import DataSource

ROW_BYTES = 8 << 20
"""Most bytes of one row: a scorer gets it with its prompt and an answer in one message."""
Share = Annotated[float, Field(ge=0, le=1)]


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

    form: Form = Field(
        default="plain",
        description="how rows are written: plain, gsm8k, math, aime, gpqa, verl, trl, openai, dpo, text",
    )
    question: str = Field(
        default="",
        description="key of the question: text, or messages; a.b is key b of a; default: the form's",
    )
    answer: str = Field(
        default="", description="key of the answer; default: the form's, and no answer where rows lack it"
    )
    id: str = Field(
        default="", description="key that tells items apart; default: what the prompt shows of a row"
    )
    weight: str = Field(
        default="",
        description="key of the number by which a row counts in a supervised run; default: each counts 1",
    )
    images: str = Field(
        default="",
        description="key of a row's image or list of images: paths, bytes, base64, or what `datasets` has; default: "
        "none, those in parts of messages, and of the forms verl and trl `images` or `image`",
    )
    videos: str = Field(default="", description="key of a row's video or list of videos, as `images`")
    audios: str = Field(default="", description="key of a row's sound or list of sounds, as `images`")
    longest_question: Annotated[int, Field(strict=True, ge=0)] = Field(
        default=0,
        description="characters of the longest question; rows with longer ones are left out; 0: all",
    )
    pass_rate: PassRate | None = Field(default=None, description="keeps rows within a measured pass rate")

    _left_out: Counter[str] = PrivateAttr(default_factory=Counter)

    @override
    def left_out(self) -> dict[str, int]:
        return dict(self._left_out)

    def row_items(
        self,
        rows: Iterable[tuple[int, Row]],
        place: Callable[[int], str],
        key: str,
        folder: Path | None = None,
    ) -> Iterator[DataItem]:
        """The items of numbered rows but those that are left out. `Impossible` names `key` and the row's `place`.

        Paths of images are relative to `folder`.
        """
        keys = Keys(self.question, self.answer, self.id, self.images, self.videos, self.audios)
        form, all_kept = self.form, not self.longest_question and self.pass_rate is None
        far = counter()
        far.begin(0, "rows")
        for number, row in rows:
            far.add()
            try:
                if (size := row_bytes(self._texts(row))) > ROW_BYTES:
                    reason = f"has {size:,} bytes of text and numbers, and {ROW_BYTES:,} travel"
                    raise BadRow(reason, "shorten it, or remove the row")
                item = item_of(row, form, keys, folder)
                unwanted = "" if all_kept else self._unwanted(item, row)
            except BadRow as bad:
                self.wrong(key, place(number), bad.reason, bad.fix)
            if unwanted:
                self._left_out[unwanted] += 1
            else:
                yield item

    @property
    def files(self) -> set[str]:
        """The keys of images, videos and sounds that are named."""
        return {self.images, self.videos, self.audios} - {""}

    def _texts(self, row: Row) -> Row:
        """The row without its images, which have bounds of their own."""
        return {name: value for name, value in row.items() if name not in self.files}

    def wrong(self, key: str, place: str, reason: str, fix: str) -> NoReturn:
        """Raises `Impossible` for a row."""
        raise Impossible([problem(key, f"{place} {reason}", fix)])

    def _unwanted(self, item: DataItem, row: Row) -> str:
        """Why the row is left out; empty where it is kept."""
        if self.longest_question and len(item.question) > self.longest_question:
            return f"longer than longest_question = {self.longest_question}"
        if self.pass_rate is None:
            return ""
        rate, bounds = share_of(row, self.pass_rate.key), self.pass_rate
        outside = not bounds.at_least <= rate <= bounds.at_most
        return f"{bounds.key} outside {bounds.at_least:g} to {bounds.at_most:g}" if outside else ""
