"""Calls of tools in what a model says, read by the model family's form. Knows no tool.

What is no whole call is a Call with a problem, for whoever answers calls to tell the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
_FENCE = re.compile(r"^```(?:json)?\s*(.*?)\s*```$", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it; `problem` says why it is none."""

    name: str = ""
    arguments: Any = None
    problem: str = ""


def hermes_calls(text: str) -> list[Call]:
    """Calls of Hermes, Qwen 2.5 and Qwen 3: JSON objects in <tool_call> tags, among other text.

    >>> hermes_calls('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [Call(name='add', arguments={'a': 1}, problem='')]
    """
    found = []
    for inner, end in _HERMES.findall(text):
        found.append(_call(inner) if end else Call(problem="a <tool_call> has no </tool_call>"))
    return found


def json_calls(text: str) -> list[Call]:
    """Calls of models that say nothing else in the turn: one JSON object with a name, or a list of them.

    The object's arguments may be called `parameters`, as Llama 3 does.

    >>> json_calls('{"name": "add", "parameters": {"a": 1}}'), json_calls("It is 4.")
    ([Call(name='add', arguments={'a': 1}, problem='')], [])
    """
    text = text.strip()
    if fenced := _FENCE.match(text):
        text = fenced[1]
    if text[:1] not in ("{", "["):
        return []
    try:
        found = json.loads(text)
    except ValueError:
        return [_call(text)] if '"name"' in text else []
    listed = found if isinstance(found, list) else [found]
    named = all(isinstance(each, dict) and "name" in each for each in listed)
    return [_call(json.dumps(each)) for each in listed] if named else []


PARSERS: Mapping[str, Callable[[str], list[Call]]] = {"hermes": hermes_calls, "json": json_calls}


def _call(text: str) -> Call:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"the call is no JSON ({error})")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call(problem='the call is no object with a name: {"name": NAME, "arguments": {…}}')
    return Call(found["name"], found.get("arguments", found.get("parameters", {})))


def beside_calls(form: str, text: str) -> tuple[str, list[Call]]:
    """What a turn says beside its calls, and these.

    >>> beside_calls("hermes", 'Let me see. <tool_call>{"name": "add", "arguments": {}}</tool_call>')
    ('Let me see.', [Call(name='add', arguments={}, problem='')])
    """
    calls = PARSERS[form](text)
    if not calls:
        return text, []
    return _HERMES.sub("", text).strip() if form == "hermes" else "", calls
