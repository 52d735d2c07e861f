"""Whether a test proves anything: it is tried on code that does nothing, and one that no code can fail proves nothing.

Knows no process: what a test finds defined is given to it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Generator, Iterator
from typing import Any

from headrace_servicekit.sandbox.inside.suites import (
    NotRunnable,
    carry_out,
    checks_something,
    collected,
    failed_check,
)

_MOST_QUESTIONS = 100_000
_OWN_FAULTS = (SyntaxError, ImportError, NameError, NotRunnable)
"""Raised by a test for which the code has every name: no code can pass it."""
Names = Callable[[ast.Module, Callable[[str], Any]], dict[str, Any]]
"""What a test finds defined; the second argument gives what the code defines by a name."""


class _Endless(BaseException):
    """A test asks without end for what never comes."""


class _Nothing:
    """What code that does nothing defines: its names, and all that is called, read or computed of them.

    All its comparisons hold, or none does; with `none`, its calls return None.
    """

    def __init__(self, truth: bool, none: bool) -> None:
        self._truth, self._none, self._asked = truth, none, 0

    def _same(self, *_: Any, **__: Any) -> _Nothing:
        self._asked += 1
        if self._asked > _MOST_QUESTIONS:
            raise _Endless
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Nothing, or None."""
        return None if self._none else self._same()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._same()

    def __iter__(self) -> Iterator[Any]:
        return iter([self._same()] * len(self))

    def __await__(self) -> Generator[None, None, Any]:
        return self()
        yield

    def __exit__(self, *_: object) -> None: ...

    def __bool__(self) -> bool:
        return self._same()._truth

    def __eq__(self, other: object) -> bool:
        return bool(self)

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__

    def __hash__(self) -> int:
        return id(self)

    def __len__(self) -> int:
        return 7 if self._truth else 1

    def __int__(self) -> int:
        return 7919 if self._truth else -104729

    __index__ = __int__

    def __float__(self) -> float:
        return float("nan")

    def __str__(self) -> str:
        return f"nothing {self._truth}"

    __enter__ = __next__ = __getitem__ = __setitem__ = __delitem__ = __neg__ = __pos__ = __abs__ = _same
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __round__ = _same
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __lshift__ = __rshift__ = _same


def missing(test: str, names: Names) -> str:
    """Why a test says nothing of the code; empty where some code fails it.

    Code that does nothing has to fail a check. Where its values, which are of no type, end the test by another error,
    a test that has checks counts.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"it is no Python: {error}"
    stopped = ""
    for truth, none in ((False, False), (True, False), (False, True)):
        nothing = _Nothing(truth, none)
        try:
            carry_out(test, names(tree, lambda name, same=nothing: same))  # type: ignore[misc]
        except _OWN_FAULTS as error:
            return f"it cannot run: {type(error).__name__}: {error}"
        except BaseException as error:  # noqa: BLE001 - tests raise anything
            if failed_check(error):
                return ""
            stopped = stopped or ("" if none else f"{type(error).__name__}: {error}")
    if not stopped:
        return f"it passes whatever the code does{_uncalled(tree)}"
    return "" if any(map(checks_something, ast.walk(tree))) else f"it checks nothing, and ends by {stopped}"


def _uncalled(tree: ast.Module) -> str:
    """What a test defines and nothing calls."""
    named = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    run = collected(tree)
    left = [
        each.name
        for each in tree.body
        if isinstance(each, functions) and each.name not in named and each not in run
    ]
    if not left:
        return ": it asserts nothing of what the code gives"
    return f": nothing calls its {', '.join(left)}{'; give the entry_point' if 'check' in left else ''}"
