"""A verdict on code needs evidence: a test that no code can fail, or none can pass, gives none and is named."""

from __future__ import annotations

import json

import pytest
from headrace.reward.v1 import reward_pb2
from headrace_reward import scorers
from headrace_reward.judge import judge, load
from headrace_reward.scorers.base import Answer

GOOD, BAD = "def add(a, b):\n    return a + b", "def add(a, b):\n    return 3 if a == 2 else 7"
CASES = """import unittest
class TestAdd(unittest.TestCase):
    def test_it(self):
        self.assertEqual(add(1, 2), 3)"""


def verdict(tmp_path, code, reference="", metadata=None, **options):
    """(score or None, fault, detail), as the service has it."""
    loaded = [load("code", options, "code", tmp_path)]
    (found,) = judge(loaded, [Answer("", code, reference, metadata or {})])
    return found.scores.get("code"), found.fault, found.detail


RUN = {
    "pytest function": "def test_add():\n    assert add(1, 2) == 3",
    "pytest class": "class TestAdd:\n    def setup_method(self):\n        self.three = 3\n    def test_it(self):\n"
    "        assert add(1, 2) == self.three",
    "unittest": CASES,
    "unittest with main": f"{CASES}\nif __name__ == '__main__':\n    unittest.main()",
    "unittest, async": "import unittest\nclass A(unittest.IsolatedAsyncioTestCase):\n    async def test_it(self):\n"
    "        self.assertEqual(add(1, 2), 3)",
    "unittest, subtests": "import unittest\nclass A(unittest.TestCase):\n    def test_it(self):\n"
    "        for a in (1, 2):\n            with self.subTest(a=a):\n                self.assertEqual(add(a, 2), a + 2)",
    "async function": "async def test_add():\n    assert add(1, 2) == 3",
    "parametrised": "import pytest\n@pytest.mark.parametrize('a, b, c', [(1, 2, 3), pytest.param(2, 2, 4)])\n"
    "def test_add(a, b, c):\n    assert add(a, b) == c",
    "parametrised twice": "import pytest\n@pytest.mark.parametrize('a', [1, 2])\n@pytest.mark.parametrize('b', [2])\n"
    "def test_add(a, b):\n    assert add(a, b) == a + b",
    "main": "if __name__ == '__main__':\n    assert add(1, 2) == 3",
    "main and exit": "import sys\ndef run():\n    return add(1, 2) == 3\n"
    "if __name__ == '__main__':\n    sys.exit(not run())",
    "a helper named test": "def test(got, expected):\n    if got != expected:\n        raise ValueError(got)\n"
    "test(add(1, 2), 3)",
    "imported": "from solution import add\ndef test_add():\n    assert add(1, 2) == 3",
    "imported module": "import solution\nassert solution.add(1, 2) == 3 and len([1]) == 1",
    "imported, all": "from solution import *\nassert add(1, 2) == 3",
    "its own check": "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)",
    "a loop": "for a, b, c in [(1, 2, 3), (2, 2, 4)]:\n    assert add(a, b) == c",
    "negated": "assert not add(1, 2) != 3",
    "no less": "assert add(1, 2) is not None and add(1, 2) == 3",
    "numpy": "np.testing.assert_allclose(add(1, 2), 3)",
}


@pytest.mark.parametrize("form", RUN)
def test_every_form_of_a_test_is_run(form, tmp_path):
    assert verdict(tmp_path, GOOD, RUN[form]) == (1.0, "", "")
    assert verdict(tmp_path, BAD.replace("3 if a == 2 else", ""), RUN[form]) == (0.0, "", "")


