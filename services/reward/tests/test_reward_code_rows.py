"""Rows of public data sets of code, with the keys and types that they are published with."""

from __future__ import annotations

import base64
import json
import zlib

import pytest
from headrace_reward.judge import judge, load
from headrace_reward.scorers.base import Answer
from headrace_reward.scorers.code_cases import read_cases


def verdict(tmp_path, code, reference="", metadata=None, prompt="", **options):
    """(score or None, fault, detail), as the service has it."""
    loaded = [load("code", options, "code", tmp_path)]
    (found,) = judge(loaded, [Answer(prompt, code, reference, metadata or {})])
    return found.scores.get("code"), found.fault, found.detail


PACKED = base64.b64encode(zlib.compress(bytes(range(256)) * 4)).decode()
LIVECODEBENCH = {
    "question_title": "count-pairs",
    "question_content": "You are given two lists…",
    "platform": "leetcode",
    "question_id": "3292",
    "contest_id": "weekly-contest-399",
    "contest_date": "2024-05-25T00:00:00",
    "starter_code": "class Solution:\n    def countPairs(self, a: List[int], k: int) -> int:\n        ",
    "difficulty": "easy",
    "public_test_cases": '[{"input": "[1, 3, 4]\\n1", "output": "3", "testtype": "functional"}, '
    '{"input": "[1, 2]\\n2", "output": "1", "testtype": "functional"}]',
    "private_test_cases": PACKED,
    "metadata": '{"func_name": "countPairs"}',
}
COUNT = """class Solution:
    def countPairs(self, a: List[int], k: int) -> Optional[int]:
        seen = defaultdict(int)
        for each in a:
            seen[each % k] += 1
        return Counter(seen)[0] if heapq and inf else 0
"""
STDIN = {
    **LIVECODEBENCH,
    "platform": "atcoder",
    "public_test_cases": '[{"input": "3\\n1 2 3\\n", "output": "6\\n", "testtype": "stdin"}]',
    "metadata": "{}",
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from typing import List\nimport math\n\n\ndef spread(numbers: List[float]) -> float:\n"
    '    """ Says how far apart the numbers are.\n    >>> spread([1.0, 2.0])\n    1.0\n    """\n',
    "canonical_solution": "    return math.fabs(max(numbers) - min(numbers))\n",
    "test": "\n\nMETADATA = {\n    'author': 'jt',\n    'dataset': 'test'\n}\n\n\ndef check(candidate):\n"
    "    assert candidate([1.0, 2.0, 3.9]) == 2.9\n",
    "entry_point": "spread",
}
POLY = {
    "task_id": "HumanEval/32",
    "prompt": "import math\n\n\ndef poly(xs: list, x: float):"
    "\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))"
    '\n\n\ndef find_zero(xs: list):\n    """ Finds x such that poly(xs, x) = 0. """\n',
    "test": "def check(candidate):\n    import math\n    import copy\n    coeffs = [6, -2]\n"
    "    solution = candidate(copy.deepcopy(coeffs))\n    assert math.fabs(poly(coeffs, solution)) < 1e-4\n",
    "entry_point": "find_zero",
}
MBPP = {
    "task_id": 2,
    "text": "Write a function to find the shared elements from the given two lists.",
    "code": "def similar_elements(a, b):\n  return tuple(set(a) & set(b))",
    "test_list": ["assert set(similar_elements((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
MBPP_PLUS = {
    **MBPP,
    "test_imports": [],
    "test": "import numpy as np\n\ndef assertion(out, exp, atol):\n    assert out == exp, 'no'\n\n"
    "inputs = [[(3, 4, 5), (5, 4)]]\nresults = [(4, 5)]\n"
    "for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
    "    assertion(tuple(sorted(similar_elements(*inp))), exp, 0)\n",
}
KODCODE = {
    "style": "instruct",
    "subset": "Prefill",
    "question_id": "Prefill_1",
    "question": "Write merge(a, b).",
    "solution": "def merge(a, b):\n    return sorted(a + b)",
    "test_code": "import pytest\nfrom solution import merge\n\n"
    "def test_basic():\n    assert merge([3], [1]) == [1, 3]\n\n"
    "def test_raises():\n    with pytest.raises(TypeError):\n        merge(1, [2])\n",
    "test_info": [{"function_declaration": "def merge(a, b):", "function_name": "merge"}],
}
LEETCODE = {
    "task_id": "two-sum",
    "question_id": 1,
    "starter_code": "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        ",
    "prompt": "import random\nimport functools\nimport collections\nfrom typing import *\nfrom collections import *\n"
    "from math import *\n\ninf = float('inf')\n\n\nclass TreeNode:\n"
    "    def __init__(self, val=0, left=None, right=None):"
    "\n        self.val = val\n        self.left = left\n        self.right = right\n\n\ndef tree_node(values: list):\n"
    "    return TreeNode(values[0], *map(TreeNode, values[1:])) if values else None\n\n\ndef is_same_tree(p, q):\n"
    "    if not p or not q:\n        return p is q\n    return p.val == q.val and is_same_tree(p.left, q.left) and "
    "is_same_tree(p.right, q.right)\n",
    "entry_point": "Solution().twoSum",
    "test": "def check(candidate):\n    assert candidate(nums = [3,3],target = 6) == [0, 1]\n"
    "    assert candidate(nums = [2,7,11],target = 9) == [0, 1]\n",
    "input_output": [{"input": "nums = [3,3], target = 6", "output": "[0, 1]"}],
}
TWO_SUM = """class Solution:
    def twoSum(self, nums: List[int], target: int) -> List[int]:
        seen = defaultdict(int)
        for i, n in enumerate(nums):
            if target - n in seen:
                return [seen[target - n], i]
            seen[n] = i
"""
BIGCODEBENCH = {
    "task_id": "BigCodeBench/0",
    "complete_prompt": 'import itertools\nSEED = 3\n\ndef task_func(n):\n    """Sums."""\n',
    "code_prompt": "import itertools\nSEED = 3\ndef task_func(n):\n",
    "test": "import unittest\nfrom unittest.mock import patch\nclass TestCases(unittest.TestCase):\n"
    "    def test_case_1(self):\n"
    "        self.assertEqual(task_func(2), 5)\n        self.assertIsInstance(task_func(2), int)",
    "entry_point": "task_func",
    "libs": "['itertools']",
}
APPS = {
    "problem_id": 0,
    "input_output": '{\n  "inputs": [\n    "2\\n3\\n"\n  ],\n  "outputs": [\n    "5\\n"\n  ]\n}',
    "solutions": '["print(int(input()) + int(input()))"]',
}
PRIME = {
    "verification_info": "{'language': 'python', 'test_cases': [{'type': 'stdin_stdout', 'input': '2\\n3', "
    "'output': '5'}]}",
}
SUM = "print(int(input()) + int(input()))"
MAKE_LIST = "def similar_elements(a, b):\n  return tuple(set(a) & set(b))"

ROWS = {
    "LiveCodeBench, functional": (LIVECODEBENCH, COUNT),
    "LiveCodeBench, stdin": (STDIN, "n = input()\nprint(sum(map(int, input().split())))"),
    "HumanEval, the rest": (HUMANEVAL, HUMANEVAL["canonical_solution"]),
    "HumanEval, whole": (
        HUMANEVAL,
        "def spread(numbers: List[float]) -> float:\n    return math.fabs(numbers[0] - 3.9)",
    ),
    "HumanEval, a helper": (POLY, "def find_zero(xs):\n    return 3.0"),
    "HumanEval, recursive": (
        {**HUMANEVAL, "test": "def check(candidate):\n    assert candidate([1, 2]) == 0"},
        "    return 0 if not numbers else spread(numbers[1:])",
    ),
    "MBPP": (MBPP, MAKE_LIST),
    "MBPP+": ({key: value for key, value in MBPP_PLUS.items() if key != "test_list"}, MAKE_LIST),
    "KodCode": (KODCODE, KODCODE["solution"]),
    "LeetCodeDataset": (LEETCODE, TWO_SUM),
    "LeetCodeDataset, trees": (
        {
            **LEETCODE,
            "entry_point": "Solution().grow",
            "test": "def check(candidate):\n"
            "    assert is_same_tree(candidate(root = tree_node([1, 2])), tree_node([2, 3]))",
        },
        "class Solution:\n    def grow(self, root: Optional[TreeNode]) -> TreeNode:\n        root.val += 1\n"
        "        root.left.val += 1\n        return root",
    ),
    "BigCodeBench": (BIGCODEBENCH, "def task_func(n):\n    return len(list(itertools.repeat(0, n))) + SEED"),
    "APPS": (APPS, SUM),
    "TACO, a function": (
        {"input_output": '{"fn_name": "f", "inputs": [[2, 3]], "outputs": [[5]]}'},
        "def f(a, b): return a + b",
    ),
    "PrimeIntellect": (PRIME, SUM),
    "DeepCoder": ({"tests": '[{"type": "stdin_stdout", "input": "2\\n3", "output": "5"}]'}, SUM),
    "DeepCoder, LiveCodeBench": (
        {
            "tests": '[{"input": "2\\n3", "output": "5", "testtype": "functional", "metadata": {"func_name": "f"}}]'
        },
        "class Solution:\n    def f(self, a: int, b: int): return a + b",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_published_row_tells_right_from_wrong(name, tmp_path):
    row, right = ROWS[name]
    assert verdict(tmp_path, f"Thus:\n```python\n{right}\n```\n", metadata=row) == (1.0, "", "")
    for wrong in (
        right.replace("return", "return 7 #").replace("print(", "print(7, "),
        "pass",
        "import os; os._exit(0)",
    ):
        assert verdict(tmp_path, wrong, metadata=row) == (0.0, "", ""), wrong


@pytest.mark.parametrize(
    ("truth", "right"),
    [
        ({"inputs": ["2\n3"], "outputs": ["5"]}, SUM),
        ({"fn_name": "f", "inputs": [[2, 3]], "outputs": [5]}, "def f(a, b): return a + b"),
        (
            {"functional": "def check(f):\n    assert f(2, 3) == 5\n\ncheck(Solution().f)"},
            "class Solution:\n  def f(s, a, b): return a + b",
        ),
        (
            {"pytest": "from solution import f\ndef test_f():\n    assert f(2, 3) == 5"},
            "def f(a, b): return a + b",
        ),
    ],
)
def test_ground_truths_of_verl(truth, right, tmp_path):
    assert verdict(tmp_path, right, json.dumps(truth)) == (1.0, "", "")
    assert verdict(
        tmp_path, "def f(*a): return 7\nclass Solution:\n  f = f\nprint(7)", json.dumps(truth)
    ) == (0.0, "", "")


def test_pickled_tests_are_refused_with_the_fix(tmp_path):
    score, fault, detail = verdict(tmp_path, COUNT, metadata=LIVECODEBENCH, tests="private_test_cases")
    assert (score, fault) == (None, "scorer") and "pickle" in detail and "as JSON" in detail


def test_a_reference_that_is_no_test_is_named(tmp_path):
    for reference in ("42", "The answer is 5.", "def f(): return 5", "#### 5"):
        score, fault, detail = verdict(tmp_path, "def f(): return 5", reference)
        assert (score, fault) == (None, "scorer") and "prove nothing" in detail, detail


def test_code_may_use_exit_and_names_its_imports(tmp_path):
    tests = '{"inputs": ["1"], "outputs": ["1"]}'
    for code in (
        "print(input())\nexit()",
        "print(input())\nquit(0)",
        "import sys\nprint(input())\nsys.exit()",
    ):
        assert verdict(tmp_path, code, tests) == (1.0, "", "")
    assert verdict(tmp_path, "def f(x): return math.gcd(x, 4)", "assert f(2) == 2")[0] == 0.0
    future = "from __future__ import annotations\ndef f(x: Undefined) -> Nowhere: return x"
    assert verdict(tmp_path, future, "assert f(2) == 2")[0] == 1.0
    row = {**HUMANEVAL, "test": "def check(f):\n    assert f([1.0, 2.0]) == 1.0"}
    future = "from __future__ import annotations\ndef spread(a: Undefined): return math.fabs(a[0] - a[1])"
    assert verdict(tmp_path, future, metadata=row) == (1.0, "", "")


@pytest.mark.parametrize("kept", ["\x0b", "\x0c", "\x85", "\u2028", "\u2029"])
def test_arguments_keep_the_line_ends_of_other_alphabets(kept):
    """(S3 B17)"""
    text = json.dumps(f"a{kept}b", ensure_ascii=False) if kept > "\x1f" else json.dumps(f"a{kept}b")
    cases = read_cases(
        Answer("", "", "", {"fn_name": "f", "input_output": {"inputs": [f"{text}\n1"], "outputs": ["1"]}}),
        "",
        9,
    )
    assert cases.given == [[f"a{kept}b", 1]]
