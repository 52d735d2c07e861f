"""How an item becomes a prompt: templates with {field} places, nothing else of Python's format language."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from headrace_schema.images import MARKS, counted, in_order, marks_in, marks_of
from headrace_schema.problems import Impossible, choose, problem
from headrace_schema.sections.generating import PromptSection

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.data.packed import PackedItems

DOUBLE = "write a brace that is meant as text twice: {{ or }}"


@dataclass(frozen=True)
class PromptContent:
    """A prompt before tokenisation: chat messages with a prefill, or else plain text.

    `arguments` are passed to the chat template beside the messages. `images` are files; the messages have one mark for
    each.
    """

    chat: list[dict[str, Any]] | None
    text: str | None
    prefill: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Template:
    """Text with places: literals and field names in turn."""

    parts: tuple[tuple[str, str | None], ...]

    @staticmethod
    def parse(text: str, key: str, known: set[str], lacking: Callable[[str], str]) -> Template:
        """A template; `Impossible` names `key` when a place is ill-formed or its field is not in `known`.

        `lacking` says what is wrong with a name that is not.
        """
        try:
            parsed = list(Formatter().parse(text))
        except ValueError as error:
            raise Impossible([problem(key, f"is no template ({error})", DOUBLE)]) from error
        for _, name, form, conversion in parsed:
            if name is None:
                continue
            if form or conversion or (name not in known and not name.isidentifier()):
                place = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
                raise Impossible([problem(key, f"{{{place}}} is not the plain name of a field", DOUBLE)])
            if name not in known:
                raise Impossible([problem(key, lacking(name), choose(name, known, extra=DOUBLE))])
        return Template(tuple((literal, name) for literal, name, _, _ in parsed))

    def render(self, values: Mapping[str, object]) -> str:
        """The text with every place filled."""
        return "".join(literal + ("" if name is None else str(values[name])) for literal, name in self.parts)


class Prompter:
    """Renders items by a prompt section, whose templates are checked against all items when it is made."""

    def __init__(self, section: PromptSection, items: PackedItems) -> None:
        self._fields = items.fields
        self._count = len(items)
        self._section = section
        self._template = self._parse(section.template, "data.prompt.template")
        self._prefill = self._parse(section.prefill, "data.prompt.prefill")
        self._system = None if section.system is None else self._parse(section.system, "data.prompt.system")
        self._check_conversations(items)
        self._check_images(items)

    @property
    def shown(self) -> list[str]:
        """Fields that a prompt shows beside the question, sorted."""
        templates = [self._template, self._prefill, *([self._system] if self._system else [])]
        return sorted({name for each in templates for _, name in each.parts if name} - {"question"})

    def check(self, text: str, key: str) -> None:
        """Raises `Impossible` naming `key` when `text` is not a valid template over the known fields."""
        self._parse(text, key)

    def render(self, item: DataItem, prefill: str | None = None) -> PromptContent:
        """The prompt of an item; `prefill` is a template that stands in for the section's own."""
        values = {**item.fields, "question": item.question}
        opening = self._prefill if prefill is None else self._parse(prefill, "prefill")
        text, begun = self._template.render(values), opening.render(values)
        if not self._section.chat:
            return PromptContent(chat=None, text=text + begun)
        *before, last = item.messages or ({"role": "user"},)
        messages: list[dict[str, Any]] = [*map(dict, before), {**last, "content": text}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system.render(values)})
        marks = [kind for each in messages for kind in marks_in(each["content"] or "", item.kinds)]
        if item.images and not marks:
            messages[-1]["content"] = marks_of(item.images) + text
        images = tuple(in_order(item.images, marks)) if marks else item.images
        arguments = {**self._section.template_arguments, **item.arguments}
        return PromptContent(messages, None, begun, arguments, images)

    def _parse(self, text: str, key: str) -> Template:
        everywhere = {name for name, count in self._fields.items() if count == self._count}
        return Template.parse(text, key, everywhere | {"question"}, self._lacking)

    def _lacking(self, name: str) -> str:
        """What is wrong with a field that not every item has."""
        have = self._fields[name]
        if have:
            return f"{self._count - have} of {self._count} items have no field {name!r}"
        return f"items have no field {name!r}"

    def _check_images(self, items: PackedItems) -> None:
        """Each item has an image for each mark of its texts and of the templates."""
        if not items.pictured:
            return
        if not self._section.chat:
            reason = "items have images, which only a chat template places"
            raise Impossible([problem("data.prompt.chat", reason, "leave it out")])
        written = [
            kind
            for template in (self._template, *([self._system] if self._system else []))
            for literal, _ in template.parts
            for kind in marks_in(literal, {each for _, kinds in items.pictured for each in kinds})
        ]
        shown = ", ".join(MARKS[kind] for kind in dict.fromkeys(written)) or MARKS["image"]
        for own, kinds in items.pictured:
            if sorted([*own, *written]) not in ([], [*kinds]):
                reason = f"it has {len(written)} marks {shown}, and there are items with {counted(kinds)}"
                more = f", for which their own texts have {len(own)}" if own else ""
                fix = "write one for each image, or none: then they stand before the question"
                raise Impossible([problem("data.prompt.template", reason + more, fix)])
        if written and items.pictured.total() < len(items):
            reason = f"it has a mark {shown}, and {len(items) - items.pictured.total()} items have no image"
            raise Impossible(
                [problem("data.prompt.template", reason, "leave it out: images come first then")]
            )

    def _check_conversations(self, items: PackedItems) -> None:
        if not items.conversations:
            return
        if not self._section.chat:
            reason = "items are conversations, which only a chat template renders"
            raise Impossible([problem("data.prompt.chat", reason, "leave it out")])
        own = items.system_messages
        if own and self._system is not None:
            reason = f"{own} items begin with a system message of their own"
            raise Impossible([problem("data.prompt.system", reason, "leave it out, or remove theirs")])