NOTHING = {
    "check that nobody calls": ("def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point"),
    "a function that nobody calls": ("def verify():\n    assert add(1, 2) == 3", "nothing calls its verify"),
    "a helper of an argument": ("def test_add(candidate):\n    assert candidate(1, 2) == 3", "test_add"),
    "a check that returns": ("def check(f):\n    return f(1, 2) == 3\ncheck(add)", "whatever the code does"),
    "a test that returns": ("def test_add():\n    return add(1, 2) == 3", "whatever the code does"),
    "a number": ("42", "whatever the code does"),
    "a comment": ("# add(1, 2) == 3", "whatever the code does"),
    "a pass": ("def test_add():\n    pass", "whatever the code does"),
    "an expression": ("add(1, 2) == 3", "whatever the code does"),
    "a call": ("add(1, 2)", "whatever the code does"),
    "calls of an object": ("s = add(1, 2)\ns.push(1)\ns.pop()\nassert True", "whatever the code does"),
    "a constant": ("add(1, 2)\nassert True", "whatever the code does"),
    "of itself": ("x = 3\nadd(1, 2)\nassert x == 3", "whatever the code does"),
    "an import": ("from solution import add", "whatever the code does"),
    "a name": ("assert callable(add)", "whatever the code does"),
    "swallowed": ("try:\n    assert add(1, 2) == 3\nexcept AssertionError:\n    pass", "whatever the code"),
    "swallowed, all": ("try:\n    assert add(1, 2) == 3\nexcept:\n    print('no')", "whatever the code does"),
    "swallowed exit": (
        "import sys\ntry:\n    sys.exit(add(1, 2) != 3)\nexcept SystemExit:\n    pass",
        "whatever the code does",
    ),
    "an exit that is fine": ("import sys\nok = add(1, 2) == 3\nsys.exit(0)", "whatever the code does"),
    "an exit before": ("raise SystemExit\nassert add(1, 2) == 3", "whatever the code does"),
    "debug": ("if not __debug__:\n    assert add(1, 2) == 3", "whatever the code does"),
    "a doctest": ('"""\n>>> add(1, 2)\n3\n"""', "whatever the code does"),
    "bare doctest": (">>> add(1, 2)\n3", "no Python"),
    "empty unittest": (
        "import unittest\nclass A(unittest.TestCase):\n    def helper(self): pass",
        "whatever",
    ),
    "skipped": (
        "import unittest\nclass A(unittest.TestCase):\n    @unittest.skip('x')\n    def test_it(self):\n"
        "        self.assertEqual(add(1, 2), 3)",
        "whatever the code does",
    ),
    "skipped by pytest": (
        "import pytest\n@pytest.mark.skip\ndef test_it():\n    assert add(1, 2) == 3",
        "whatever",
    ),
    "the code itself": (GOOD, "whatever the code does"),
    "an error of its own": ("assert add(1, 2) ==", "no Python"),
    "a package that is not here": ("import no_such_package\nassert add(1, 2) == 3", "no_such_package"),
    "a fixture": ("def test_add(tmp_path):\n    assert add(1, 2) == 3", "tmp_path"),
    "broken JSON": ('{"inputs": ["1"], "outputs": ["1"', "no JSON"),
}


@pytest.mark.parametrize("form", NOTHING)
def test_a_test_that_proves_nothing_breaks_the_scorer_and_is_named(form, tmp_path):
    test, words = NOTHING[form]
    for code in (GOOD, BAD, "", "import os; os._exit(0)"):
        score, fault, detail = verdict(tmp_path, code, test)
        assert (score, fault) == (None, "scorer") and words in detail, detail
    assert verdict(tmp_path, GOOD, "", {"test_list": ["assert add(1, 2) == 3", test]})[1] == "scorer"


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ({"inputs": ["1\n", "2\n"], "outputs": ["", "\n"]}, "each expected output is empty"),
        ({"inputs": [], "outputs": []}, "may be"),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [None]}, "each expected returned value is empty"),
        ([{"input": "1\n2", "output": "3", "testtype": "functional"}], "nothing names it"),
        ([{"input": "a = 1", "output": "3", "fn_name": "add"}], "as a line of JSON"),
        (
            [{"input": "1", "output": "3", "type": "stdin"}, {"input": "1", "output": "3", "type": "x"}],
            "give one",
        ),
        ([], "may be"),
        ({}, "may be"),
    ],
)
def test_cases_that_prove_nothing(tests, words, tmp_path):
    for code in ("", "pass", GOOD):
        score, fault, detail = verdict(tmp_path, code, json.dumps(tests))
        assert (score, fault) == (None, "scorer") and words in detail, detail


