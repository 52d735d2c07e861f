"""Reads YAML 1.2's core schema as the plain data that JSON has: texts, finite numbers, truth values, lists, mappings.

So true and false alone are truth values (NO, on and yes are texts), 1e-5 is a number, 010 is ten, and times and dates
are texts. Whatever else YAML allows is refused with its line and column: tags, recursive and exploding aliases, deep
nesting, repeated keys. Knows no spec.
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

import yaml

MAX_BYTES = 256 * 1024
MAX_DEPTH = 64
MAX_DIGITS = 256
"""Of a number: those to the base 16 have no bound of Python's own, and no float has more than 17."""
MAX_NODES = 20_000
"""Scalars, lists and mappings, counted as often as aliases repeat them."""


CORE = (
    ("null", re.compile(r"(~|null|Null|NULL|)\Z"), [*"~nN", ""]),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), [*"tTfF"]),
    ("int", re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), [*"-+0123456789"]),
    (
        "float",
        re.compile(
            r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z"
        ),
        [*"-+.0123456789"],
    ),
    ("merge", re.compile(r"<<\Z"), ["<"]),
)
"""Kinds of plain scalars (YAML 1.2.2, 10.3.2; merge keys are of 1.1), their form and what they begin with."""
_TAG = "tag:yaml.org,2002:"
_BREAKS = "\x85\u2028\u2029"
"""Characters that end a line for PyYAML, as in YAML 1.1, and are part of a text in 1.2."""
_BLANK = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
"""Of letters, marks and symbols those without a shape."""


class YamlProblem(ValueError):
    """Text that is no such data. `line` and `column` count from 1, and are 0 where no place is known."""

    def __init__(self, problem: str, fix: str, *, line: int = 0, column: int = 0) -> None:
        super().__init__(f"line {line}, column {column}: {problem}" if line else problem)
        self.line = line
        self.column = column
        self.problem = problem
        self.fix = fix


def invisible(text: str) -> int:
    """The position of the first character that cannot be seen and is no plain space; -1 where there is none.

    >>> invisible("lr\\u00a0"), invisible("learning rate")
    (2, -1)
    """
    return next((at for at, character in enumerate(text) if _is_invisible(character)), -1)


def _is_invisible(character: str) -> bool:
    if character == " ":
        return False
    kind = unicodedata.category(character)
    variant = (
        "\u180b" <= character <= "\u180f" or "\ufe00" <= character <= "\ufe0f" or character >= "\U000e0000"
    )
    return kind in ("Cc", "Cf", "Cs", "Zs", "Zl", "Zp") or character in _BLANK or variant


def read_yaml(text: str) -> Any:
    """The data that `text` holds; None for none. Raises YamlProblem.

    >>> read_yaml("optimizer: {lr: 2e-5}  # YAML 1.1 would read a text")
    {'optimizer': {'lr': 2e-05}}
    >>> read_yaml("country: NO")
    {'country': 'NO'}
    """
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise YamlProblem(f"is larger than {MAX_BYTES >> 10} KiB", "put data into files that the spec names")
    text = text.removeprefix("\ufeff")
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        words = ", ".join(part for part in (error.context, error.problem) if part)
        if mark is None:
            raise YamlProblem(words, "mend it there") from error
        raise _unread(text, words, mark) from error
    except yaml.reader.ReaderError as error:
        line, column = _place(text, error.position)
        raise YamlProblem(
            f"the character {error.character!r} (a code) is not allowed",
            "remove it, or write it as an escape in double quotes",
            line=line,
            column=column,
        ) from error


