"""Plug-ins by name: built-in ones, and those that other packages publish as entry points. Knows no service.

A name leads to a `Plugin`: a light object with a model of its options and a reference to what it builds. Names are
listed without an import; a plug-in's own packages are imported when one is built.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from headrace_schema.references import Unread, literals, resolved
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace_servicekit.problems import KeyProblem, explain, nearest

Made = TypeVar("Made")


class PluginError(Exception):
    """A plug-in cannot be had as it is asked for; each of `problems` names its key."""

    def __init__(self, problems: list[KeyProblem]) -> None:
        super().__init__(" | ".join(map(str, problems)))
        self.problems = problems

    @property
    def metadata(self) -> dict[str, str]:
        """Key and fix of the first problem, as a refusal carries them."""
        return {"key": self.problems[0].key, "fix": self.problems[0].fix}


class Options(BaseModel):
    """Options of a plug-in; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Plugin:
    """What an entry point names.

    `build` is called with the validated options, then with what the service gives; written as "module:attribute"
    it is imported only then. `check`, where there is one, is called so before anything is built, and raises for what
    cannot be. `packages` are distributions whose versions change what the plug-in does, `modules` those that must be
    there to build it; `features` names what it offers that others of its kind may not. `broker` is a module
    that a service runs beside the plug-in's processes, with its own rights; see `headrace_simulator.pools.brokers`.
    """

    build: Callable[..., Any] | str
    options: type[BaseModel] = Options
    description: str = ""
    packages: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    check: Callable[..., None] | str | None = None
    modules: tuple[str, ...] = ()
    broker: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether its modules are there; imports none but the packages around them."""
        try:
            return all(find_spec(module) is not None for module in self.modules)
        except ModuleNotFoundError:
            return False

    def factory(self) -> Callable[..., Any]:
        """What builds it; raises ImportError or AttributeError where a reference leads nowhere."""
        return _resolved(self.build)


def plugin(
    options: type[BaseModel] = Options, packages: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Plugin]:
    """Makes a plug-in of a class whose constructor takes its options; its docstring's first line describes it."""

    def make(build: Callable[..., Any]) -> Plugin:
        description = (build.__doc__ or "").strip().partition("\n")[0]
        return Plugin(build, options, description, packages)

    return make


@dataclass(frozen=True)
class Chosen(Generic[Made]):
    """A plug-in with its validated options."""

    name: str
    plugin: Plugin
    options: BaseModel
    """As the spec has them, with references in place of secrets."""
    options_key: str = "options"

    def build(self, *given: Any) -> Made:
        """Builds it from its options and what the service gives; what its constructor raises goes through.

        Raises PluginError for a secret that is not there.
        """
        made: Made = self.plugin.factory()(self.read_options(), *given)
        return made

    def read_options(self) -> BaseModel:
        """The options with what their references stand for. Raises PluginError, which shows no secret."""
        plain = self.options.model_dump(exclude_unset=True)
        try:
            found = resolved(plain)
        except Unread as error:
            problem = KeyProblem(f"{self.options_key}.{error.key}", error.reason, error.fix)
            raise PluginError([problem]) from error
        if found is plain:
            return self.options
        try:
            return type(self.options).model_validate(found)
        except ValidationError as error:
            at = ".".join(map(str, error.errors()[0]["loc"]))
            reason = "what its reference stands for is no valid value"
            raise PluginError([KeyProblem(f"{self.options_key}.{at}", reason, "correct it there")]) from None

    def check(self, *given: Any) -> None:
        """Lets it look at what the service gives before anything is built; what it raises goes through."""
        if self.plugin.check is not None:
            _resolved(self.plugin.check)(self.options, *given)


