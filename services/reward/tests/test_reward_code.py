"""The scorer of code: tests in the forms of public data, verdicts that code cannot forge, several answers at a time."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import psutil
import pytest
from headrace.reward.v1 import reward_pb2
from headrace_reward import scorers
from headrace_reward.scorers.base import Answer, ScorerError
from headrace_reward.scorers.code_cases import code_of, read_cases
from headrace_reward.scorers.coding import same_text, same_value
from headrace_reward.scorers.contract import check_scorer
from headrace_servicekit.sandbox import run

REVERSE = json.dumps({"inputs": ["abc\n", "de\n"], "outputs": ["cba\n", "ed\n"]})
ADD = json.dumps({"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]})
GOOD_ADD = "def add(a, b):\n    return a + b"
MBPP = {"test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"], "test_imports": ["import math"]}
HUMANEVAL = {
    "prompt": 'def add(a, b):\n    """Adds."""\n',
    "entry_point": "add",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n",
}


def fenced(code: str) -> str:
    return f"I would write:\n```python\n{code}\n```\nThat is all."


def score(completion, reference="", metadata=None, **options):
    options = {"sandbox": "best_effort", **options}  # whatever this machine allows
    return scorers.choose("code", options).build().score(Answer("", completion, reference, metadata or {}))


def test_where_the_machine_holds_less_code_is_refused_by_the_key_and_the_fix(monkeypatch):
    found = run.walls()
    monkeypatch.setattr(run, "_opened", lambda: (None, replace(found, namespaces=False)))
    with pytest.raises(
        ScorerError, match=r"no root.*user namespaces.*or set sandbox: best_effort"
    ) as refused:
        scorers.choose("code", {}).build()
    assert refused.value.field == "options.sandbox"
    scorers.choose("code", {"sandbox": "best_effort"}).build()
    monkeypatch.undo()
    if found.missing:
        with pytest.raises(ScorerError):
            scorers.choose("code", {}).build()
    else:
        scorers.choose("code", {}).build()


def test_it_holds_the_contract():
    check_scorer("code", {"sandbox": "best_effort"}, Answer("", GOOD_ADD, "assert add(1, 2) == 3"))


@pytest.mark.parametrize(
    ("completion", "reference", "metadata", "expected"),
    [
        (fenced("print(input()[::-1])"), REVERSE, {}, 1.0),
        (fenced("print(input())"), REVERSE, {}, 0.0),
        (fenced("print('cba')"), REVERSE, {}, 0.0),
        (fenced("import os\nprint(input()[::-1], flush=True)\nos._exit(0)"), REVERSE, {}, 1.0),
        ("print(input()[::-1])", "", {"input_output": REVERSE}, 1.0),
        ("print(input()[::-1])", json.dumps([{"input": "ab", "output": "ba", "testtype": "stdin"}]), {}, 1.0),
        (fenced(GOOD_ADD), ADD, {}, 1.0),
        (fenced("class Solution:\n    def add(self, a, b):\n        return a + b"), ADD, {}, 1.0),
        (fenced("def add(a, b):\n    return 3"), ADD, {}, 0.0),
        (GOOD_ADD, json.dumps([{"input": "1\n2", "output": "3", "fn_name": "add"}]), {}, 1.0),
        (fenced(GOOD_ADD), "", MBPP, 1.0),
        (fenced("def add(a, b):\n    return 3"), "", MBPP, 0.0),
        (GOOD_ADD, "assert add(1, 2) == 3", {}, 1.0),
        ("    return a + b", "", HUMANEVAL, 1.0),
        (fenced(GOOD_ADD), "", HUMANEVAL, 1.0),
        ("    return a - b", "", HUMANEVAL, 0.0),
        ("", "", MBPP, 0.0),
        ("no code at all", "", MBPP, 0.0),
    ],
)
def test_the_forms_of_public_data(completion, reference, metadata, expected):
    assert score(completion, reference, metadata) == expected


@pytest.mark.parametrize(
    "code",
    [
        "import os\nprint('passed'); os._exit(0)",
        "class E:\n    def __eq__(s, o): return True\ndef add(a, b): return E()",
        "import sys\ndef add(a, b):\n    print('passed'); sys.exit(0)",
        "def add(a, b):\n    import os\n    os.write(3, b'3'); os._exit(0)",
        "def add(a, b):\n    while True: pass",
        "def check(f): pass\ndef add(a, b): return 0",
    ],
)
@pytest.mark.parametrize(
    "metadata", [MBPP, HUMANEVAL, {"input_output": ADD}], ids=["assert", "check", "call"]
)
def test_forged_verdicts_do_not_pass(code, metadata):
    assert score(code, "", metadata, timeout_s=0.4) == 0.0


def test_a_share_of_the_tests_where_that_is_asked_for():
    three = fenced("def add(a, b):\n    return 3")
    assert score(three, "", MBPP, partial=True) == 0.5
    assert score(three, "", MBPP, partial=True, most_tests=1) == 1.0
    assert score(three, "", {"mine": MBPP["test_list"]}, tests="mine", partial=True) == 0.5


@pytest.mark.parametrize(
    ("reference", "metadata", "key", "words"),
    [
        ("", {}, "", "the item has no tests"),
        ("", {"a": 1}, "mine", "no key 'mine'; keys: a"),
        ('{"inputs": ["a"], "outputs": []}', {}, "", "they may be"),
        ('[{"input": "a"}]', {}, "", "give it as input and output"),
        ("[1]", {}, "", "they may be"),
    ],
)
def test_items_without_tests_are_named(reference, metadata, key, words):
    with pytest.raises(ValueError, match=words):
        read_cases(Answer("", "x", reference, metadata), key, 9)


def test_the_last_block_is_the_code():
    assert code_of("```python\na\n```\nor\n```\nb\n```") == "b\n"
    assert code_of("```py\na\nb") == "a\nb" and code_of("a = 1") == "a = 1"
    assert code_of("  ```python\n  a\n  ```") == "  a\n"


def test_outputs_are_compared_by_line_and_number():
    for kept in "\x0b\x0c\x85\u00a0\u2028":  # parts of a text (S3 B17)
        assert same_text(f"a{kept}b", f"a{kept}b", 0) and not same_text(f"a{kept}b", "a b", 0)
        assert not same_text(f"a{kept}b", "a\nb", 0)
    assert same_text("1 2\r\n", "1\t2", 0)
    assert same_text("1 2 \n3\n\n", "1 2\n3", 0) and not same_text("1\n2", "1 2", 0)
    assert same_text("0.3333333", "0.33333333", 1e-6) and not same_text("0.33", "0.3333", 1e-6)
    assert not same_text("3.0", "3", 1e-6) and not same_text("nan", "1.0", 1e-6)
    assert same_value((1, [2.0000001]), [1, [2.0]], 1e-6) and not same_value(True, 1, 0)
    assert (
        same_value({1: "a"}, {"1": "a"}, 0) and not same_value([1], [1, 2], 0) and not same_value("1", 1, 0)
    )


async def test_answers_side_by_side_through_the_service(reward):
    """One that hangs, one that floods and good ones: each has its own verdict, and nothing is left behind."""
    before = set(_sandboxes())
    await reward.open(
        {"name": "code", "options": {"timeout_s": 1.5, "total_s": 3.0, "sandbox": "best_effort"}}
    )
    hang, flood = "def add(a, b):\n    while True: pass", "def add(a, b):\n    return 'x' * 10**10"
    begun = time.monotonic()
    found = await reward.answers(GOOD_ADD, hang, GOOD_ADD, flood, GOOD_ADD, metadata=MBPP)
    assert time.monotonic() - begun < 10
    assert [(each.status, each.reward) for each in found] == [
        (reward_pb2.SCORE_STATUS_OK, value) for value in (1.0, 0.0, 1.0, 0.0, 1.0)
    ]
    await reward.close()
    for _ in range(100):
        if not (left := set(_sandboxes()) - before):
            break
        await asyncio.sleep(0.02)
    assert not left


def _sandboxes() -> list[int]:
    found = psutil.Process().children(recursive=True)
    return [each.pid for each in found if "sandbox.inside" in " ".join(each.cmdline())]


async def test_an_item_without_tests_is_the_scorers_fault_and_says_so(reward):
    await reward.open({"name": "code", "options": {"sandbox": "best_effort"}})
    (broken,) = await reward.answers("print(1)")
    assert (
        broken.status == reward_pb2.SCORE_STATUS_SCORER_BROKEN
        and "name their key as options.tests" in broken.detail
    )
