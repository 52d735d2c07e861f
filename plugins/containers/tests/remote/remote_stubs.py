"""Packages of services with their calls stubbed, by signatures that were recorded of them or by the packages' own.

A test runs twice: over a module made of `recorded.json`, which needs no package, and over the package itself, where it
is installed, whose classes stay and whose callables that reach the service are put in place. Both bind every call.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RECORDED: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "recorded.json").read_text())
"""By package: `module:Class.method` to its parameters, or to "error OF" for a class of errors."""
Handlers = Mapping[str, Callable[..., Any]]


class Calls(list[tuple[str, dict[str, Any]]]):
    """What was called, with its arguments by name."""

    def of(self, name: str) -> list[dict[str, Any]]:
        """The arguments of each call of a name."""
        return [given for called, given in self if called == name]


class Thing:
    """An object of the service's, with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def parameters(function: Any) -> str:
    """A signature in its short form: names, kinds and whether there is a default."""
    kept = []
    for each in inspect.signature(function).parameters.values():
        default = inspect.Parameter.empty if each.default is inspect.Parameter.empty else None
        kept.append(each.replace(annotation=inspect.Parameter.empty, default=default))
    return str(inspect.Signature(kept))


def signature(short: str) -> inspect.Signature:
    """Of the short form."""
    return inspect.signature(eval(f"lambda {short[1:-1]}: None"))  # noqa: S307 - our own file


def resolve(name: str) -> Any:
    """What a name of `recorded.json` means in the package."""
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def bound(calls: Calls, name: str, of: inspect.Signature, handler: Callable[..., Any]) -> Callable[..., Any]:
    """A callable of a signature, which notes its calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append((name, dict(of.bind(*args, **kwargs).arguments)))
        return handler(*args, **kwargs)

    return call


class Service:
    """A stubbed package: `calls` of it, and what objects of it are made of."""

    def __init__(self, package: str, is_real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.is_real, self._recorded = Calls(), is_real, RECORDED[package]
        self._monkeypatch = monkeypatch
        for loaded in [each for each in sys.modules if each == f"headrace_containers.remote.{package}"]:
            monkeypatch.delitem(sys.modules, loaded)
        if is_real:
            pytest.importorskip(package, reason=f"the package {package} is not installed")
            return
        for name in [each for each in sys.modules if each.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        for name, what in self._recorded.items():
            module, _, path = name.partition(":")
            if what.startswith("error "):
                self._put(module, path, self._error(path, what.removeprefix("error ")))
            elif what == "data":
                self._put(module, path, Thing)
            elif what.startswith("value "):
                self._put(module, path, what.removeprefix("value "))

    def _error(self, name: str, of: str) -> type[Exception]:
        bases = tuple(self.named(each) if ":" in each else Exception for each in of.split(","))
        return type(name, bases, {})

    def named(self, name: str) -> Any:
        """A class or value of the package."""
        return resolve(name)

    def _put(self, module: str, path: str, what: Any) -> None:
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            each = ".".join(parts[:count])
            if each not in sys.modules:
                self._monkeypatch.setitem(sys.modules, each, ModuleType(each))
                if count > 1:
                    setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], sys.modules[each])
        owner: Any = sys.modules[module]
        for part in path.split(".")[:-1]:
            if not hasattr(owner, part):
                setattr(owner, part, type(part, (), {}))
            owner = getattr(owner, part)
        setattr(owner, path.split(".")[-1], what)

    def stub(self, name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
        """A callable in the place of a name; its signature is the package's, without `self`."""
        of = signature(parameters(resolve(name))) if self.is_real else signature(self._recorded[name])
        names = list(of.parameters.values())
        if names and names[0].name == "self":
            of = of.replace(parameters=names[1:])
        return bound(self.calls, name.partition(":")[2], of, handler)

    def replace(self, name: str, handler: Callable[..., Any]) -> None:
        """Puts such a callable there, for a function or a method of a class itself."""
        made = self.stub(name, handler)
        module, _, path = name.partition(":")
        if not self.is_real:
            self._put(module, path, staticmethod(made) if "." in path else made)
            return
        owner = importlib.import_module(module)
        for part in path.split(".")[:-1]:
            owner = getattr(owner, part)
        self._monkeypatch.setattr(owner, path.split(".")[-1], staticmethod(made) if "." in path else made)

    def fails(self, name: str, *args: Any, **attributes: Any) -> Exception:
        """An error of the package's own class."""
        kind = self.named(name)
        error = kind.__new__(kind)
        error.args = args
        vars(error).update(attributes)
        return error  # type: ignore[no-any-return]


def check_recorded(package: str) -> None:
    """That what was recorded is so in the package."""
    pytest.importorskip(package, reason=f"the package {package} is not installed")
    for name, what in RECORDED[package].items():
        found = resolve(name)
        if what.startswith("error "):
            assert issubclass(found, Exception), name
            for base in what.removeprefix("error ").split(","):
                assert ":" not in base or issubclass(found, resolve(base)), name
        elif what.startswith("value "):
            assert found is not None, name
        elif what != "data":
            own = parameters(found)
            # An older release of the same package names its keywords nowhere.
            assert (
                what.startswith(own.removesuffix("**kwargs)")) if own.endswith("**kwargs)") else own == what
            ), name
