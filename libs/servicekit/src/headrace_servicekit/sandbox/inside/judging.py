"""A test and what it tests, in two processes: only names, plain data and errors go between them.

So the code that is judged cannot read what is expected of it, end the test, or return what is equal to everything.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TextIO

from headrace_servicekit.sandbox.inside.evidence import missing
from headrace_servicekit.sandbox.inside.frames import read_case
from headrace_servicekit.sandbox.inside.programs import free_names, implied, load, lookup
from headrace_servicekit.sandbox.inside.shared import Shared, classes_of
from headrace_servicekit.sandbox.inside.suites import carry_out

READ, PASSED, BROKEN = "read ", "passed", "broken: "
"""How a result begins once the test was read; what it is where all holds; how it begins where the test is at fault."""
SOLUTION = "solution"
_LONGEST_LINE = 1 << 22
_WELL_KNOWN = {"np": "numpy", "pd": "pandas"}


def serve(code: str, before: str, read: int, write: int) -> None:
    """The side of the code: defines it behind `before`, then answers until the other side ends."""
    requests, replies = os.fdopen(read), os.fdopen(write, "w")
    kept: list[Any] = []

    def keep(value: Any) -> dict[str, int]:
        kept.append(value)
        return {"awaitable" if inspect.isawaitable(value) else "object": len(kept) - 1}

    namespace: dict[str, Any] = {}
    shared = Shared(frozenset(), namespace)
    try:
        shared = Shared(classes_of(load(before)), namespace)
        namespace.update(load(code, before))
        error: BaseException | None = None
    except BaseException as raised:  # noqa: BLE001 - the test is told at its first question
        error = raised
    for line in requests:
        asked = json.loads(line)
        try:
            if error is not None:
                raise error
            given = shared.unpack(asked, lambda kind, index: kept[index])
            reply: dict[str, Any] = dict(shared.pack([_asked(asked, given, namespace)], keep))
        except BaseException as raised:  # noqa: BLE001 - foreign code raises anything
            reply = {"raised": type(raised).__name__, "text": str(raised)[:500]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _asked(asked: dict[str, Any], given: list[Any], namespace: dict[str, Any]) -> Any:
    """Does what `asked` says with the first of `given`; the last of the others are passed by name."""
    if asked["do"] == "get":
        return lookup(namespace, given[0])
    target, *given = given
    if asked["do"] == "call":
        plain = len(given) - len(asked["named"])
        return target(*given[:plain], **dict(zip(asked["named"], given[plain:], strict=True)))
    operations: dict[str, Callable[..., Any]] = {
        "attribute": getattr,
        "item": lambda thing, key: thing[key],
        "list": list,
        "len": len,
        "await": lambda thing: asyncio.run(_result(thing)),
    }
    return operations[asked["do"]](target, *given)


async def _result(awaitable: Any) -> Any:
    return await awaitable


class Link:
    """Questions to the code's process, one at a time."""

    def __init__(self, replies: TextIO, requests: TextIO) -> None:
        self._replies, self._requests = replies, requests
        self.shared = Shared(frozenset(), {})
        self.ended = False
        """The code has ended itself: whatever the test makes of that, it does not pass."""
        self.refused = ""
        """What the test wanted to give the code and cannot."""

    def ask(self, do: str, *given: Any, **named: Any) -> Any:
        """What came of it; raises what the code raised, as the built-in error of that name."""
        packed = self.shared.pack([*given, *named.values()], self._reference)
        try:
            self._requests.write(json.dumps({"do": do, "named": list(named), **packed}) + "\n")
            self._requests.flush()
            line = self._replies.readline(_LONGEST_LINE)
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            self.ended = True
            raise RuntimeError("the code ended, or answered too much")
        reply = json.loads(line)
        if "raised" in reply:
            kind = getattr(builtins, str(reply["raised"]), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            raise kind(str(reply["text"]))
        (value,) = self.shared.unpack(reply, self._remote)
        return value

    def _remote(self, kind: str, index: int) -> Any:
        remote = Remote(self, index)
        return remote.awaited() if kind == "awaitable" else remote

    def _reference(self, value: Any) -> dict[str, int]:
        if isinstance(value, Remote):
            return {"object": value._index}
        self.refused = f"it gives the code an object of {type(value).__name__}; only plain data can be given"
        raise TypeError(self.refused)


class Remote:
    """A function, class or object of the code, in its own process. It is equal to itself alone."""

    def __init__(self, link: Link, index: int) -> None:
        self._link, self._index = link, index

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Calls it there."""
        return self._link.ask("call", self, *given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("attribute", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self, key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._link.ask("list", self))

    def __len__(self) -> int:
        return int(self._link.ask("len", self))

    async def awaited(self) -> Any:
        """What a coroutine comes to, there."""
        return self._link.ask("await", self)


def judge(entry: str, before: str, read: int, write: int, result: int, source: int) -> None:
    """The side of the test, which it reads from `source`: writes `PASSED`, or what did not hold, to `result`."""
    test = _read(result, source)
    link = Link(os.fdopen(read), os.fdopen(write, "w"))
    try:
        defined = _defined(before)
        link.shared = Shared(classes_of(defined), defined)
        names = _names(ast.parse(test), entry, defined, lambda name: link.ask("get", name))
        verdict = PASSED if carry_out(test, names) else "no check was reached"
    except BaseException as error:  # noqa: BLE001 - tests raise anything
        verdict = "".join(traceback.format_exception_only(error)).strip() + _where(error, test)
    if link.ended and verdict == PASSED:
        verdict = "RuntimeError: the code ended"
    os.write(result, (BROKEN + link.refused if link.refused else verdict).encode("utf-8", "replace"))


def examine(entry: str, before: str, result: int, source: int) -> None:
    """Writes what the first of the tests that prove nothing lacks to `result`; see `evidence`."""
    for test in json.loads(_read(result, source)):
        found = missing(test, lambda tree, get: _names(tree, entry, _defined(before), get))
        if found:
            os.write(result, f"{found}: {test.strip()[-160:]!r}".encode("utf-8", "replace"))
            return


def _read(result: int, source: int) -> str:
    test = read_case(source).decode("utf-8", "surrogatepass")
    os.close(source)
    os.write(result, READ.encode())
    return test


class _Solution(ModuleType):
    """The module `solution`, which tests import: what they take of it is the code's."""

    def __init__(self, get: Callable[[str], Any]) -> None:
        super().__init__(SOLUTION)
        self._get = get

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._get(name)


def _defined(before: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "before"}
    exec(compile(before, "before.py", "exec", dont_inherit=True), namespace)  # nosec B102 - inside the sandbox
    return namespace


def _names(
    tree: ast.Module, entry: str, defined: dict[str, Any], get: Callable[[str], Any]
) -> dict[str, Any]:
    """What the test uses and does not define: of what stands before it, modules of the library, and the code's rest.

    The code never stands in for a built-in or a module: one that redefines `abs` or `math` would judge itself. Only a
    test that uses nothing else of it is about such a function. Where `entry` is told, that alone is the code's.
    """
    namespace = {name: value for name, value in defined.items() if not name.startswith("__")}
    sys.modules[SOLUTION] = _Solution(get)
    namespace[SOLUTION] = sys.modules[SOLUTION]
    wanted = {name for name in free_names(tree) - set(namespace) if not name.startswith("__")}
    left = []
    for name in sorted(name for name in wanted if not hasattr(builtins, name)):
        if name != entry and (name in sys.stdlib_module_names or name in _WELL_KNOWN):
            namespace[name] = importlib.import_module(_WELL_KNOWN.get(name, name))
        else:
            left.append(name)
    imports = any(
        (isinstance(each, ast.ImportFrom) and each.module == SOLUTION)
        or (isinstance(each, ast.Import) and any(alias.name == SOLUTION for alias in each.names))
        for each in ast.walk(tree)
    )
    if entry:
        left = [entry]
    elif not left and not imports:
        calls = [
            each.func.id
            for each in ast.walk(tree)
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
        ]
        left = sorted(wanted.intersection(calls))
        if len(left) > 1:
            raise NameError(f"which of {', '.join(left)} is tested? Name it as entry_point")
    return implied(tree, lenient=False) | namespace | {name: get(name) for name in left}


def _where(error: BaseException, test: str) -> str:
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "test.py"
    ]
    if isinstance(error, SyntaxError) or not lines or lines[-1] is None:
        return ""
    written = re.split(r"\r\n?|\n", test)  # The lines of Python; `splitlines` knows more of them.
    return f" at: {written[lines[-1] - 1].strip()[:200]}"
