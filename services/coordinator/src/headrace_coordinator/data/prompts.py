"""How an item becomes a prompt: templates with {field} places, nothing else of Python's format language."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter

from headrace_schema.problems import Impossible, choose, problem
from headrace_schema.sections.generating import PromptSection

from headrace_coordinator.data.items import DataItem

DOUBLE = "write a brace that is meant as text twice: {{ or }}"


@dataclass(frozen=True)
class PromptContent:
    """A prompt before tokenisation: chat messages ({role, content}) with a prefill, or else plain text."""

    chat: list[dict[str, str]] | None
    text: str | None
    prefill: str = ""


@dataclass(frozen=True)
class Template:
    """Text with places: literals and field names in turn."""

    parts: tuple[tuple[str, str | None], ...]

    @staticmethod
    def parse(text: str, key: str, known: set[str]) -> Template:
        """A template; `Impossible` names `key` when a place is ill-formed or its field is not in `known`."""
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
                raise Impossible(
                    [problem(key, f"items have no field {name!r}", choose(name, known, extra=DOUBLE))]
                )
        return Template(tuple((literal, name) for literal, name, _, _ in parsed))

    def render(self, values: Mapping[str, object]) -> str:
        """The text with every place filled."""
        return "".join(literal + ("" if name is None else str(values[name])) for literal, name in self.parts)


class Prompter:
    """Renders items by a prompt section, whose templates are checked when it is made."""

    def __init__(self, section: PromptSection, known: set[str]) -> None:
        self._known = known
        self._chat = section.chat
        self._template = Template.parse(section.template, "data.prompt.template", known)
        self._prefill = Template.parse(section.prefill, "data.prompt.prefill", known)
        self._system = (
            None if section.system is None else Template.parse(section.system, "data.prompt.system", known)
        )

    def check(self, text: str, key: str) -> None:
        """Raises `Impossible` naming `key` when `text` is not a valid template over the known fields."""
        Template.parse(text, key, self._known)

    def render(self, item: DataItem, prefill: str | None = None) -> PromptContent:
        """The prompt of an item; `prefill` is a template that stands in for the section's own."""
        values = {**item.fields, "question": item.question}
        opening = self._prefill if prefill is None else Template.parse(prefill, "prefill", self._known)
        text, begun = self._template.render(values), opening.render(values)
        if not self._chat:
            return PromptContent(chat=None, text=text + begun)
        messages = [{"role": "user", "content": text}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system.render(values)})
        return PromptContent(chat=messages, text=None, prefill=begun)
