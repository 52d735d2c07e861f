"""Answers that the data gives, from texts to ids: what is rendered by the chat template, and which turns are trained.

A warm-up's examples and the rows of supervised and preference runs are read here alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from typing import Any

from headrace_modelkit.loading import load_architecture
from headrace_modelkit.tokenizer import TextCodec, in_parts, load_tokenizer
from headrace_schema.openings import GivenAnswer
from headrace_schema.sections.generating import ModelSection
from pydantic import ValidationError

from headrace_trainer.errors import invalid
from headrace_trainer.learning.pictures import place_images
from headrace_trainer.learning.samples import Image, Sample, Turn

Piece = tuple[list[int], bool]
"""Ids, and whether they are trained."""
PROMPT_ALONE = {"add_generation_prompt": False}
BEHIND = 0
"""The id of the token that stands behind what is judged: nothing reads it."""
SHOWN = 60
"""Characters of a prompt by which a row is told."""


class GivenReader:
    """Reads the rows of a run, of which the trained turns are the last or all, or which are `judged` as a whole: then
    what is behind an answer is trained, or behind each of its steps. Raises ModelNotReadable.
    """

    def __init__(
        self, model: ModelSection, *, all_turns: bool, judged: bool = False, separator: str = ""
    ) -> None:
        self._codec, self._all_turns = load_tokenizer(model), all_turns
        self._judged, self._separator = judged, separator
        self._positions = positions_of(model)

    def read(self, given_json: str, files: Mapping[str, Image], where: str) -> tuple[Sample, ...]:
        """The sample of a `GivenAnswer`, or one for each of its steps. Raises Refusal INVALID, which says where it is
        and how it begins.
        """
        try:
            given = GivenAnswer.model_validate_json(given_json)
        except ValidationError as error:
            raise invalid(
                f"{where}: its given_json is no GivenAnswer ({error.error_count()} errors)"
            ) from error
        where = f"{where} ({_shown(given)!r})"
        if missing := [digest for digest in given.images if digest not in files]:
            raise invalid(f"{where}: image {missing[0]} did not come with it", "DIGEST_MISMATCH")
        images = [files[digest] for digest in given.images]
        try:
            if self._judged:
                found = tuple(_judged(self._codec, given, images, self._separator))
            else:
                found = (read_given(self._codec, given, images, all_turns=self._all_turns),)
        except ValueError as error:
            raise invalid(f"data: {where}: {error}", key="data") from error
        longest = max(len(each.tokens) for each in found)
        if self._positions is not None and longest > self._positions:
            raise invalid(
                f"data: {where} has {longest} tokens with its answer, and the model reads {self._positions}; "
                "shorten the row, leave it out (data.options.longest_question), or raise model.max_context",
                key="data",
            )
        return found


def _shown(given: GivenAnswer) -> str:
    text = given.text if given.chat is None else str(given.chat[-1].get("content") or "")
    return f"{text[:SHOWN]}…" if text and len(text) > SHOWN else text or ""


def positions_of(model: ModelSection) -> int | None:
    """The longest line of tokens that a model reads: by its own positions, and by model.max_context."""
    own = getattr(load_architecture(model).get_text_config(), "max_position_embeddings", None)
    return min((each for each in (own, model.max_context) if each is not None), default=None)


def read_given(
    codec: TextCodec, given: GivenAnswer, images: Many[Image] = (), *, all_turns: bool = False
) -> Sample:
    """The answer behind its prompt as it would have been sampled, its end included; `all_turns`: the assistant's
    earlier turns are trained too, but those with `weight: 0`.

    Raises ValueError with the template's reason.
    """
    ids, trained = list[int](), list[int]()
    for piece, learned in _pieces(codec, given, images, all_turns):
        if learned:
            trained += range(len(ids), len(ids) + len(piece))
        ids += piece
    trained = [place for place in trained if place]  # A text's first token follows nothing.
    return Sample(ids, trained, [math.nan] * len(trained), weight=1.0, images=tuple(dict.fromkeys(images)))


def _pieces(codec: TextCodec, given: GivenAnswer, images: Many[Image], all_turns: bool) -> Iterator[Piece]:
    if given.turn is None:
        yield from _prompt(codec, given, images, all_turns)
        yield codec.encode_answer(given.answer), True
        return
    if images or given.chat is None or given.prefill:
        raise ValueError("an answer that calls tools follows a chat, without images and prefill")
    chat = [*given.chat, given.turn]
    turns = [place for place, turn in enumerate(given.chat) if all_turns and _is_trained(turn)]
    yield from _turns(codec, chat, [*turns, len(given.chat)], given, ends=True)


def _judged(codec: TextCodec, given: GivenAnswer, images: Many[Image], separator: str) -> Iterator[Sample]:
    """An answer behind its prompt as the scorer `reward_model` reads it, or each of its beginnings that end a step."""
    if given.prefill or given.arguments or images or given.turn is not None:
        raise ValueError(
            "a reward model reads messages alone; leave prefill, tools, template_arguments and images out"
        )
    before = given.chat or [{"role": "user", "content": given.text or ""}]
    beginnings = [separator.join(given.steps[: count + 1]) for count in range(len(given.steps))]
    for place, answer in enumerate(beginnings or [given.answer]):
        turns = [*before, {"role": "assistant", "content": answer}]
        if codec.tokenizer.chat_template:
            ids = codec.encode_rendered(codec.render(turns, PROMPT_ALONE))
        else:
            ids = codec.tokenizer.encode("".join(str(turn.get("content") or "") for turn in turns))
        labels = (Turn(1, given.labels[place], place=place),) if given.labels else ()
        yield Sample([*ids, BEHIND], [len(ids)], [math.nan], weight=1.0, turns=labels)


def _prompt(codec: TextCodec, given: GivenAnswer, images: Many[Image], all_turns: bool) -> Iterator[Piece]:
    turns = [place for place, turn in enumerate(given.chat or ()) if _is_trained(turn)] if all_turns else []
    if turns and given.chat is not None:
        if images:
            raise ValueError("with images the last turn alone is trained; set algorithm.options.turns: last")
        yield from _turns(codec, given.chat, turns, given)
        return
    files = [image.data for image in images]
    ids = codec.encode_prompt(given.chat, given.text, given.prefill, given.arguments, images=files)
    yield place_images(ids, images, codec.images) if images and codec.images is not None else ids, False


def _is_trained(turn: Mapping[str, Any]) -> bool:
    return bool(turn["role"] == "assistant" and turn.get("weight", 1) != 0)


def _turns(
    codec: TextCodec,
    chat: Many[Mapping[str, Any]],
    turns: Many[int],
    given: GivenAnswer,
    *,
    ends: bool = False,
) -> Iterator[Piece]:
    """The prompt in pieces: what stands before each trained turn, and that turn up to the token that ends it; unless
    it `ends` with such a one, what begins the answer.
    """
    known = ""
    messages = [in_parts(message) for message in chat]
    for place in turns:
        before = codec.render(messages[:place], given.arguments)
        whole = codec.render(messages[: place + 1], {**given.arguments, **PROMPT_ALONE})
        said = codec.through_end(_behind(whole, before))
        yield _ids(codec, _behind(before, known), first=not known), False
        yield codec.encode_behind(said), True
        known = before + said
    if ends:
        return
    yield codec.encode_behind(_behind(codec.render(messages, given.arguments) + given.prefill, known)), False


def _ids(codec: TextCodec, text: str, *, first: bool) -> list[int]:
    return codec.encode_rendered(text) if first else codec.encode_behind(text)


def _behind(text: str, known: str) -> str:
    """What follows a text that is known. Raises ValueError where the template has changed that."""
    if not text.startswith(known):
        raise ValueError(
            "the chat template shows an earlier turn of the assistant otherwise than when that was the last: "
            "set algorithm.options.turns: last, or data.prompt.template_arguments so that it keeps them"
        )
    return text[len(known) :]
