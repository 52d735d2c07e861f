"""How rows are written: each form reads a row's question, answer, earlier turns and fields. Knows no file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from headrace_schema.images import MANY, MARKS, in_order

from headrace_coordinator.data.builtin.pictures import Keys, without_images
from headrace_coordinator.data.builtin.turns import (
    arguments,
    conversation,
    is_conversation,
    spoken,
    until_learned,
    with_objects,
)
from headrace_coordinator.data.builtin.values import (
    BadRow,
    Row,
    as_text,
    jsonable,
    key_if_there,
    plain_row,
    text_of,
    value_of,
)
from headrace_coordinator.data.items import DataItem

Form = Literal["plain", "gsm8k", "math", "aime", "gpqa", "verl", "trl", "openai", "dpo", "text"]
LETTERS = "ABCD"
ANSWER_TURN, REJECTED_TURN = "answer_turn", "rejected_turn"
"""Keys of an item's answers that are turns which call tools."""


def item_of(row: Row, form: Form, keys: Keys, folder: Path | None = None) -> DataItem:
    """The item of a row; other texts and numbers of the row are template fields. Raises `BadRow`.

    Paths of images are relative to `folder`.
    """
    row, images = without_images(row, form, keys, folder)
    item = _READERS[form](row, keys)
    if images:
        item = _in_order(replace(item, images=tuple(images)))
    return replace(item, id=text_of(row, keys.id)) if keys.id else item


def _in_order(item: DataItem) -> DataItem:
    """The item with its images in the order of the marks in its texts, where there are any."""
    if not (marks := item.marks):
        return item
    for kind in dict.fromkeys(item.kinds):
        if (written := marks.count(kind)) != (files := item.kinds.count(kind)):
            raise BadRow(
                f"has {written} marks {MARKS[kind]} in its text for {files} {MANY[kind]}",
                f"write one for each, or none: then the {MANY[kind]} stand before the question",
            )
    return replace(item, images=tuple(in_order(item.images, marks)))


def _plain(row: Row, keys: Keys) -> DataItem:
    answer = keys.answer or key_if_there(row, "answer")
    return _item(row, keys.question or "question", answer, _same, prompt_alone=bool(answer))


def _verl(row: Row, keys: Keys) -> DataItem:
    """verl: `prompt` is a list of messages, the answer `reward_model.ground_truth`; the row goes to the scorers.

    Ground truths of its puzzles are objects: the answer is their JSON, and a function of verl gets the object. Rows of
    `messages` are those of its supervised trainer.
    """
    if not keys.question and "messages" in row and "prompt" not in row:
        return _openai(row, keys)
    answer = keys.answer or key_if_there(row, "reward_model.ground_truth")
    return _item(row, keys.question or "prompt", answer, _same, objects=True, prompt_alone=True)


def _trl(row: Row, keys: Keys) -> DataItem:
    """TRL: `prompt` is text or a list of messages; other columns, and `answer` or `solution`, go to the scorers.

    `tools` and `chat_template_kwargs` are given to the chat template. Rows of `messages`, of `chosen` and `rejected`,
    and of `text` are read as what they are.
    """
    if not keys.question:
        for key, read in (("messages", _openai), ("chosen", _dpo), ("text", _text)):
            if key in row and (key == "chosen" or "prompt" not in row):
                return read(row, keys)
    answer = keys.answer or next(
        (key for key in ("answer", "solution", "ground_truth", "completion") if key in row), ""
    )
    item = _item(row, keys.question or "prompt", answer, _same, prompt_alone=True)
    return replace(item, arguments=arguments(row))


def _openai(row: Row, keys: Keys) -> DataItem:
    """Chat messages as OpenAI's fine-tuning writes them: `messages`, of which a last assistant's turn is the answer.

    Arguments of calls are JSON texts there, and objects to chat templates. `tools` are given to these. A last turn with
    `weight: 0` is not learned from: it is left out, with what is behind the turn before it that is.
    """
    question = keys.question or "messages"
    item = _item(until_learned(row, question), question, keys.answer, _same)
    return replace(item, arguments=arguments(row), messages=tuple(map(with_objects, item.messages)))


def _dpo(row: Row, keys: Keys) -> DataItem:
    """Preference pairs: `prompt`, `chosen` (the answer), `rejected`; without `prompt` both are whole conversations."""
    chosen, rejected = keys.answer or "chosen", row.get("rejected")
    if (
        not ("prompt" in row or keys.question)
        and isinstance(row.get(chosen), str)
        and isinstance(rejected, str)
    ):
        row = _with_prompt(row, chosen, rejected)
        rejected = row["rejected"]
    if "prompt" in row or keys.question:
        item = _item(row, keys.question or "prompt", chosen, _same, prompt_alone=True)
    else:
        item = _item(row, chosen, "", _same)
    if is_conversation(rejected):
        said, turn = _rejected(item, rejected)
        beside = {REJECTED_TURN: turn} if turn is not None else {}
        item = replace(item, metadata={**item.metadata, "rejected": said, **beside})
    return replace(item, arguments=arguments(row))


def _with_prompt(row: Row, chosen: str, rejected: str) -> Row:
    """A row of two texts with what they have in common, up to a space, as the prompt: TRL's implicit prompt."""
    pairs = enumerate(zip(row[chosen], rejected, strict=False))
    common = next((place for place, (one, other) in pairs if one != other), 0)
    end = row[chosen].rfind(" ", 0, common)
    if end < 1:
        raise BadRow(
            f"has no prompt, and {chosen!r} and 'rejected' do not begin alike", "give it a key 'prompt'"
        )
    prompt = row[chosen][:end]
    return {**row, "prompt": prompt, chosen: row[chosen][end:], "rejected": rejected[end:]}