def test_what_the_code_gives_has_to_reach_a_check(tmp_path):
    each = "for value in add(1, 2):\n    assert value > 0"
    assert verdict(tmp_path, "def add(a, b):\n    return [a, b]", each)[0] == 1.0
    assert verdict(tmp_path, "def add(a, b):\n    return []", each) == (0.0, "", "")
    raises = "try:\n    add(1, 2)\n    assert False\nexcept (ValueError, RuntimeError):\n    pass"
    assert verdict(tmp_path, "def add(a, b):\n    raise ValueError", raises)[0] == 1.0
    for ends in ("import os\ndef add(a, b):\n    os._exit(0)", "import os\nos._exit(0)", GOOD):
        assert verdict(tmp_path, ends, raises) == (0.0, "", ""), (
            "the end of the code is no error that was asked for"
        )


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import builtins\nbuiltins.AssertionError = ValueError\ndef add(a, b): return 7",
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef add(a, b): return 7",
        "class E:\n    __eq__ = lambda *a: True\n    __ne__ = lambda *a: False\ndef add(a, b): return E()",
        "def __checked__(*a): return True\ndef add(a, b): return 7",
        "def check(f): pass\ndef test_add(): pass\ndef add(a, b): return 7",
        "import sys\nsys.modules['unittest'] = sys\ndef add(a, b): sys.exit(0)",
    ],
)
@pytest.mark.parametrize(
    "form", ["pytest function", "unittest", "its own check", "imported", "main and exit"]
)
def test_code_that_makes_its_own_evidence_gets_none(form, code, tmp_path):
    assert verdict(tmp_path, code, RUN[form]) == (0.0, "", "")


def test_an_object_that_cannot_be_given_is_the_tests_fault(tmp_path):
    test = "class Node: pass\nassert add(Node(), 2) == 3"
    score, fault, detail = verdict(tmp_path, GOOD, test)
    assert (score, fault) == (None, "scorer") and "an object of Node" in detail


def test_coroutines_of_the_code_are_awaited(tmp_path):
    code = "import asyncio\nasync def add(a, b):\n    await asyncio.sleep(0)\n    return a + b"
    for test in (
        "async def test_add():\n    assert await add(1, 2) == 3",
        "import asyncio\nassert asyncio.run(add(1, 2)) == 3",
    ):
        assert verdict(tmp_path, code, test) == (1.0, "", "")
        assert verdict(tmp_path, code.replace("a + b", "7"), test) == (0.0, "", "")


def test_code_is_compiled_as_python_compiles_it(tmp_path):
    """Annotations are values, as without an import from the future; those of LeetCode's signatures are known."""
    program = "class P:\n    x: int\nprint(P.__annotations__['x'] is int)"
    tests = json.dumps({"inputs": [""], "outputs": ["True"]})
    assert verdict(tmp_path, program, tests) == (1.0, "", "")
    dataclass = "from dataclasses import dataclass, fields\n@dataclass\nclass P:\n    x: int\n"
    assert (
        verdict(tmp_path, f"{dataclass}def add(a, b): return fields(P)[0].type is int", "assert add(1, 2)")[0]
        == 1.0
    )
    assert (
        scorers.choose("code", {})
        .build()
        .score(
            Answer(
                "",
                "def add(a: List[int], b: Optional[int]) -> int:\n    return a[0] + b",
                "assert add([1], 2) == 3",
            )
        )
    )


async def test_the_service_says_that_the_scorer_is_broken_and_why(reward):
    await reward.open({"name": "code"})
    metadata = {"test": "def check(candidate):\n    assert candidate(1, 2) == 3"}
    for code in (GOOD, BAD, ""):
        (found,) = await reward.answers(code, metadata=metadata)
        assert (
            found.status == reward_pb2.SCORE_STATUS_SCORER_BROKEN and "give the entry_point" in found.detail
        )
    (found,) = await reward.answers(GOOD, metadata={**metadata, "entry_point": "add"})
    assert (found.status, found.reward) == (reward_pb2.SCORE_STATUS_OK, 1.0)
