"""Reads YAML as the plain data that JSON has: texts, finite numbers, truth values, lists and mappings.

Whatever else YAML allows is refused with its line: tags, recursive and exploding aliases, deep nesting, repeated
keys. Knows no spec.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

MAX_BYTES = 256 * 1024
MAX_DEPTH = 64
MAX_DIGITS = 256
"""Of a number: those to the base 16 have no bound of Python's own, and no float has more than 17."""
MAX_NODES = 20_000
"""Scalars, lists and mappings, counted as often as aliases repeat them."""


class YamlProblem(ValueError):
    """Text that is no such data. `line` counts from 1, 0 where no line is known."""

    def __init__(self, line: int, problem: str, fix: str) -> None:
        super().__init__(f"line {line}: {problem}" if line else problem)
        self.line = line
        self.problem = problem
        self.fix = fix


def read_yaml(text: str) -> Any:
    """The data that `text` holds; None for none. Raises YamlProblem.

    >>> read_yaml("optimizer: {lr: 2e-5}  # YAML 1.1 would read a text")
    {'optimizer': {'lr': 2e-05}}
    >>> read_yaml("name: 2026-01-01")
    {'name': '2026-01-01'}
    """
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise YamlProblem(
            0, f"is larger than {MAX_BYTES >> 10} KiB", "put data into files that the spec names"
        )
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        words = ", ".join(part for part in (error.context, error.problem) if part)
        raise YamlProblem(mark.line + 1 if mark else 0, words, "mend it there") from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise YamlProblem(
            line, f"the character {error.character!r} (a code) is not allowed", "remove it"
        ) from error


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with limits, without dates, and with floats as JSON writes them."""

    # The resolvers of this class alone; `add_implicit_resolver` would change every safe loader.
    yaml_implicit_resolvers = {  # noqa: RUF012 - as in the base class
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._open_anchors: set[str] = set()
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node, unless it is too deep, contains itself, or makes the whole too large."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        anchor = event.anchor
        if isinstance(event, yaml.AliasEvent):
            if anchor in self._open_anchors:
                raise YamlProblem(
                    line, f"*{anchor[:80]} stands inside of what it names", "write the value itself"
                )
        elif self._depth >= MAX_DEPTH:
            raise YamlProblem(line, f"is nested deeper than {MAX_DEPTH} levels", "nest less")
        self._depth += 1
        opened = anchor is not None and not isinstance(event, yaml.AliasEvent)
        if opened:
            self._open_anchors.add(anchor)
        node: Any = super().compose_node(parent, index)
        if opened:
            self._open_anchors.discard(anchor)
        self._depth -= 1
        self._measure(node, line)
        return node

    def _measure(self, node: yaml.Node, line: int) -> None:
        if id(node) not in self._sizes:
            children = node.value if isinstance(node, yaml.CollectionNode) else []
            flat = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
            self._sizes[id(node)] = 1 + sum(self._sizes[id(child)] for child in flat)
        if self._sizes[id(node)] > MAX_NODES:
            raise YamlProblem(
                line, f"holds more than {MAX_NODES:,} values", "write fewer; aliases count in full"
            )

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys are texts, each of which stands there once."""
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else []:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise YamlProblem(line, f"the key {shown[:80]} is not a text", "put it in quotes")
            if key.value in lines:
                first = lines[key.value]
                raise YamlProblem(
                    line, f"the key {key.value[:80]} is there already, in line {first}", "remove one of them"
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)

    def number(self, node: Any) -> int | float:
        """A finite number."""
        kind = self.construct_yaml_int if node.tag.endswith(":int") else self.construct_yaml_float
        line = node.start_mark.line + 1
        if len(node.value) > MAX_DIGITS:
            raise YamlProblem(
                line, f"{node.value[:40]}… has {len(node.value):,} digits", "write a shorter number"
            )
        _check_reading(node.value, line)
        try:
            value: int | float = kind(node)
        except (ValueError, OverflowError, IndexError) as error:
            raise YamlProblem(
                line, f"{node.value[:40]!r} is not a number", "write one, or put it in quotes"
            ) from error
        if isinstance(value, float) and not math.isfinite(value):
            raise YamlProblem(line, f"{node.value[:40]} is not a finite number", "write a finite one")
        return value

    def truth(self, node: Any) -> bool:
        """A truth value."""
        try:
            return bool(self.construct_yaml_bool(node))
        except KeyError as error:
            raise YamlProblem(
                node.start_mark.line + 1, f"{node.value[:40]!r} is no truth value", "write true or false"
            ) from error

    def text(self, node: Any) -> str:
        """A text that can be sent as UTF-8."""
        value = str(self.construct_yaml_str(node))
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise YamlProblem(node.start_mark.line + 1, "a text holds half a character", "remove its \\ud8…")
        return value

    def refuse(self, node: Any) -> Any:
        """Tags ask for objects; there are none."""
        raise YamlProblem(
            node.start_mark.line + 1, f"the tag {node.tag[:80]} is not allowed", "remove the tag"
        )


def _check_reading(text: str, line: int) -> None:
    """Refuses the numbers that YAML 1.1 reads as nobody means them: 010 as 8, 1:30 as 90."""
    if ":" in text:
        raise YamlProblem(
            line, f"{text[:40]} would be a number to the base 60", f"write '{text[:40]}' in quotes"
        )
    digits = text.lstrip("+-")
    if len(digits) > 1 and digits[0] == "0" and digits.replace("_", "").isdigit():
        plain = digits.replace("_", "").lstrip("0") or "0"
        raise YamlProblem(
            line, f"{text[:40]} would be read as octal", f"write {plain[:40]}, or put it in quotes"
        )


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag in {f"tag:yaml.org,2002:{kind}" for kind in ("null", "seq", "map")}
}
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.number)
_Loader.add_constructor("tag:yaml.org,2002:bool", _Loader.truth)
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.text)
_Loader.add_constructor(None, _Loader.refuse)
