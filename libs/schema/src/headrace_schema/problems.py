"""What is wrong with a user's input, as problems that name the key, the reason and the fix.

Turns pydantic's errors into such problems. Knows the shape of a model, not what its values mean.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from headrace_schema.resources.views import KeyProblemView
from headrace_schema.yaml_text import invisible

SHOWN_CHARACTERS = 80
SHOWN_VALUES = 12
CLOSE = 0.8
"""How alike two keys must be spelled, from 0 to 1, to name the other one before those that only look similar."""
TYPE_NAMES = {
    "str": "text",
    "bool": "a truth value",
    "NoneType": "nothing",
    "dict": "a mapping",
    "list": "a list",
}
WANTED = {
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "list_type": "a list",
    "string_type": "text",
    "bool_type": "true or false",
}
"""What a value must be, by pydantic's name of the error."""

MOST = 50
"""Problems that are explained: each is compared with every key there is."""
LONGEST_NAME = 200
"""Characters of a name that is compared with others: the time grows with them, and of 60,000 is seconds."""
LONGEST = 2000
"""Characters of a text of a problem as the API shows it."""


class Impossible(ValueError):
    """Input that no retry makes valid. A validator may raise it: pydantic keeps it in the error's context."""

    def __init__(self, problems: list[KeyProblemView]) -> None:
        super().__init__("; ".join(sentence(problem) for problem in problems))
        self.problems = problems


def problem(key: str, reason: str, fix: str) -> KeyProblemView:
    """One problem."""
    return KeyProblemView(key=key, problem=reason, fix=fix)


def first_of(problems: Sequence[KeyProblemView]) -> list[KeyProblemView]:
    """The first `MOST`, none of whose texts is long, and how many more there are."""
    found = [
        problem(*(_clipped(text) for text in (each.key, each.problem, each.fix))) for each in problems[:MOST]
    ]
    if (more := len(problems) - MOST) > 0:
        found.append(problem("", f"{more:,} more problems", "mend those that are named first"))
    return found


def _clipped(text: str) -> str:
    """A user's own text may stand in it, of any length."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def as_views(problems: Iterable[Any]) -> list[KeyProblemView]:
    """Problems with key, problem and fix of a library that does not know the schema: servicekit, the planner."""
    return [problem(each.key, each.problem, each.fix) for each in problems]


def sentence(item: KeyProblemView) -> str:
    """A problem as one line."""
    return f"{item.key}: {item.problem}; {item.fix}" if item.key else f"{item.problem}; {item.fix}"


def nearest(value: object, allowed: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The allowed value that looks most like `value`, if any does; a long one, which takes long to compare, is none."""
    if len(str(value)) > LONGEST_NAME:
        return None
    names = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(str(value).lower(), list(names), n=1, cutoff=cutoff)
    return names[close[0]] if close else None


def choose(value: object, allowed: Iterable[str], *, extra: str = "") -> str:
    """A fix that names the nearest allowed value and the allowed ones."""
    names = sorted(set(allowed))
    if not names:
        return extra or "there is no valid value at present"
    listed = ", ".join(names[:SHOWN_VALUES]) + (", …" if len(names) > SHOWN_VALUES else "")
    close = nearest(value, names)
    fix = f"did you mean {close}? allowed: {listed}" if close else f"use one of: {listed}"
    return f"{fix}{extra and '; '}{extra}"


def show(value: object) -> str:
    """A value as a user would recognise it, bounded."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def path(parts: Sequence[str | int]) -> str:
    """A key path: ("reward", "scorers", 0, "name") → reward.scorers[0].name"""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[KeyProblemView]:
    """The problems behind a validation error of `model`; `prefix` is the key path of the model itself."""
    return explain_details(error.errors(include_url=False), model, prefix)


def explain_value(model: type[BaseModel], value: object, prefix: str = "") -> list[KeyProblemView]:
    """What is wrong with a value as `model`; empty when nothing is."""
    try:
        model.model_validate(value)
    except ValidationError as error:
        return explain(error, model, prefix)
    return []


def explain_details(
    details: Sequence[ErrorDetails], model: type[BaseModel], prefix: str = ""
) -> list[KeyProblemView]:
    """The same for pydantic's own list of errors: the first `MOST` of them, and how many more there are."""
    found: list[KeyProblemView] = []
    for detail in details[:MOST]:
        inner = detail.get("ctx", {}).get("error")
        if isinstance(inner, Impossible):
            found += [item.model_copy(update={"key": _join(prefix, item.key)}) for item in inner.problems]
        else:
            loc = tuple(part for part in detail["loc"] if not _is_tag(part))
            reason, fix = _reason_and_fix({**detail, "loc": loc}, model)
            found.append(problem(_join(prefix, path(loc)), reason, fix))
    if (more := len(details) - MOST) > 0:
        found.append(problem(prefix, f"{more:,} more problems", "mend those that are named first"))
    return found


def _is_tag(part: str | int) -> bool:
    """Whether a part of a location is the tag of one of several forms, such as <graph>, and no key."""
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix and key and not key.startswith("[") else prefix + key


