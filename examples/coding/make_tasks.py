"""Makes ten small repositories, each with a fault, as coding tasks with hidden tests; needs no network.

    python examples/coding/make_tasks.py TASKS             # a folder in Harbor's form
    python examples/coding/make_tasks.py TASKS --one-line  # eight tasks that one word solves, for a tiny model
    python examples/coding/make_tasks.py TASKS --swe       # TASKS/rows.jsonl in SWE-bench's form; the image has pytest

The hidden tests show how a task is kept from being cheated: they are root's alone, call the repository's code as
another user in a process of its own, with arguments drawn anew, and compare what it returns with what a reference
returns.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

IMAGE = "python:3.11-slim"
UTF8 = "utf-8"


@dataclass(frozen=True)
class Fault:
    """A function that is wrong, what is said of it, and arguments that show it."""

    name: str
    function: str
    asked: str
    wrong: str
    right: str
    arguments: str
    """An expression of a random.Random called r: a list of arguments."""
    shown: tuple[str, str]
    """Arguments that work in spite of the fault, and what comes of them: the visible test."""


FAULTS = (
    Fault(
        "words",
        "count",
        "count(text) counts words, but counts two spaces as a word between them. Words are parted by any white space.",
        'def count(text):\n    return len(text.split(" "))\n',
        "def count(text):\n    return len(text.split())\n",
        '[" ".join(r.choice(["a", "bc", "", "\\n", "d"]) for _ in range(r.randint(1, 9)))]',
        ('"a b"', "2"),
    ),
    Fault(
        "bounds",
        "clamp",
        "clamp(value, low, high) should return the value, but not below low nor above high. It mixes them up.",
        "def clamp(value, low, high):\n    return min(low, max(high, value))\n",
        "def clamp(value, low, high):\n    return max(low, min(high, value))\n",
        "[r.randint(-20, 20), r.randint(-9, 0), r.randint(1, 9)]",
        ("5, 5, 5", "5"),
    ),
    Fault(
        "middle",
        "median",
        "median(numbers) is wrong for an even count: it should be the mean of the two in the middle.",
        "def median(numbers):\n    return sorted(numbers)[len(numbers) // 2]\n",
        "def median(numbers):\n    found, half = sorted(numbers), len(numbers) // 2\n"
        "    return found[half] if len(found) % 2 else (found[half - 1] + found[half]) / 2\n",
        "[[r.randint(-50, 50) for _ in range(r.randint(1, 8))]]",
        ("[3, 1, 2]", "2"),
    ),
    Fault(
        "roman",
        "write",
        "write(number) writes Roman numerals from 1 to 39, but 4 as IIII and 9 as VIIII. They are IV and IX.",
        "def write(number):\n    tens, rest = divmod(number, 10)\n    fives, ones = divmod(rest, 5)\n"
        '    return "X" * tens + "V" * fives + "I" * ones\n',
        "def write(number):\n    tens, rest = divmod(number, 10)\n    if rest in (4, 9):\n"
        '        return "X" * tens + ("IV" if rest == 4 else "IX")\n'
        '    fives, ones = divmod(rest, 5)\n    return "X" * tens + "V" * fives + "I" * ones\n',
        "[r.randint(1, 39)]",
        ("16", '"XVI"'),
    ),
    Fault(
        "years",
        "is_leap",
        "is_leap(year) takes every fourth year. Of the hundredth years only each fourth one is a leap year.",
        "def is_leap(year):\n    return year % 4 == 0\n",
        "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n",
        "[r.choice([r.randint(1, 3000), 100 * r.randint(1, 30)])]",
        ("2024", "True"),
    ),
    Fault(
        "slugs",
        "slug",
        "slug(text) should make lower-case words joined by one dash, without any at the ends. It leaves several.",
        'def slug(text):\n    return "".join(c if c.isalnum() else "-" for c in text.lower())\n',
        'def slug(text):\n    made = "".join(c if c.isalnum() else "-" for c in text.lower())\n'
        '    return "-".join(part for part in made.split("-") if part)\n',
        '["".join(r.choice("aB3 !-") for _ in range(r.randint(1, 12)))]',
        ('"A b"', '"a-b"'),
    ),
    Fault(
        "pieces",
        "chunks",
        "chunks(items, size) loses the last piece where it is shorter than size.",
        "def chunks(items, size):\n    return [items[i : i + size] for i in range(0, len(items) - size + 1, size)]\n",
        "def chunks(items, size):\n    return [items[i : i + size] for i in range(0, len(items), size)]\n",
        "[list(range(r.randint(0, 12))), r.randint(1, 5)]",
        ("[1, 2], 1", "[[1], [2]]"),
    ),
    Fault(
        "spans",
        "merge",
        "merge(spans) joins spans [from, to] that overlap, but not those that only touch. They should be joined too.",
        "def merge(spans):\n    found = []\n    for low, high in sorted(spans):\n"
        "        if found and low < found[-1][1]:\n            found[-1][1] = max(high, found[-1][1])\n"
        "        else:\n            found.append([low, high])\n    return found\n",
        "def merge(spans):\n    found = []\n    for low, high in sorted(spans):\n"
        "        if found and low <= found[-1][1]:\n            found[-1][1] = max(high, found[-1][1])\n"
        "        else:\n            found.append([low, high])\n    return found\n",
        "[[[low, low + r.randint(1, 3)] for low in (r.randint(0, 9) for _ in range(r.randint(1, 5)))]]",
        ("[[1, 3], [2, 4]]", "[[1, 4]]"),
    ),
    Fault(
        "cipher",
        "caesar",
        "caesar(text, shift) shifts small letters alone. Capital letters should be shifted too, and stay capital.",
        "def caesar(text, shift):\n"
        "    return ''.join(chr((ord(c) - 97 + shift) % 26 + 97) if 'a' <= c <= 'z' else c for c in text)\n",
        "def caesar(text, shift):\n    def one(c):\n        for first in (65, 97):\n"
        "            if first <= ord(c) < first + 26:\n"
        "                return chr((ord(c) - first + shift) % 26 + first)\n"
        "        return c\n    return ''.join(map(one, text))\n",
        '["".join(r.choice("abzAZ ,") for _ in range(r.randint(1, 9))), r.randint(0, 30)]',
        ('"abc", 1', '"bcd"'),
    ),
    Fault(
        "turns",
        "rotate",
        "rotate(items, by) turns a list to the left, but is wrong where by is larger than the list, or below 0.",
        "def rotate(items, by):\n    return items[by:] + items[:by]\n",
        "def rotate(items, by):\n    by %= len(items) or 1\n    return items[by:] + items[:by]\n",
        "[list(range(r.randint(0, 6))), r.randint(-9, 15)]",
        ("[1, 2, 3], 1", "[2, 3, 1]"),
    ),
)
TASK_TOML = """schema_version = "1.4"

