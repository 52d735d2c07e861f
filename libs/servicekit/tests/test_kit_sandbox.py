"""Code of a model in the sandbox: what it may do works, and none of the ways out does, with namespaces and without."""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from headrace_servicekit.process.spawn import TREE_VARIABLE
from headrace_servicekit.sandbox import run
from headrace_servicekit.sandbox.inside.calls import CHECKED, FREE
from headrace_servicekit.sandbox.inside.seccomp import filter_of
from headrace_servicekit.sandbox.inside.values import NotPlain, decode, encode
from headrace_servicekit.sandbox.run import Limits, Outcome, run_calls, run_programs, run_tests

LIMITS = Limits(wall_s=2.0, memory_bytes=256 << 20, output_bytes=1 << 16, scratch_bytes=1 << 20)
SECRET = "the-secret-of-this-service"
OUT = "ESCAPED"


def _sections(name: str) -> list[tuple[str, str]]:
    """What follows each line of `#### TITLE` in a file beside this one."""
    parts = (Path(__file__).parent / name).read_text().split("#### ")[1:]
    return [(title, code) for title, _, code in (part.partition("\n") for part in parts)]


def _judged() -> Iterator[tuple[str, str, str]]:
    """Code, a test of it, and how the verdict begins; `never` where there is none in time."""
    for verdict, both in _sections("sandbox_tests.txt"):
        code, test = both.split("####\n")
        yield code, test.rstrip(), "" if verdict == "never" else verdict