def _reason_and_fix(detail: ErrorDetails, model: type[BaseModel]) -> tuple[str, str]:
    kind, loc, value, ctx = detail["type"], detail["loc"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        key = str(loc[-1])
        hidden = invisible(key)
        seen = f": {key!r} holds {key[hidden]!r}, which cannot be seen" if hidden >= 0 else ""
        return f"unknown key{seen}", _fix_unknown(key, model, loc[:-1])
    if kind == "missing":
        return "required key is missing", _fix_missing(model, loc)
    if kind == "literal_error":
        allowed = [name.strip().strip("'") for name in str(ctx["expected"]).replace(" or ", ", ").split(",")]
        return f"{show(value)} is not allowed", choose(value, allowed)
    bound = next((name for name in ("gt", "ge", "lt", "le") if name in ctx), None)
    if bound:
        return _out_of_bounds(bound, ctx[bound], value)
    if kind.startswith(("int", "float", "finite")):
        return _not_a_number(kind, value)
    if wanted := WANTED.get(kind):
        return f"must be {wanted}, got {show(value)} ({_type_name(value)})", _fix_type(kind, ctx)
    return f"{_plain(detail['msg'])} (got {show(value)})", _fix_type(kind, ctx)


def _plain(message: str) -> str:
    if message.startswith("Value error, "):
        return message.removeprefix("Value error, ")
    return message.replace("Input should be ", "should be ", 1)


def _out_of_bounds(bound: str, limit: Any, value: Any) -> tuple[str, str]:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    closed = bound in ("ge", "le")
    step = {"gt": 1, "lt": -1}.get(bound, 0)
    if closed or isinstance(limit, int):
        fix = f"the nearest valid value is {_number(limit + step)}"
    else:
        fix = f"use a number {words[bound]} {_number(limit)}"
    return f"must be {words[bound]} {_number(limit)}, got {show(value)}", fix


def _number(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _not_a_number(kind: str, value: Any) -> tuple[str, str]:
    wanted = "an integer" if kind.startswith("int") else "a finite number"
    reason = f"must be {wanted}, got {show(value)} ({_type_name(value)})"
    try:
        number = float(value) if isinstance(value, (str, float)) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or abs(number) > 2**53:
        return reason, f"write {wanted}"
    if kind.startswith("int"):
        # Most whole numbers of a spec are counts from 1 on: 0 would be refused too.
        whole = round(number) or int(number > 0)
        return reason, f"write {whole}" + (" without quotes" if isinstance(value, str) else "")
    return reason, f"write {number:g}"


def _type_name(value: Any) -> str:
    return TYPE_NAMES.get(type(value).__name__, type(value).__name__)


def _fix_type(kind: str, ctx: dict[str, Any]) -> str:
    if kind == "string_pattern_mismatch":
        return f"write text that matches {ctx['pattern']}"
    if kind.startswith("string"):
        return "write text, in quotes if it looks like a number"
    if kind.startswith("bool"):
        return "write true or false"
    if kind == "too_long":
        return f"write at most {ctx['max_length']} entries"
    if kind.startswith(("list", "too_short")):
        return "write a list with at least one entry" if kind == "too_short" else "write a list: [a, b]"
    if kind.startswith(("model", "dict")):
        return "write a mapping of keys to values"
    return "change the value"


def _fix_missing(model: type[BaseModel], loc: Sequence[str | int]) -> str:
    owner = _model_at(model, loc[:-1])
    field = owner.model_fields.get(str(loc[-1])) if owner else None
    return f"add it: {field.description}" if field and field.description else "add it"


def _fix_unknown(key: str, model: type[BaseModel], at: Sequence[str | int]) -> str:
    owner = _model_at(model, at)
    allowed = list(owner.model_fields) if owner else []
    elsewhere = [path(found) for found in sorted(_paths(model), key=len) if found[-1] == key]
    if elsewhere:
        return f"did you mean {elsewhere[0]}? the key {key} belongs there"
    here = ", ".join(sorted(allowed))
    if close := nearest(key, allowed, CLOSE):
        return f"did you mean {close}? keys here: {here}"
    if meant := _meant_elsewhere(key, model):
        return f"did you mean {meant}? keys here: {here}"
    if close := nearest(key, allowed):
        return f"did you mean {close}? keys here: {here}"
    options = next((name for name in allowed if name.endswith("options")), None)
    hint = f"; keys of the plug-in belong in {path([*at, options])}" if options else ""
    return f"remove it; keys here: {here}{hint}"


def _meant_elsewhere(key: str, model: type[BaseModel]) -> str:
    """The path of a key anywhere in the model that is spelled alike, or whose description begins with `key`'s words."""
    keys, descriptions = _index(model)
    if close := nearest(key, keys, CLOSE):
        return keys[close]
    words = key.lower().replace("_", " ") + " "
    return next((place for text, place in descriptions if text.startswith(words)), "")


@cache
def _index(model: type[BaseModel]) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The shortest path of each key, and (description, path) of every key."""
    keys: dict[str, str] = {}
    descriptions: list[tuple[str, str]] = []
    for found in sorted(_paths(model), key=len):
        keys.setdefault(found[-1], path(found))
        owner = _model_at(model, found[:-1])
        field = owner.model_fields.get(found[-1]) if owner else None  # a key of a mapping is no field
        text = field.description if field else ""
        descriptions.append(((text or "").lower(), path(found)))
    return keys, descriptions


def _model_at(model: type[BaseModel], loc: Sequence[str | int]) -> type[BaseModel] | None:
    """The model that holds the keys at a location."""
    current: type[BaseModel] | None = model
    in_mapping = False
    for part in loc:
        if isinstance(part, int) or in_mapping:
            in_mapping = False
            continue  # The place in a list or a mapping: its element is the model already found.
        field = current.model_fields.get(part) if current else None
        current = _model_in(field.annotation) if field else None
        in_mapping = field is not None and get_origin(field.annotation) is dict
    return current


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def _paths(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        if inner := _model_in(field.annotation):
            yield from _paths(inner, (*prefix, name))
