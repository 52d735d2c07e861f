"""What can be said of a change in two minutes on two cores: `python -m ci.check [--since COMMIT]` (`make check`).

Lint, import rules, ceilings, ten seeds of the simulation, the types of the packages that changed, and tests: those that
changed, then those that import a changed module, then those that import one of its importers, until TESTS_S are over.
It says how many tests that left out; `make test` runs all. A change is what git finds since the commit where this
branch left the main one, with what is not committed.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import grimp
import pytest

from ci.parts import Tally, print_tally, run_parts
from ci.plan import LINT, PACKAGES, UNITS, Part, script, tool

ROOT = Path(__file__).resolve().parents[1]
TESTS_S = 70.0
QUICK_LINT = ("ruff", "format", "imports", "private-paths", "words", "ceilings")
MAIN = ("@{upstream}", "origin/HEAD", "main")
"""Where the main branch is looked for; the first that git knows."""
FLEETS = ("integration_tests/", "benchmarks/")
"""Tests that start processes by the dozen: only those that changed or import a changed module."""


def base() -> str:
    """The commit where the present branch left the main one; HEAD on the main branch itself."""
    for name in MAIN:
        found = _git("merge-base", "HEAD", name)
        if found:
            return found[0]
    return "HEAD"


def changed_files(since: str) -> set[str]:
    """Python files and others that differ from a commit, and those that git does not know yet."""
    names = {*_git("diff", "--name-only", since), *_git("ls-files", "--others", "--exclude-standard")}
    return {name for name in names if (ROOT / name).is_file()}


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else []


def tests_of(changed: Iterable[str]) -> list[str]:
    """Test files of a change, the nearest first."""
    changed = set(changed)
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    modules = {module_of(name) for name in changed} - {""}
    helpers = {Path(name).stem for name in changed if _is_helper(name)}
    known = modules & graph.modules
    importers = {each for name in known for each in graph.find_modules_that_directly_import(name)}
    distances: dict[str, int] = {}
    for path in sorted(each for folder in _test_folders() for each in (ROOT / folder).rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        imported = set(_imports(ast.parse(path.read_text(encoding="utf-8"))))
        if name in changed:
            distances[name] = 0
        elif imported & (modules | helpers):
            distances[name] = 1
        elif imported & importers and not name.startswith(FLEETS):
            distances[name] = 2
    return sorted(distances, key=lambda name: (distances[name], name))


def module_of(name: str) -> str:
    """The module that a file of a package is; empty where it is none."""
    parts = name.removesuffix(".py").split("/")
    roots = [index for index, part in enumerate(parts) if part.startswith("headrace") or parts[0] == "ci"]
    if not name.endswith(".py") or not roots or "tests" in parts:
        return ""
    return ".".join(parts[roots[0] :]).removesuffix(".__init__")


def _is_helper(name: str) -> bool:
    return (
        "/tests/" in name and name.endswith(".py") and not Path(name).name.startswith(("test_", "conftest"))
    )


def _test_folders() -> list[str]:
    return [*(f"{folder}/tests" for folder in UNITS.values()), "integration_tests", "benchmarks/tests"]


def _imports(tree: ast.AST) -> Iterator[str]:
    """Names of the modules that a file may import: of `from a import b` both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


class Budget:
    """Ends a run of tests, without failing it, after the test that is at work when the time is over."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._session: pytest.Session | None = None
        self.left = 0

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Remembers whom to stop."""
        self._session = session

    def pytest_runtest_logfinish(self) -> None:
        """Stops when the time is over."""
        if self._session is not None and time.monotonic() > self._until:
            self._session.shouldstop = "the time for tests is over"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Counts what did not run."""
        self.left = session.testscollected - session.testsfailed - self._passed(session)

    def _passed(self, session: pytest.Session) -> int:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        stats: Mapping[str, Sequence[object]] = reporter.stats if reporter else {}
        return sum(len(stats.get(word, ())) for word in ("passed", "skipped", "xfailed"))


def run_tests(files: Sequence[str], seconds: float) -> int:
    """Runs test files in their order for some time; returns pytest's status, 0 where only the time was over."""
    budget = Budget(seconds)
    status = pytest.main(
        ["-p", "no:cacheprovider", "--durations=5", "--durations-min=5", *files], plugins=[budget]
    )
    if budget.left:
        print(f"{budget.left} tests did not run within {seconds:.0f} s: `make test` runs all")
    failed = status not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.INTERRUPTED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    )
    return int(failed)


def plan(since: str) -> list[Part]:
    """The parts of a check."""
    changed = changed_files(since)
    parts = [part for part in LINT if part.name in QUICK_LINT]
    packages = sorted({module_of(name).split(".")[0] for name in changed} & set(PACKAGES))
    tests = tests_of(changed)
    print(
        f"{len(changed)} files differ from {since[:12]}; packages: {packages or 'none'}; test files: {len(tests)}"
    )
    if tests:
        parts.append(script("tests", "-m", "ci.check", "--tests", *tests, timeout_s=300))
    if packages:
        parts.append(tool("mypy", "mypy", *(text for each in packages for text in ("-p", each))))
    return [*parts, script("simulation", "-m", "headrace_simulation", "--seeds", "10")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 when anything failed."""
    parser = argparse.ArgumentParser(prog="python -m ci.check", description=__doc__)
    parser.add_argument(
        "--since", help="the commit to compare with; left out: where this branch left the main one"
    )
    parser.add_argument(
        "--tests", nargs="+", metavar="FILE", help="run these tests for the time of a check, no more"
    )
    options = parser.parse_args(arguments)
    if options.tests:
        return run_tests(options.tests, TESTS_S)
    tally, started = Tally(), time.monotonic()
    run_parts(plan(options.since or base()), tally)
    print_tally("check", tally, time.monotonic() - started)
    return int(tally.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
