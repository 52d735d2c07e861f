"""Carries out a test: its statements, then the functions and classes that pytest and unittest would run.

Counts the checks that are made meanwhile. Knows nothing of what is tested.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

FILE = "test.py"
_COUNT = "__checked__"
_CHECKS = ("assert", "fail", "raises", "warns")
"""How the functions begin that check something, such as unittest's, pytest's and numpy's."""
_RAISED_BY_CHECKS = (AssertionError, SystemExit)


class NotRunnable(Exception):
    """A test asks for what nobody gives it."""


def carry_out(test: str, namespace: dict[str, Any]) -> bool:
    """Runs a test among these names; whether it made the checks that it has. Raises what the test raises.

    A test without functions for a test runner is the program, `__main__`. A program's end by `exit(0)` is its end.
    """
    tree = ast.parse(test, FILE)
    checks = any(map(checks_something, ast.walk(tree)))
    name = "test" if collected(tree) else "__main__"
    module = type(sys)(name)
    made = 0

    def count(value: Any = None) -> Any:
        nonlocal made
        made += 1
        return value

    module.__dict__.update(namespace, **{_COUNT: count})
    sys.modules[name] = module  # dataclasses and unittest.main look there
    counting = ast.fix_missing_locations(_Counting().visit(tree))
    code = compile(counting, FILE, "exec", dont_inherit=True, optimize=0)
    _to_its_end(partial(exec, code, module.__dict__))
    _to_its_end(partial(_run_collected, module.__dict__))
    return bool(made) or not checks


def _to_its_end(part: Callable[[], None]) -> None:
    try:
        part()
    except SystemExit as error:
        if error.code:
            raise


def collected(tree: ast.Module) -> list[ast.stmt]:
    """The functions and classes that a test runner would run: no helpers, which a test itself calls with arguments."""
    named = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    return [each for each in tree.body if _is_test(each, named)]


def _is_test(each: ast.stmt, named: set[str]) -> bool:
    if isinstance(each, ast.ClassDef):
        return each.name.startswith("Test") or any(
            ast.unparse(base).endswith("TestCase") for base in each.bases
        )
    if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) or not each.name.startswith("test"):
        return False
    arguments = each.args
    plain = len(arguments.args) == len(arguments.defaults)
    return (
        plain or bool(each.decorator_list) or not (each.name in named or arguments.args[0].arg == "candidate")
    )


def failed_check(error: BaseException) -> bool:
    """Whether what ended a test says that a check did not hold."""
    return isinstance(error, _RAISED_BY_CHECKS) or type(error).__module__.startswith("_pytest")


def checks_something(node: ast.AST) -> bool:
    """Whether a part of a test checks what it computes."""
    if isinstance(node, ast.Assert):
        return any(isinstance(each, ast.Name | ast.Call) for each in ast.walk(node.test))
    if isinstance(node, ast.Compare):
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return bool(names - {"__name__"}) or any(isinstance(each, ast.Call) for each in ast.walk(node))
    if isinstance(node, ast.With | ast.AsyncWith):
        return any(checks_something(each.context_expr) for each in node.items)
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return str(name).startswith(_CHECKS)
    return isinstance(node, ast.ExceptHandler)


class _Counting(ast.NodeTransformer):
    """Writes a count beside each check of a test."""

    def visit(self, node: ast.AST) -> Any:
        """Counts expressions by their value, and statements as they are reached."""
        counts = checks_something(node)
        self.generic_visit(node)
        if not counts:
            return node
        if isinstance(node, ast.Compare | ast.Call):
            return _counted(node, [node])
        reached = ast.copy_location(ast.Expr(_counted(node, [])), node)
        if isinstance(node, ast.Assert):
            return [reached, node]
        node.body.insert(0, reached)  # type: ignore[attr-defined]
        return node


def _counted(node: ast.AST, value: list[Any]) -> ast.Call:
    call = ast.Call(ast.Name(_COUNT, ast.Load()), value, [])
    return ast.fix_missing_locations(ast.copy_location(call, node))


def _run_collected(namespace: dict[str, Any]) -> None:
    for name, found in list(namespace.items()):
        if inspect.isfunction(found) and found.__module__ == "test" and name.startswith("test"):
            _run_function(found)
        elif inspect.isclass(found) and found.__module__ == "test":
            if "unittest" in sys.modules and issubclass(found, sys.modules["unittest"].TestCase):
                _run_cases(found)
            elif name.startswith("Test"):
                _run_class(found)


def _run_class(found: type) -> None:
    for name in [each for each in dir(found) if each.startswith("test")]:
        made = found()
        for before in ("setup_method", "setup", "setUp"):
            if set_up := getattr(made, before, None):
                set_up(*[None] * len(inspect.signature(set_up).parameters))
                break
        _run_function(getattr(made, name), [*getattr(found, "pytestmark", ())])


def _run_function(function: Callable[..., Any], marks: list[Any] | None = None) -> None:
    """Once for each set of its parameters. Raises NotRunnable for a fixture."""
    marks = [*(marks or ()), *getattr(function, "pytestmark", ())]
    if any(mark.name in ("skip", "xfail") or (mark.name == "skipif" and any(mark.args)) for mark in marks):
        return
    sets = [list(_parameters(mark)) for mark in marks if mark.name == "parametrize"]
    for each in itertools.product(*sets):
        given = {name: value for one in each for name, value in one.items()}
        needed = inspect.signature(function).parameters.values()
        if lacking := [one.name for one in needed if one.default is one.empty and one.name not in given]:
            raise NotRunnable(f"{function.__name__} takes {lacking[0]}, and there are no fixtures here")
        try:
            result = function(**given)
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
        except BaseException as error:
            if type(error).__name__ not in ("Skipped", "SkipTest"):
                raise


async def _awaited(result: Any) -> Any:
    return await result


def _parameters(mark: Any) -> Iterator[dict[str, Any]]:
    """The sets of parameters of pytest's mark."""
    names, values = (mark.args + tuple(mark.kwargs.values()))[:2]
    names = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
    for value in values:
        one = getattr(value, "values", value) if type(value).__name__ == "ParameterSet" else value
        several = type(value).__name__ == "ParameterSet" or len(names) > 1
        yield dict(zip(names, one if several else [one], strict=True))


def _run_cases(found: Any) -> None:
    """A class of unittest; raises the first error of its tests."""
    import unittest

    class First(unittest.TestResult):
        """Keeps the first error."""

        error: BaseException | None = None

        def addError(self, test: Any, err: Any) -> None:
            self.error = self.error or err[1]

        addFailure = addError

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            self.error = self.error or (err[1] if err else None)

    first = First()
    unittest.defaultTestLoader.loadTestsFromTestCase(found).run(first)
    if first.error is not None:
        raise first.error
