"""Code that passes its tests: programs by their output, functions by what they return, assertions.

Tests come in the forms that data sets of code have: APPS and TACO, LiveCodeBench, MBPP, HumanEval. The code runs in a
sandbox (`headrace_servicekit.sandbox`); outputs are compared here, and assertions in a process of their own, so that
nothing that the code does can say that it is right.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from headrace_servicekit.registry import Options, plugin
from headrace_servicekit.sandbox.inside.judging import PASSED
from headrace_servicekit.sandbox.inside.values import NotPlain, decode
from headrace_servicekit.sandbox.run import (
    POLICY,
    Limits,
    NotHeld,
    Outcome,
    Outcomes,
    Policy,
    require_walls,
    run_calls,
    run_programs,
    run_tests,
)
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from headrace_reward.scorers.base import Answer, ScorerError

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


_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_MEBIBYTE = 1 << 20


class CodeOptions(Options):
    """Options of `code`."""

    tests: str = Field("", description="the item's key with its tests; left out: the usual ones")
    partial: bool = Field(False, description="the score is the share of tests passed; else 1 for all of them")
    timeout_s: PositiveFloat = Field(2.0, description="of one test, in wall and in CPU time")
    total_s: PositiveFloat = Field(4.0, description="of all tests of an answer; stay below reward.timeout_s")
    most_tests: PositiveInt = Field(100, description="tests of an item that are run; the first ones")
    memory_mib: PositiveInt = Field(512, description="memory of the code")
    output_kib: PositiveInt = Field(1024, description="what the code may print in a test")
    tolerance: NonNegativeFloat = Field(
        1e-6, description="relative error of floating-point numbers that counts as none"
    )
    sandbox: Policy = Field("required", description=POLICY)


@plugin(CodeOptions)
class Code:
    """1 when the answer's last code block passes the item's tests, in a sandbox; or the share that it passes."""

    def __init__(self, options: CodeOptions) -> None:
        self._options = options
        self._limits = Limits(
            wall_s=options.timeout_s,
            memory_bytes=options.memory_mib * _MEBIBYTE,
            output_bytes=options.output_kib << 10,
        )
        # To the service's log: each child says what holds the code there.
        try:
            held = require_walls(options.sandbox)
        except NotHeld as error:
            raise ScorerError("options.sandbox", str(error)) from error
        sys.stderr.write(f"scorer code: {held}\n")

    def score(self, answer: Answer) -> float:
        """Between 0 and 1; ValueError where the item has no tests that can be read."""
        options = self._options
        cases = read_cases(answer, options.tests, options.most_tests)
        code = code_of(answer.completion)
        if not code.strip():
            return 0.0
        if cases.begin and cases.function and not re.search(rf"\b{re.escape(cases.function)}\b\s*[(=]", code):
            code = cases.begin + code  # HumanEval asks for the rest of a function
        passed = 0
        with closing(self._outcomes(cases, code)) as outcomes:
            for index, outcome in enumerate(outcomes):
                if self._passes(cases, index, outcome):
                    passed += 1
                elif not options.partial:
                    return 0.0
        return passed / len(cases.given)

    def _outcomes(self, cases: Cases, code: str) -> Outcomes:
        limits, total_s = self._limits, self._options.total_s
        if cases.kind == "program":
            return run_programs(code, cases.given, limits, total_s=total_s)
        if cases.kind == "call":
            return run_calls(code, cases.function, cases.given, limits, total_s=total_s)
        return run_tests(code, cases.given, limits, entry=cases.function, total_s=total_s)

    def _passes(self, cases: Cases, index: int, outcome: Outcome) -> bool:
        if outcome.end != "exit":
            return False
        if cases.kind == "test":
            return outcome.result == PASSED
        expected = cases.expected[index]
        if cases.kind == "program":
            return outcome.status == 0 and same_text(outcome.out, expected, self._options.tolerance)
        try:
            returned = decode(json.loads(outcome.result))
        except (ValueError, NotPlain):
            return False
        # Some data sets wrap what is returned in a list.
        either = (expected, expected[0]) if isinstance(expected, list) and len(expected) == 1 else (expected,)
        return any(same_value(returned, each, self._options.tolerance) for each in either)


def code_of(completion: str) -> str:
    """The last fenced block of an answer, one that is cut too; without any, the whole answer.

    >>> code_of("So:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    blocks = _FENCE.findall(completion)
    return str(blocks[-1]) if blocks else completion


def same_text(printed: str, expected: str, tolerance: float) -> bool:
    """Line by line, without blanks at their ends and empty lines at the end; numbers within the tolerance."""
    ours, theirs = ([line.split() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        len(ours_line) == len(theirs_line)
        and all(map(lambda a, b: a == b or _near(a, b, tolerance), ours_line, theirs_line))
        for ours_line, theirs_line in zip(ours, theirs, strict=True)
    )


def _near(printed: str, expected: str, tolerance: float) -> bool:
    if not re.search(r"[0-9][.e]|\.[0-9]", expected):  # an integer is exact
        return False
    try:
        return _close(float(printed), float(expected), tolerance)
    except ValueError:
        return False


def _close(given: float, expected: float, tolerance: float) -> bool:
    return abs(given - expected) <= tolerance * max(1.0, abs(expected))


def same_value(given: Any, expected: Any, tolerance: float) -> bool:
    """Equality of plain data. Lists and tuples are alike, as JSON has one of them; so are keys and their text."""
    if isinstance(expected, list | tuple):
        return (
            isinstance(given, list | tuple)
            and len(given) == len(expected)
            and all(map(lambda a, b: same_value(a, b, tolerance), given, expected))
        )
    if isinstance(expected, Mapping):
        if not isinstance(given, Mapping) or len(given) != len(expected):
            return False
        named = {str(key): value for key, value in given.items()}
        return all(
            str(key) in named and same_value(named[str(key)], value, tolerance)
            for key, value in expected.items()
        )
    if isinstance(expected, float) and isinstance(given, int | float) and not isinstance(given, bool):
        return _close(given, expected, tolerance) or given == expected
    return bool(given == expected) and isinstance(given, bool) == isinstance(expected, bool)