def _rejected(item: DataItem, turns: Any) -> tuple[str, Mapping[str, Any] | None]:
    """What a rejected answer says that is a conversation: of one message, or with the chosen answer's prompt; and its
    turn, where that calls tools.
    """
    if len(turns) == 1 and turns[0].get("role") == "assistant" and not turns[0].get("tool_calls"):
        return as_text(turns[0].get("content"), "rejected"), None
    if len(turns) == 1:
        turns = [*(item.messages or [{"role": "user", "content": item.question}]), *turns]
    messages, turn = conversation(turns, "rejected", prompt_alone=False)
    if item.messages and [*messages] != [*item.messages]:
        raise BadRow("is a pair whose rejected answer has another prompt", "give both answers one prompt")
    return (spoken(turn), turn if turn.get("tool_calls") else None) if turn else ("", None)


def _gsm8k(row: Row, keys: Keys) -> DataItem:
    """GSM8K: a worked solution that ends with "#### 72"; the answer is what follows."""
    return _item(row, keys.question or "question", keys.answer or "answer", _after_hashes)


def _math(row: Row, keys: Keys) -> DataItem:
    """MATH and MATH-500: `problem`, and `answer` or else the last box of `solution`."""
    answer = keys.answer or ("answer" if "answer" in row else "solution")
    boxed = answer == "solution"
    return _item(row, keys.question or "problem", answer, _last_box if boxed else _same)


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
    return DataItem(f"{question}\n\n{shown}", letter, {"stem": question, **choices}, plain_row(row))


def _text(row: Row, keys: Keys) -> DataItem:
    """A text that is learned from as a whole: there is no question."""
    text = text_of(row, keys.answer or "text")
    return DataItem("", text, {}, {key: value for key, value in plain_row(row).items() if key != "text"})


_READERS: dict[str, Callable[[Row, Keys], DataItem]] = {
    "plain": _plain,
    "gsm8k": _gsm8k,
    "math": _math,
    "aime": _aime,
    "gpqa": _gpqa,
    "verl": _verl,
    "trl": _trl,
    "openai": _openai,
    "dpo": _dpo,
    "text": _text,
}


def _item(
    row: Row,
    question_key: str,
    answer_key: str,
    read_answer: Callable[[str], str],
    *,
    objects: bool = False,
    prompt_alone: bool = False,
) -> DataItem:
    """The item of a row whose answer stands under a key; `objects`: it may be one, whose JSON is the answer.

    `prompt_alone`: a conversation has no answer at its end.
    """
    asked = value_of(row, question_key)
    messages: tuple[dict[str, Any], ...] = ()
    answer = ""
    turn: Mapping[str, Any] | None = None
    if is_conversation(asked):
        messages, turn = conversation(asked, question_key, prompt_alone=prompt_alone)
        question, answer = messages[-1]["content"] or "", spoken(turn) if turn else ""
    else:
        question = text_of(row, question_key)
    if not question.strip():
        raise BadRow(f"has an empty {question_key!r}", "write a question, or remove the row")
    if answer_key:
        given = value_of(row, answer_key)
        # The chosen answer of a preference pair may be a conversation of one assistant's turn.
        if is_conversation(given):
            if len(given) > 1 or given[0].get("tool_calls"):
                messages, turn, given = _goes_on(messages or question, given, answer_key)
                question = messages[-1]["content"] or ""
            else:
                given = given[0].get("content")
        if objects and _is_object(given):
            answer = json.dumps(jsonable(given, answer_key))
        else:
            answer = read_answer(as_text(given, answer_key)) if given is not None else ""
    rest = {key: value for key, value in plain_row(row).items() if key != question_key}
    fields = _fields(rest)
    if answer_key in rest:
        fields.pop(answer_key, None)
    if turn is not None and turn.get("tool_calls"):
        rest = {**rest, ANSWER_TURN: turn}
    return DataItem(question, answer, fields, rest, messages)


def _goes_on(
    prompt: Sequence[Row] | str, turns: Sequence[Row], key: str
) -> tuple[tuple[dict[str, Any], ...], Mapping[str, Any], str]:
    """A prompt with all of an answer's turns but the last, that turn, and what it says. The prompt's own turns of the
    assistant are not learned from.
    """
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if _said(turns[: len(before)]) == _said(before):  # the answer is told with its prompt
        turns = turns[len(before) :]
    known = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in before]
    messages, turn = conversation([*known, *turns], key, prompt_alone=False)
    if turn is None:
        raise BadRow(f"ends {key!r} with no turn of the assistant", "end it with one")
    return tuple(map(dict, map(with_objects, messages))), turn, spoken(turn)


def _said(turns: Sequence[Row]) -> list[tuple[Any, Any]]:
    return [(turn.get("role"), turn.get("content")) for turn in turns]


def _fields(rest: Mapping[str, Any], above: str = "") -> dict[str, str | int | float]:
    """Texts and numbers of a row, of nested objects too: `extra_info.index`."""
    found: dict[str, str | int | float] = {}
    for key, value in rest.items():
        if isinstance(value, (str, int, float)):
            found[f"{above}{key}"] = value
        elif isinstance(value, dict):
            found |= _fields(value, f"{above}{key}.")
    return found


def _is_object(value: Any) -> bool:
    """Whether it is an object or a list; one of a single entry counts as that entry."""
    return isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and len(value) != 1)


def _same(text: str) -> str:
    return text


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
