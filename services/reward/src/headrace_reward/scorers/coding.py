"""Code that passes its tests: programs by their output, functions by what they return, assertions.

Tests that code which does nothing would pass are the item's fault and give no verdict. The code runs in a
sandbox (`headrace_servicekit.sandbox`); outputs are compared here, and assertions in a process of their own, so that
nothing that the code does can say that it is right.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from typing import Any

from headrace_servicekit.registry import Options, plugin
from headrace_servicekit.sandbox.inside.judging import BROKEN, PASSED
from headrace_servicekit.sandbox.inside.values import NotPlain, decode
from headrace_servicekit.sandbox.run import (
    POLICY,
    Limits,
    NotHeld,
    Outcome,
    Outcomes,
    Policy,
    examine_tests,
    require_walls,
    run_calls,
    run_programs,
    run_tests,
)
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from headrace_reward.scorers.base import Answer, ScorerError
from headrace_reward.scorers.code_cases import Cases, code_of, read_cases

_MEBIBYTE = 1 << 20
_BLANKS = " \t\r\n"
"""What may stand between words and behind them; all else that Python counts as a blank is a text's own."""
_WORD = re.compile(rf"[^{_BLANKS}]+")
_DEFINES = r"^(?:async\s+)?(?:def|class)\s+{0}\b|^{0}\s*=|^from\s.*\bimport\b.*\b{0}\b"


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
        self._examined = lru_cache(maxsize=1024)(self._examine)
        # To the service's log: each child says what holds the code there.
        try:
            held = require_walls(options.sandbox)
        except NotHeld as error:
            raise ScorerError("options.sandbox", str(error)) from error
        sys.stderr.write(f"scorer code: {held}\n")

    def score(self, answer: Answer) -> float:
        """Between 0 and 1; ValueError where the item has no tests that can be read, or that prove something."""
        options = self._options
        cases = read_cases(answer, options.tests, options.most_tests)
        if lacking := self._lacking(cases):
            raise ValueError(f"the tests of the item prove nothing: {lacking}")
        code = code_of(answer.completion)
        if not code.strip():
            return 0.0
        if cases.begin and not re.search(_DEFINES.format(re.escape(cases.function)), code, re.MULTILINE):
            code = cases.begin + code  # HumanEval asks for the rest of a function
        passed = 0
        with closing(self._outcomes(cases, code)) as outcomes:
            for index, outcome in enumerate(outcomes):
                if self._passes(cases, index, outcome):
                    passed += 1
                elif not options.partial:
                    return 0.0
        return passed / len(cases.given)

    def _lacking(self, cases: Cases) -> str:
        """Why code that does nothing passes, or no code does; empty where the tests tell them apart."""
        if cases.kind == "test":
            return self._examined(tuple(cases.given), cases.function, cases.before)
        nothing = Outcome("exit", result="null")
        if all(self._passes(cases, index, nothing) for index in range(len(cases.given))):
            what = "output" if cases.kind == "program" else "returned value"
            return f"each expected {what} is empty, which code that does nothing gives too"
        return ""

    def _examine(self, tests: tuple[str, ...], entry: str, before: str) -> str:
        limits = replace(self._limits, wall_s=self._options.total_s)
        return examine_tests(tests, limits, entry=entry, before=before)

    def _outcomes(self, cases: Cases, code: str) -> Outcomes:
        limits, total_s = self._limits, self._options.total_s
        if cases.kind == "program":
            return run_programs(code, cases.given, limits, lenient=True, total_s=total_s)
        if cases.kind == "call":
            return run_calls(code, cases.function, cases.given, limits, total_s=total_s)
        entry, before = cases.function, cases.before
        return run_tests(code, cases.given, limits, entry=entry, before=before, total_s=total_s)

    def _passes(self, cases: Cases, index: int, outcome: Outcome) -> bool:
        if outcome.end != "exit":
            return False
        if cases.kind == "test":
            if outcome.result.startswith(BROKEN):
                raise ScorerError(
                    "options.tests", f"a test of the item {outcome.result.removeprefix(BROKEN)}"
                )
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


def same_text(printed: str, expected: str, tolerance: float) -> bool:
    """Line by line, without blanks at their ends and empty lines at the end; numbers within the tolerance."""
    ours, theirs = (
        [_WORD.findall(line) for line in text.rstrip(_BLANKS).split("\n")] for text in (printed, expected)
    )
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
