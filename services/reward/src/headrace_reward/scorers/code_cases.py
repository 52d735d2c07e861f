"""The tests of an item of code, in the forms of public data sets. Knows no sandbox and runs nothing."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace_reward.scorers.base import Answer

KEYS = (
    *("test_list", "test", "tests", "test_code"),
    *("input_output", "public_test_cases", "verification_info"),
)
"""Where an item's tests are looked for, before its answer."""
_PROMPTS = ("prompt", "complete_prompt", "code_prompt")
_INNER = ("test_cases", "functional", "pytest")
"""Keys of an object around the tests: PrimeIntellect's `verification_info`, the `ground_truth` of Code-R1."""
_CALLS = ("functional", "function_call")
FORMS = '{"inputs": […], "outputs": […]}, a list of {"input", "output"}, a list of assertions, or code that asserts'
_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PACKED = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
_UNPACK = "json.loads(pickle.loads(zlib.decompress(base64.b64decode(text))))"


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
    before: str = ""
    """What the question defines besides: code and tests stand behind it."""


def read_cases(answer: Answer, key: str, most: int) -> Cases:
    """The item's tests; ValueError says what it has in their place."""
    row = answer.metadata or {}
    name, found = _found(answer, row, key)
    entry = str(row.get("entry_point") or row.get("fn_name") or "")
    if isinstance(found, str):
        found = _parsed(name, found)
    if isinstance(found, Mapping) and (inner := next((each for each in _INNER if found.get(each)), None)):
        found = found[inner]
    if isinstance(found, Mapping):
        return _paired(found, entry or _function_of(row), most)
    if isinstance(found, list) and found and all(isinstance(each, Mapping) for each in found):
        return _listed(found, entry or _function_of(row), most)
    tests = [found] if isinstance(found, str) else found
    if not isinstance(tests, list) or not tests or not all(isinstance(each, str) for each in tests):
        raise ValueError(f"{name}: the tests of the item are {_shown(found)}; they may be {FORMS}")
    return _asserting(answer, row, entry, tests[:most])


def _asserting(answer: Answer, row: Mapping[str, Any], entry: str, tests: list[str]) -> Cases:
    """HumanEval, MBPP, KodCode, LeetCodeDataset, BigCodeBench: code that asserts."""
    set_up = "\n".join([*_texts(row.get("test_imports")), *_texts(row.get("test_setup_code"))])
    asks = re.search(r"^def check\(", tests[0], re.MULTILINE)
    after = (
        f"\ncheck({entry})"
        if entry and asks and not re.search(r"^\s*check\(", tests[0], re.MULTILINE)
        else ""
    )
    code = [f"{set_up}\n{test}{after}" if set_up else f"{test}{after}" for test in tests]
    root = entry.partition("(")[0].partition(".")[0]
    if not root:
        return Cases("test", code)
    text = next((str(row[each]) for each in _PROMPTS if isinstance(row.get(each), str)), answer.prompt)
    asked = code_of(text)
    begin = asked if re.search(rf"^def {re.escape(root)}\b", asked, re.MULTILINE) else ""
    return Cases("test", code, function=root, begin=begin, before=_besides(asked, root))


def _besides(code: str, name: str) -> str:
    """What a question that is code imports and defines beside the function that it asks for."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign)
    kept = [each for each in tree.body if isinstance(each, kinds) and getattr(each, "name", "") != name]
    return ast.unparse(ast.Module(list(kept), []))


def _found(answer: Answer, row: Mapping[str, Any], key: str) -> tuple[str, Any]:
    """Where the tests are, and what is there."""
    if key:
        if key not in row:
            raise ValueError(f"options.tests: the item has no key {key!r}; keys: {', '.join(row) or 'none'}")
        return key, row[key]
    for known in KEYS:
        if row.get(known):
            return known, row[known]
    if not answer.reference.strip():
        raise ValueError(
            f"the item has no tests: neither an answer nor {', '.join(KEYS)}; name their key as options.tests"
        )
    return "the item's answer", answer.reference


def _parsed(name: str, text: str) -> Any:
    """JSON, or lists and dicts as Python writes them, where it is that; else the text, which is code."""
    if _PACKED.fullmatch(text):
        raise ValueError(
            f"{name}: the tests are packed with pickle, which would run code here and is never unpacked; write "
            f"them to the data as JSON once, with {_UNPACK}"
        )
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        reason = error
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{name}: the tests of the item are no JSON: {reason}: {_shown(text)}") from reason


def _function_of(row: Mapping[str, Any]) -> str:
    """LiveCodeBench has the function's name in a column `metadata`, which is JSON as text."""
    found = row.get("metadata")
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            return ""
    return str(found.get("func_name") or "") if isinstance(found, Mapping) else ""


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
    """LiveCodeBench, DeepCoder, PrimeIntellect: an object a test."""
    for each in found:
        if "input" not in each or "output" not in each:
            raise ValueError(f"a test of the item is {_shown(each)}; give it as input and output")
    kinds = {str(each.get("testtype") or each.get("type") or "") for each in found}
    if len(kinds) > 1:
        raise ValueError(f"the tests of the item are of the types {', '.join(sorted(kinds))}; give one")
    (kind,) = kinds
    named = str(found[0].get("fn_name") or _function_of(found[0]) or entry)
    if kind in _CALLS and not named:
        raise ValueError(
            f"the tests of the item call a function (type {kind}), and nothing names it: give fn_name or entry_point"
        )
    inputs, outputs = ([each[key] for each in found[:most]] for key in ("input", "output"))
    return _cases(inputs, outputs, named if kind in (*_CALLS, "") else "")


def _cases(inputs: list[Any], outputs: list[Any], function: str) -> Cases:
    if not function:
        return Cases("program", [_lines(each) for each in inputs], [_lines(each) for each in outputs])
    returned = [
        _parsed_value(each) if isinstance(given, str) else each
        for each, given in zip(outputs, inputs, strict=True)
    ]
    arguments = [[_plain(each) for each in _arguments(given)] for given in inputs]
    return Cases("call", arguments, returned, function)


def _arguments(given: Any) -> list[Any]:
    """Of a call. LiveCodeBench writes each as a line of JSON."""
    if isinstance(given, str):
        try:
            return [json.loads(line) for line in given.removesuffix("\n").split("\n")]
        except ValueError as error:
            raise ValueError(
                f"the arguments of a call are {_shown(given)}; give each as a line of JSON: {error}"
            ) from error
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


def code_of(completion: str) -> str:
    """The last fenced block of an answer, one that is cut too; without any, the whole answer.

    >>> code_of("So:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    blocks = _FENCE.findall(completion)
    return str(blocks[-1]) if blocks else completion