class Registry(Generic[Made]):
    """The plug-ins of one kind.

    `key` and `options_key` are where a run spec names a plug-in and its options. `built_in` leads from names to
    "module:attribute", as entry points of `group` do. `adapt` makes a Plugin of what a reference leads to where
    plug-ins of this kind are published as something else; it raises TypeError saying what should be published.
    """

    def __init__(
        self,
        group: str,
        kind: str,
        key: str,
        options_key: str,
        built_in: Mapping[str, str],
        adapt: Callable[[Any], Plugin] | None = None,
    ) -> None:
        self.group, self.kind, self.key, self.options_key = group, kind, key, options_key
        self._built_in = [EntryPoint(name, value, group) for name, value in built_in.items()]
        self._adapt = adapt or _is_plugin

    def _points(self) -> dict[str, list[EntryPoint]]:
        found: dict[str, dict[str, EntryPoint]] = {}
        for point in (*self._built_in, *_published(self.group, _installed())):
            # A distribution that lies on the path twice publishes the same reference twice.
            found.setdefault(point.name, {}).setdefault(point.value, point)
        return {name: list(points.values()) for name, points in sorted(found.items())}

    def names(self) -> list[str]:
        """Every name, sorted; imports nothing."""
        return list(self._points())

    def installed(self) -> list[str]:
        """Names of the plug-ins that can be built here; one that cannot be imported is none of them."""
        found = []
        for name in self.names():
            with suppress(PluginError):
                found += [name] if self.find(name).is_installed else []
        return found

    def find(self, name: str) -> Plugin:
        """The plug-in of a name. Raises PluginError: unknown, published twice, or broken."""
        points = self._points().get(name, [])
        if not points:
            close = nearest(name, self.names())
            hint = f"did you mean {close!r}? " if close else ""
            raise self._error(f"there is no {self.kind} {name!r}", f"{hint}known: {', '.join(self.names())}")
        if len(points) > 1:
            raise self._error(
                f"the {self.kind} {name!r} is published {len(points)} times: {', '.join(map(_origin, points))}",
                "remove or rename all but one",
            )
        return self._load(points[0])

    def choose(self, name: str, options: Mapping[str, Any]) -> Chosen[Made]:
        """A plug-in with these options. Raises PluginError as `find` does, and for options that are wrong.

        Secrets in them are looked for first: no other problem shows one.
        """
        found = self.find(name)
        if wrong := literals(options):
            raise PluginError([self._below(KeyProblem(each.key, each.problem, each.fix)) for each in wrong])
        try:
            return Chosen(name, found, found.options.model_validate(dict(options)), self.options_key)
        except ValidationError as error:
            raise PluginError([self._below(each) for each in explain(error, found.options)]) from error

    def build_all(self) -> list[Made]:
        """All plug-ins with their defaults, by name. Raises PluginError as `find` does."""
        return [self.choose(name, {}).build() for name in self.names()]

    def capabilities(self, warn: Callable[[str], object]) -> list[str]:
        """One "name={JSON Schema of its options}" for each plug-in that loads; `warn` is called for the others."""
        listed = []
        for name in self.names():
            try:
                schema = self.find(name).options.model_json_schema()
            except PluginError as error:
                warn(f"{self.kind} {name} is left out: {error}")
                continue
            listed.append(capability(name, schema))
        return listed

    def features(self, names: Iterable[str]) -> list[str]:
        """One "name:feature" for each feature of these plug-ins; one that cannot be had has none."""
        found = []
        for name in names:
            try:
                found += [f"{name}:{feature}" for feature in self.find(name).features]
            except PluginError:
                continue
        return found

    def _below(self, problem: KeyProblem) -> KeyProblem:
        key = self.options_key if problem.key == "(whole)" else f"{self.options_key}.{problem.key}"
        return KeyProblem(key, problem.problem, problem.fix)

    def _load(self, point: EntryPoint) -> Plugin:
        try:
            return self._adapt(point.load())
        except (ImportError, AttributeError) as error:
            reason = f"the {self.kind} {point.name!r} ({_origin(point)}) cannot be imported: {error}"
            raise self._error(reason, "repair or remove the package that publishes it") from error
        except TypeError as error:
            reason = f"the {self.kind} {point.name!r} ({_origin(point)}) {error}"
            raise self._error(reason, "repair the package that publishes it") from error

    def _error(self, reason: str, fix: str) -> PluginError:
        return PluginError([KeyProblem(self.key, reason, fix)])


@lru_cache(maxsize=64)
def _published(group: str, installed: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Entry points of a group; `installed` is the set of distributions for which they hold."""
    return entry_points(group=group)


def _installed() -> tuple[tuple[str, int], ...]:
    """Stands for what is installed: each directory of the path, with when something came to it or left it last.

    To read the entry points of two hundred distributions takes 11 ms, and this some microseconds.
    """
    found = []
    for folder in sys.path:
        try:
            found.append((folder, os.stat(folder or ".").st_mtime_ns))
        except OSError:
            found.append((folder, 0))
    return tuple(found)


def _resolved(reference: Callable[..., Any] | str) -> Callable[..., Any]:
    """What a reference "module:attribute" leads to; anything else is meant itself."""
    if not isinstance(reference, str):
        return reference
    found: Callable[..., Any] = EntryPoint("", reference, "").load()
    return found


def _origin(point: EntryPoint) -> str:
    package = point.dist.name if point.dist is not None else "built in"
    return f"{point.value}, {package}"


def _is_plugin(found: Any) -> Plugin:
    if not isinstance(found, Plugin):
        raise TypeError(f"is a {type(found).__name__} and no headrace_servicekit.registry.Plugin")
    return found


def capability(name: str, schema: Mapping[str, Any]) -> str:
    """How an instance registers the JSON Schema of a plug-in's options."""
    return f"{name}={json.dumps(schema, separators=(',', ':'))}"


def read_capabilities(listed: Iterable[str]) -> dict[str, dict[str, Any]]:
    """JSON Schemas by name, as `Registry.capabilities` wrote them; what is not JSON is left out."""
    schemas = {}
    for text in listed:
        name, _, schema = text.partition("=")
        try:
            schemas[name] = json.loads(schema)
        except ValueError:
            continue
    return schemas