[task]
name = "made/{name}"
description = "A small repository with a fault."

[agent]
timeout_sec = 300

[verifier]
timeout_sec = 60

[environment]
memory_mb = 512
"""
DOCKERFILE = """FROM {image}
COPY repository /app
WORKDIR /app
"""
INSTRUCTION = """The repository in /app has a fault: {asked}

Correct the function `{function}` in `{name}.py`. Hidden tests judge it.
"""
VISIBLE = """import unittest

from {name} import {function}


class Test{function_title}(unittest.TestCase):
    def test_{function}(self):
        self.assertEqual({function}({given}), {expected})


if __name__ == "__main__":
    unittest.main()
"""
TEST_SH = """#!/bin/sh
exec python3 -I /tests/check.py
"""
CHECK = '''"""Root's: calls the repository's code as user 1000, which reads neither this folder nor the reward's."""

import json
import os
import random
import subprocess
import sys

MODULE, FUNCTION, WORKDIR = {module!r}, {function!r}, "/app"
REWARD = "/logs/verifier/reward.json"
CALL = """
import json, sys
calls = json.load(sys.stdin)
sys.path.insert(0, sys.argv[1])
function = getattr(__import__(sys.argv[2]), sys.argv[3])
found = [function(*each) for each in calls]
print("\\\\n" + json.dumps(found))
"""


