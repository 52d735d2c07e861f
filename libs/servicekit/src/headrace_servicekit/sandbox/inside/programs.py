"""Runs foreign code in a process that is shut in: as a program, or one of its functions."""

from __future__ import annotations

import ast
import atexit
import builtins
import importlib
import io
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any

from headrace_servicekit.sandbox.inside.values import decode, encode

FILE = "solution.py"
_CONTESTS = (
    *("collections", "heapq", "bisect", "math", "itertools", "functools", "string", "re", "copy", "random"),
    *(
        "statistics",
        "operator",
        "datetime",
        "json",
        "sys",
        "io",
        "os",
        "time",
        "queue",
        "fractions",
        "decimal",
    ),
)
"""Modules that code may use without an import, and their names; of a name of two, the first one's."""


def fresh_streams(path: list[str]) -> None:
    """The standard streams anew, as those of the process that forked had read and buffered; modules from `path`."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="replace")
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="replace"
    )
    sys.stderr = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), encoding="utf-8", errors="replace", write_through=True
    )
    sys.path[:] = [
        *(entry for entry in sys.path if entry.startswith((sys.base_prefix, sys.base_exec_prefix))),
        *path,
    ]
    sys.argv = [FILE]
    for name in ("exit", "quit"):  # of the module `site`, which is left out
        builtins.__dict__.setdefault(name, sys.exit)


def finish(body: Callable[[], None]) -> int:
    """Runs `body` and does what Python does at the end of a program; returns its exit status."""
    status = 0
    try:
        body()
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001 - whatever foreign code raises is told on its stderr
        traceback.print_exception(type(error), error, _own_frames(error))
        status = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001 - too much was printed, or the stream is not one any more
            status = status or 1
    return status & 0xFF


def _own_frames(error: BaseException) -> TracebackType | None:
    """Those of the foreign code, without the ones that called it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != FILE:
        frames = frames.tb_next
    return frames


def run(code: str, *, echo: bool, lenient: bool) -> None:
    """The code as a program. With `echo`, what its last line comes to is printed, as in a notebook.

    `lenient`: see `implied`.
    """
    last: CodeType | None = None
    tree = ast.parse(code, FILE)
    if echo and tree.body and isinstance(ending := tree.body[-1], ast.Expr):
        tree.body.pop()
        last = _compiled(ast.Expression(ending.value), "eval")
    namespace = _namespace("__main__")
    namespace.update(implied(tree, lenient=lenient))
    exec(_compiled(tree), namespace)  # nosec B102 - inside the sandbox
    if last is not None:
        value = eval(last, namespace)  # noqa: S307  # nosec B307 - inside the sandbox
        if value is not None:
            print(repr(value))


def call(code: str, name: str, arguments: Any, result: int) -> None:
    """Writes what the function returns, as plain data, to the descriptor `result`."""
    found = lookup(load(code, lenient=True), name)
    value = found(*(decode(each) for each in arguments))
    os.write(result, json.dumps(encode(value)).encode())


def load(code: str, before: str = "", *, lenient: bool = False) -> dict[str, Any]:
    """The names that the code defines when it is imported, behind `before`; `lenient`: see `implied`."""
    namespace = _namespace("solution")
    exec(_compiled(before), namespace)  # nosec B102 - inside the sandbox
    tree = ast.parse(code, FILE)
    for name, value in implied(tree, lenient=lenient).items():
        namespace.setdefault(name, value)
    exec(_compiled(tree), namespace)  # nosec B102 - inside the sandbox
    return namespace


def _compiled(code: ast.Module | ast.Expression | str, mode: str = "exec") -> CodeType:
    """As Python compiles it by itself: without this module's `annotations` from the future, and with assertions."""
    found: CodeType = compile(code, FILE, mode, dont_inherit=True, optimize=0)
    return found


def free_names(tree: ast.AST) -> set[str]:
    """Names that code reads and nowhere defines, built-in ones among them."""
    nodes = list(ast.walk(tree))
    used = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    own = {each.id for each in nodes if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    own |= {each.arg for each in nodes if isinstance(each, ast.arg)}
    for each in nodes:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(each.name)
        elif isinstance(each, ast.Import | ast.ImportFrom):
            own |= {(alias.asname or alias.name).partition(".")[0] for alias in each.names}
    return used - own


def implied(tree: ast.AST, *, lenient: bool) -> dict[str, Any]:
    """What code uses without an import: the names of `typing`, and, `lenient`, all that judges of contests import.

    LeetCode's signatures name List and Optional so, and its answers use Counter, heapq and inf.
    """
    found = {}
    for name in sorted(name for name in free_names(tree) if not hasattr(builtins, name)):
        modules = ["typing", *(_CONTESTS if lenient else ())]
        if lenient and name in _CONTESTS:
            found[name] = importlib.import_module(name)
        elif holder := next((each for each in modules if name in _public(each)), None):
            found[name] = getattr(importlib.import_module(holder), name)
    return found


def _public(module: str) -> list[str]:
    found = importlib.import_module(module)
    return getattr(found, "__all__", None) or [name for name in dir(found) if not name.startswith("_")]


def lookup(namespace: dict[str, Any], name: str) -> Any:
    """A function by name; where there is none, the method of an object of its class `Solution`."""
    if name in namespace:
        return namespace[name]
    if callable(solution := namespace.get("Solution")) and hasattr(solution, name):
        return getattr(solution(), name)
    raise NameError(f"the code defines no {name!r}")


def _namespace(name: str) -> dict[str, Any]:
    """That of a module which `sys.modules` knows: dataclasses and pickle look there."""
    module = type(sys)(name)
    sys.modules[name] = module
    return module.__dict__
