"""The tests of an item, in the forms that data sets of code have: APPS and TACO, LiveCodeBench, MBPP, HumanEval."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace_reward.scorers.base import Answer

KEYS = ("input_output", "test_list", "test", "tests", "public_test_cases")
"""Where an item's tests are looked for, before its answer."""
FORMS = '{"inputs": […], "outputs": […]}, a list of {"input", "output"}, a list of assertions, or code that asserts'


@dataclass(frozen=True)
class Cases:
    """Tests of one item: `given` to programs as text, to calls as arguments; of kind `test`, the code of each test."""

    kind: Literal["program", "call", "test"]
    given: Sequence[Any]
    expected: Sequence[Any] = ()
    function: str = ""
    """The function that is called, or that the tests are about; empty where they do not say."""
    begin: str = ""
    """What an answer goes on with, where the question is the beginning of the code."""


def read_cases(answer: Answer, key: str, most: int) -> Cases:
    """The item's tests; ValueError says what it has in their place."""
    row = answer.metadata or {}
    found = _found(answer, row, key)
    entry = str(row.get("entry_point") or row.get("fn_name") or "")
    if isinstance(found, str):
        found = _parsed(found)
    if isinstance(found, Mapping):
        return _paired(found, entry, most)
    if isinstance(found, list) and found and all(isinstance(each, Mapping) for each in found):
        return _listed(found, entry, most)
    tests = [found] if isinstance(found, str) else found
    if not isinstance(tests, list) or not tests or not all(isinstance(each, str) for each in tests):
        raise ValueError(f"the tests of the item are {_shown(found)}; they may be {FORMS}")
    before = "\n".join([*_texts(row.get("test_imports")), *_texts(row.get("test_setup_code"))])
    after = f"\ncheck({entry})" if entry and "def check(" in tests[0] else ""
    begin = str(row.get("prompt") or answer.prompt) if entry else ""
    code = [f"{before}\n{test}{after}" if before else f"{test}{after}" for test in tests[:most]]
    return Cases("test", code, function=entry, begin=begin if f"def {entry}" in begin else "")


def _found(answer: Answer, row: Mapping[str, Any], key: str) -> Any:
    if key:
        if key not in row:
            raise ValueError(f"options.tests: the item has no key {key!r}; keys: {', '.join(row) or 'none'}")
        return row[key]
    for known in KEYS:
        if row.get(known):
            return row[known]
    if not answer.reference.strip():
        raise ValueError(
            f"the item has no tests: neither an answer nor {', '.join(KEYS)}; name their key as options.tests"
        )
    return answer.reference


def _parsed(text: str) -> Any:
    """JSON where it is, else the text, which is code."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, Mapping | list) else text


def _paired(found: Mapping[str, Any], entry: str, most: int) -> Cases:
    """APPS, TACO, and the `ground_truth` of verl's data: `inputs` and `outputs` of the same length."""
    inputs, outputs = found.get("inputs"), found.get("outputs")
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or len(inputs) != len(outputs)
        or not inputs
    ):
        raise ValueError(f"the tests of the item are {_shown(found)}; they may be {FORMS}")
    return _cases(inputs[:most], outputs[:most], str(found.get("fn_name") or entry))


def _listed(found: list[Mapping[str, Any]], entry: str, most: int) -> Cases:
    """LiveCodeBench, DeepCoder: an object a test."""
    for each in found:
        if "input" not in each or "output" not in each:
            raise ValueError(f"a test of the item is {_shown(each)}; give it as input and output")
    named = found[0].get("fn_name") or (found[0].get("metadata") or {}).get("func_name") or entry
    calls = found[0].get("testtype", found[0].get("type", "")) in ("functional", "function_call", "")
    inputs, outputs = ([each[key] for each in found[:most]] for key in ("input", "output"))
    return _cases(inputs, outputs, str(named or "") if calls else "")


def _cases(inputs: list[Any], outputs: list[Any], function: str) -> Cases:
    if not function:
        return Cases("program", [_lines(each) for each in inputs], [_lines(each) for each in outputs])
    # LiveCodeBench writes each argument as a line of JSON.
    arguments = [
        [json.loads(line) for line in each.splitlines()] if isinstance(each, str) else [*_sequence(each)]
        for each in inputs
    ]
    returned = [
        _parsed_value(each) if isinstance(given, str) else each
        for each, given in zip(outputs, inputs, strict=True)
    ]
    return Cases("call", [[_plain(each) for each in given] for given in arguments], returned, function)


def _sequence(given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise ValueError(f"the arguments of a call are {_shown(given)}; give a list of them")
    return given


def _plain(value: Any) -> Any:
    """As the sandbox writes what JSON reads."""
    if isinstance(value, list):
        return {"list": [_plain(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[key, _plain(each)] for key, each in value.items()]}
    return value


def _parsed_value(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _texts(given: Any) -> list[str]:
    return [] if not given else [given] if isinstance(given, str) else [str(each) for each in given]


def _shown(value: Any) -> str:
    return f"{str(value)[:80]!r} ({type(value).__name__})"