def write_yaml(data: Any) -> str:
    """`data` as YAML that a person can edit; readers of YAML 1.1 and of 1.2 read the same."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=110)
    return text


def _unread(text: str, words: str, mark: Any) -> YamlProblem:
    """What the parser stumbled over; where its line or the one before holds what nobody sees, that."""
    lines = text.split("\n")
    for number in (mark.line, mark.line - 1):
        line = lines[number].rstrip("\r") if 0 <= number < len(lines) else ""
        at = invisible(line)
        if at >= 0 and line[at] != "\t":
            return YamlProblem(
                f"{words}; {line[at]!r}, which cannot be seen, is no space",
                "put a plain space in its place, or remove it",
                line=number + 1,
                column=at + 1,
            )
    fix = "write spaces in place of the tab" if "'\\t'" in words else "mend it there"
    return YamlProblem(words, fix, line=mark.line + 1, column=mark.column + 1)


def _place(text: str, index: int) -> tuple[int, int]:
    """Line and column of a character, from 1."""
    return text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index)


def _at(mark: Any, problem: str, fix: str) -> YamlProblem:
    return YamlProblem(problem, fix, line=mark.line + 1, column=mark.column + 1)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with limits, and with YAML 1.2's core schema and line ends."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - as in the base class; CORE is added below

    def __init__(self, text: str) -> None:
        unused = (mark for mark in map(chr, range(0xF0000, 0xFFFFE)) if mark not in text)
        self._breaks = {mark: next(unused) for mark in _BREAKS if mark in text}
        super().__init__(text.translate({ord(mark): other for mark, other in self._breaks.items()}))
        self._text = text
        self._depth = 0
        self._open_anchors: set[str] = set()
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node, unless it is too deep, contains itself, or makes the whole too large."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        anchor = event.anchor
        if isinstance(event, yaml.AliasEvent):
            if anchor in self._open_anchors:
                raise _at(
                    event.start_mark,
                    f"*{anchor[:80]} stands inside of what it names",
                    "write the value itself",
                )
        elif self._depth >= MAX_DEPTH:
            raise _at(event.start_mark, f"is nested deeper than {MAX_DEPTH} levels", "nest less")
        self._depth += 1
        opened = anchor is not None and not isinstance(event, yaml.AliasEvent)
        if opened:
            self._open_anchors.add(anchor)
        node: Any = super().compose_node(parent, index)
        if opened:
            self._open_anchors.discard(anchor)
        self._depth -= 1
        self._measure(node, event.start_mark)
        return node

    def _measure(self, node: yaml.Node, mark: Any) -> None:
        if id(node) not in self._sizes:
            children = node.value if isinstance(node, yaml.CollectionNode) else []
            flat = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
            self._sizes[id(node)] = 1 + sum(self._sizes[id(child)] for child in flat)
        if self._sizes[id(node)] > MAX_NODES:
            raise _at(mark, f"holds more than {MAX_NODES:,} values", "write fewer; aliases count in full")

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys are texts that can be seen, each of which stands there once."""
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else []:
            if key.tag == f"{_TAG}merge":
                continue
            if key.tag != f"{_TAG}str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise _at(key.start_mark, f"the key {shown[:80]} is not a text", "put it in quotes")
            self._check_visible(key)
            if key.value in lines:
                raise _at(
                    key.start_mark,
                    f"the key {key.value[:80]} is there already, in line {lines[key.value]}",
                    "remove one of them",
                )
            lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def _check_visible(self, key: Any) -> None:
        """Of the key as it is written: an escape in quotes can be seen."""
        written = self._text[key.start_mark.index : key.end_mark.index]
        at = invisible(written.replace("\n", " "))
        if at >= 0:
            line, column = _place(self._text, key.start_mark.index + at)
            raise YamlProblem(
                f"the key {self._whole(key)[:80]!r} holds {written[at]!r}, which cannot be seen",
                "remove it, or write it as an escape in double quotes",
                line=line,
                column=column,
            )

    def _whole(self, node: Any) -> str:
        """The text of a scalar, with the characters that are no line ends here."""
        text = str(self.construct_scalar(node))
        return text.translate({ord(other): mark for mark, other in self._breaks.items()})

    def number(self, node: Any) -> int | float:
        """A finite number."""
        text = str(node.value)
        if len(text) > MAX_DIGITS:
            raise _at(node.start_mark, f"{text[:40]}… has {len(text):,} digits", "write a shorter number")
        try:
            if node.tag == f"{_TAG}int":
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            value = float(re.sub(r"^([-+]?)\.(?=[a-zA-Z])", r"\1", text))
        except ValueError as error:
            raise _at(
                node.start_mark, f"{text[:40]!r} is not a number", "write one, or put it in quotes"
            ) from error
        if not math.isfinite(value):
            raise _at(node.start_mark, f"{text[:40]} is not a finite number", "write a finite one")
        return value

    def truth(self, node: Any) -> bool:
        """A truth value."""
        if node.value.lower() not in ("true", "false"):
            raise _at(node.start_mark, f"{node.value[:40]!r} is no truth value", "write true or false")
        return bool(node.value.lower() == "true")

    def text(self, node: Any) -> str:
        """A text that can be sent as UTF-8."""
        value = self._whole(node)
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise _at(node.start_mark, "a text holds half a character", "remove its \\ud8…")
        return value

    def refuse(self, node: Any) -> Any:
        """Tags ask for objects; there are none."""
        raise _at(node.start_mark, f"the tag {node.tag[:80]} is not allowed", "remove the tag")


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would read as another kind."""


for _kind, _form, _first in CORE:
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", _form, _first)
    _Dumper.add_implicit_resolver(f"{_TAG}{_kind}", _form, _first)
_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag in {f"{_TAG}{kind}" for kind in ("null", "seq", "map")}
}
_Loader.add_constructor(f"{_TAG}int", _Loader.number)
_Loader.add_constructor(f"{_TAG}float", _Loader.number)
_Loader.add_constructor(f"{_TAG}bool", _Loader.truth)
_Loader.add_constructor(f"{_TAG}str", _Loader.text)
_Loader.add_constructor(f"{_TAG}merge", _Loader.text)
_Loader.add_constructor(None, _Loader.refuse)