def main():
    r = random.SystemRandom()
    calls = [{arguments} for _ in range(200)]
    ran = subprocess.run(
        [sys.executable, "-I", "-c", CALL, WORKDIR, MODULE, FUNCTION],
        input=json.dumps(calls).encode(),
        capture_output=True,
        cwd=WORKDIR,
        env={{"PATH": "/usr/bin:/bin"}},
        user=1000,
        group=1000,
        extra_groups=[],
        timeout=30,
    )
    try:
        found = json.loads(ran.stdout.decode().rstrip().rpartition("\\n")[2])
    except ValueError:
        found = None
    right = found == json.loads(json.dumps([reference(*each) for each in calls]))
    with open(REWARD, "w") as file:
        json.dump({{"reward": float(right)}}, file)
    print("right" if right else f"wrong: {{ran.stderr.decode()[-300:]}}")


def reference(*given):
    scope = {{}}
    exec(compile(RIGHT, "reference", "exec"), scope)
    return scope[FUNCTION](*given)


RIGHT = {right!r}
main()
'''
SOLVE = """#!/bin/sh
cat > /app/{name}.py <<'RIGHT'
{right}RIGHT
"""
ONE_LINE = "7"
ONE_LINE_DOCKERFILE = """FROM {image}
RUN for each in 0 1 2 3 4 5 6 7 8 9; do printf '#!/bin/sh\\necho %s > /app/answer\\n' $each > /usr/local/bin/$each; \\
    chmod 755 /usr/local/bin/$each; done
WORKDIR /app
"""
ONE_LINE_TEST = """#!/bin/sh
# 1 for the right line, less for another one that was run at all.
answer=$(head -c 8 answer 2>/dev/null)
case "$answer" in {right}) reward=1.0 ;; [0-9]) reward=0.2 ;; *) reward=0.0 ;; esac
echo "{{\\"reward\\": $reward}}" > /logs/verifier/reward.json
"""


def make(into: Path, image: str = IMAGE, only: tuple[str, ...] = ()) -> list[str]:
    """Writes the ten tasks, or some of them; returns their names."""
    chosen = [each for each in FAULTS if not only or each.name in only]
    for fault in chosen:
        task = into / fault.name
        _write(task / "task.toml", TASK_TOML.format(name=fault.name))
        _write(task / "instruction.md", INSTRUCTION.format(**vars(fault)))
        _write(task / "environment" / "Dockerfile", DOCKERFILE.format(image=image))
        make_repository(task / "environment" / "repository", fault)
        check = CHECK.format(
            module=fault.name, function=fault.function, arguments=fault.arguments, right=fault.right
        )
        _write(task / "tests" / "check.py", check)
        _write(task / "tests" / "test.sh", TEST_SH, 0o755)
        _write(task / "solution" / "solve.sh", SOLVE.format(name=fault.name, right=fault.right), 0o755)
    return [each.name for each in chosen]


def make_repository(into: Path, fault: Fault) -> None:
    """Writes the repository with the fault, and a visible test that passes in spite of it."""
    given, expected = fault.shown
    visible = VISIBLE.format(
        name=fault.name,
        function=fault.function,
        function_title=fault.function.title(),
        given=given,
        expected=expected,
    )
    _write(into / f"{fault.name}.py", fault.wrong)
    _write(into / "README.md", f"# {fault.name}\n\nRun the tests with `python3 -m unittest`.\n")
    _write(into / "tests" / "__init__.py", "")
    _write(into / "tests" / f"test_{fault.name}.py", visible)


def make_one_line(into: Path, image: str = IMAGE, count: int = 8) -> list[str]:
    """Writes tasks that the line 7 solves; any other digit is a command too, which earns a little."""
    names = [f"line-{number}" for number in range(count)]
    for number, name in enumerate(names):
        task = into / name
        _write(task / "task.toml", TASK_TOML.format(name=name))
        _write(task / "instruction.md", f"{number}?\n")
        _write(task / "environment" / "Dockerfile", ONE_LINE_DOCKERFILE.format(image=image))
        _write(task / "tests" / "test.sh", ONE_LINE_TEST.format(right=ONE_LINE), 0o755)
        _write(task / "solution" / "solve.sh", f"#!/bin/sh\n{ONE_LINE}\n", 0o755)
    return names


SWE_TEST = """from {name} import {function}


def test_seen():
    assert {function}({given}) == {expected}
"""
SWE_HIDDEN = """

def test_hidden():
    import random

    for seed in range(200):
        r = random.Random(seed)
        given = {arguments}
        assert {function}(*given) == right(*given), given


def right(*given):
    scope = {{}}
    exec({right!r}, scope)
    return scope["{function}"](*given)
"""


def make_swe(into: Path, image: str, test_command: str = "python -m pytest") -> list[str]:
    """Writes ten git repositories, and rows.jsonl: each with a commit, the change that is wanted, and tests."""
    rows = []
    for fault in FAULTS:
        repository, file, test = (
            into / "repositories" / fault.name,
            f"{fault.name}.py",
            f"tests/test_{fault.name}.py",
        )
        given, expected = fault.shown
        seen = SWE_TEST.format(name=fault.name, function=fault.function, given=given, expected=expected)
        hidden = SWE_HIDDEN.format(function=fault.function, arguments=fault.arguments, right=fault.right)
        _write(repository / file, fault.wrong)
        _write(repository / test, seen)
        _write(repository / "conftest.py", "")
        rows.append(
            {
                "instance_id": f"made__{fault.name}",
                "repo": f"repositories/{fault.name}",
                "base_commit": _committed(repository),
                "problem_statement": fault.asked,
                "patch": _diff(file, fault.wrong, fault.right),
                "test_patch": _diff(test, seen, seen + hidden),
                "FAIL_TO_PASS": [f"{test}::test_hidden"],
                "PASS_TO_PASS": [f"{test}::test_seen"],
                "image": image,
                "test_command": test_command,
            }
        )
    _write(into / "rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    return [str(row["instance_id"]) for row in rows]


def _committed(repository: Path) -> str:
    """Commits all of a folder; the commit is the same wherever that is done."""
    who = {f"GIT_{role}_{key}": text for role in ("AUTHOR", "COMMITTER") for key, text in AUTHOR.items()}
    env = {**os.environ, **who, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    for command in (("init", "-q", "-b", "main"), ("add", "-A"), ("commit", "-q", "-m", "As it is")):
        subprocess.run(["git", *command], cwd=repository, env=env, check=True)
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=repository, env=env, check=True, capture_output=True
    )
    return found.stdout.decode().strip()


AUTHOR = {"NAME": "Made", "EMAIL": "made@example.org", "DATE": "2026-01-01T00:00:00Z"}


def _diff(name: str, before: str, after: str) -> str:
    lines = [text.splitlines(keepends=True) for text in (before, after)]
    return "".join(difflib.unified_diff(*lines, fromfile=f"a/{name}", tofile=f"b/{name}"))


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding=UTF8)
    path.chmod(mode)


def main() -> None:
    """Writes the tasks anew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tasks", type=Path, help="folder to write")
    parser.add_argument("--one-line", action="store_true", help="the tasks for a tiny model instead")
    parser.add_argument("--swe", action="store_true", help="SWE-bench's form instead")
    parser.add_argument("--image", default=IMAGE, help=f"image with Python; default: {IMAGE}")
    given = parser.parse_args()
    if given.tasks.exists():
        shutil.rmtree(given.tasks)
    maker = make_one_line if given.one_line else make_swe if given.swe else make
    made = maker(given.tasks, given.image)
    print(json.dumps({"tasks": str(given.tasks), "made": made}))


if __name__ == "__main__":
    main()