@pytest.fixture(scope="module", params=["namespaces", "none"])
def walls(request):
    """All walls of this machine, and those that a container without namespaces leaves."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "none":
            patch.setattr(run, "_WAYS", (False,))
        patch.setenv(TREE_VARIABLE, f"sandbox-{uuid.uuid4().hex}/1")
        patch.setenv("SECRET_TOKEN", SECRET)
        run._opened.cache_clear()
        if run.walls().namespaces is (request.param == "none"):
            pytest.skip("this kernel allows no namespaces")
        yield request.param
        run._opened()[0].end()
    run._opened.cache_clear()


def program(code: str, given: str = "", **limits) -> Outcome:
    (outcome,) = run_programs(code, [given], replace(LIMITS, **limits))
    return outcome


ESCAPES = dict(_sections("sandbox_escapes.txt"))
"""Code by what it tries; it prints ESCAPED where it comes through."""


def started() -> list[Path]:
    """The processes that sandboxes of these tests have started, by a name in their environment."""
    tree, own = os.environ[TREE_VARIABLE], run._opened()[0]._process.pid
    return [pid for pid in Path("/proc").glob("[0-9]*") if tree in _environment(pid) and int(pid.name) != own]


@pytest.mark.parametrize("way", ESCAPES)
def test_no_way_out(way, walls, tmp_path):
    secrets, path = tmp_path / "secrets", str(tmp_path / "socket")
    secrets.write_text(SECRET)
    code = ESCAPES[way]
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket(socket.AF_UNIX) as local:
        local.bind(path)
        local.listen()
        for name, value in (
            ("SECRETS", secrets),
            ("SOCKET", path),
            ("PORT", listening.getsockname()[1]),
            ("TEST", os.getpid()),
        ):
            code = code.replace(name, str(value))
        begun = time.monotonic()
        outcome = program(code, wall_s=0.4)
    assert time.monotonic() - begun < 4
    assert OUT not in outcome.out and SECRET not in outcome.out + outcome.err, outcome
    assert len(outcome.out) <= LIMITS.output_bytes and len(outcome.err) <= 2000
    ends = time.monotonic() + 2
    while left := started():
        assert time.monotonic() < ends, f"left behind: {left}"
        time.sleep(0.02)


def _environment(pid: Path) -> str:
    try:
        return (pid / "environ").read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("way", "end", "said"),
    [
        ("memory flood", "exit", "MemoryError"),
        ("output flood", "output", ""),
        ("error flood", "output", ""),
        ("bytes that are no text", "output", ""),
        ("hangs and catches all", "time", ""),
        ("threads without end", "exit", "can't start new thread"),
    ],
)
def test_floods_end_at_their_limit(way, end, said):
    assert program("print('well')").out == "well\n"
    outcome = program(ESCAPES[way], wall_s=2.0 if end != "time" else 0.3)
    assert outcome.end == end and said in outcome.err


@pytest.mark.parametrize(
    ("code", "given", "out"),
    [
        ("print(input()[::-1])", "abc\n", "cba\n"),
        ("import sys\nprint(sum(map(int, sys.stdin)))", "1\n2\n", "3\n"),
        ("import os; print(len(os.read(0, os.fstat(0).st_size)))", "x" * 200_000, "200000\n"),
        ("import threading\nthreading.Thread(target=lambda: print('thread')).start()", "", "thread\n"),
        ("import asyncio\nasync def f(): return 3\nprint(asyncio.run(f()))", "", "3\n"),
        ("import atexit\natexit.register(print, 'end')\nraise SystemExit", "", "end\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n  a: int\nprint(A(1))", "", "A(a=1)\n"),
        ("if __name__ == '__main__': print('é')", "", "é\n"),
        (
            "import resource, sys, threading\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 25, 1 << 25))\n"
            "threading.stack_size(1 << 25); sys.setrecursionlimit(20000)\ndef f(n): return n and 1 + f(n - 1)\n"
            "t = threading.Thread(target=lambda: print(f(9000))); t.start(); t.join()",
            "",
            "9000\n",
        ),
        (
            "import queue, concurrent.futures as c\nprint(sum(c.ThreadPoolExecutor(3).map(abs, [-1, 2])))",
            "",
            "3\n",
        ),
        ("import sqlite3\nprint(sqlite3.connect(':memory:').execute('select 1').fetchone()[0])", "", "1\n"),
        ("import numpy as np\nprint(int((np.ones((99, 99)) @ np.ones((99, 99))).sum()))", "", "970299\n"),
        (
            "import time, datetime, zoneinfo, uuid, secrets, socket, subprocess, ssl; print('loaded')",
            "",
            "loaded\n",
        ),
        ("import random, heapq, re, decimal, itertools; print(len({str(n) for n in range(9)}))", "", "9\n"),
    ],
)
def test_programs_do_what_programs_do(code, given, out, walls):
    assert program(code, given).out == out


def test_an_error_is_told_with_its_own_lines_alone():
    outcome = program("x = 1\nprint(x / 0)")
    assert (outcome.end, outcome.status) == ("exit", 1)
    assert outcome.err.startswith('Traceback (most recent call last):\n  File "solution.py", line 2')
    assert outcome.err.endswith("ZeroDivisionError: division by zero\n")
    assert "SyntaxError" in program("print(").err


FILES = """
import os, shutil, sqlite3, tempfile, pathlib
pathlib.Path("a/b").mkdir(parents=True)
pathlib.Path("a/b/c").write_text("1")
shutil.copyfile("a/b/c", "d"); shutil.move("d", "e"); os.replace("e", "a/f")
with tempfile.NamedTemporaryFile() as file: file.write(b"2"); file.flush()
base = sqlite3.connect("base"); base.execute("create table t (n)"); base.commit(); base.close()
print(sorted(os.listdir("a"))); shutil.rmtree("a")
"""


def test_files_in_its_folder_are_used_as_usual(walls):
    if walls == "namespaces":
        assert program(FILES).out == "['b', 'f']\n"


HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"}


def test_numbers_of_calls_are_those_of_the_kernel():
    """Of this machine, where its headers are installed."""
    machine = os.uname().machine
    if not (header := Path(HEADERS.get(machine, "none"))).exists():
        pytest.skip("no kernel headers")
    found = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    column = ("x86_64", "aarch64").index(machine)
    table = {name: numbers[column] for name, numbers in FREE.items()}
    table |= {name: numbers[column] for name, (numbers, _) in CHECKED.items()}
    assert {name: number for name, number in table.items() if str(number) != found.get(name)} == {}
    assert all(len(filter_of(each)) // 8 < 4096 for each in ("x86_64", "aarch64"))


def test_the_folder_for_files_is_new_for_each_answer(walls):
    writes = "open('a', 'x').write('1')\nprint(open('a').read())"
    expected = "1\n" if walls == "namespaces" else ""
    assert [program(writes).out for _ in range(2)] == [expected] * 2


def test_the_last_line_is_echoed_as_in_a_notebook():
    (outcome,) = run_programs("a = 2\na + 3", [""], LIMITS, echo=True)
    assert outcome.out == "5\n"


def test_cases_come_one_by_one_and_what_is_late_is_lost():
    outcomes = list(
        run_programs("import time\ntime.sleep(float(input()))", ["0", "60", "0"], LIMITS, total_s=2.0)
    )
    assert [each.end for each in outcomes] == ["exit", "time", "time"]


def test_calls_give_and_take_plain_data():
    code = "def f(a, b=1): return {a: (b, {1}), 'big': 1 << 70, 'b': b'x'}"
    (outcome,) = run_calls(code, "f", [[encode(3)]], LIMITS)
    import json

    assert decode(json.loads(outcome.result)) == {3: (1, {1}), "big": 1 << 70, "b": b"x"}
    method = "class Solution:\n  def f(self, a): return a + 1"
    (outcome,) = run_calls(method, "f", [[1]], LIMITS)
    assert outcome.result == "2"


class Sly(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def test_what_crosses_is_of_the_built_in_types_themselves():
    assert decode(encode(Sly(3))) == 3 and type(decode(encode(Sly(3)))) is int
    assert decode(encode(Sly(3))) != 4
    values = [
        None,
        True,
        1.5,
        float("-inf"),
        "\ud800",
        [1, (2,)],
        {(1, 2): {3}},
        frozenset({4}),
        2j,
        bytearray(b"a"),
    ]
    for value in values:
        assert decode(encode(value)) == value and type(decode(encode(value))) is type(value)
    for wrong in (object(), lambda: 1, [object()]):
        with pytest.raises(NotPlain):
            encode(wrong)
    for bad in ({"list": 3}, {"int": "zz"}, {"object": 1}, {}, {"set": [{"list": []}]}):
        with pytest.raises(NotPlain):
            decode(bad)


@pytest.mark.parametrize(("code", "test", "verdict"), list(_judged()))
def test_tests_judge_code_in_another_process(code, test, verdict):
    (outcome,) = run_tests(code, [test], replace(LIMITS, wall_s=10.0 if verdict else 0.6))
    assert outcome.result.startswith(verdict) and (outcome.result == "passed") is (verdict == "passed")


def test_where_the_entry_is_told_the_code_gives_nothing_else():
    code = "def close(a, b): return True\ndef add(a, b): return 5"
    test = "def close(a, b): return abs(a - b) < 1\nassert close(add(1, 2), 3)"
    assert [each.result[:9] for each in run_tests(code, [test], LIMITS, entry="add")] == ["Assertion"]
    (outcome,) = run_tests(code, ["assert close(add(1, 2), 3)"], LIMITS, entry="add")
    assert outcome.result.startswith("NameError: name 'close'")


def test_what_is_not_held_is_said():
    bare = run.Walls(namespaces=False, other_user=False, landlock=0, seccomp=False)
    assert len(bare.missing) == 4 and "NOT HELD: it can start processes" in str(bare)
    full = run.Walls(namespaces=True, other_user=False, landlock=7, seccomp=True)
    assert not full.missing and str(full) == "code runs behind namespaces, Landlock 7, seccomp, limits"
