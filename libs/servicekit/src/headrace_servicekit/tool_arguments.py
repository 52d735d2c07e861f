"""Arguments of calls that families write as texts, by the JSON schemas of their tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace_servicekit.tool_calls import Call, read

_DEEPEST = 32
"""Schemas within each other that are looked at."""


def typed(call: Call, parameters: Mapping[str, Any]) -> Call:
    """A call whose arguments are of the kinds that the JSON schema of its tool's parameters names.

    A text that the schema allows stays a text. One that is none of its kind does too: whoever checks the arguments
    says what is wrong.
    """
    if not call.texts:
        return call
    given = {}
    for name, text in call.arguments.items():
        schemas = list(_schemas(parameters, name, parameters))
        given[name] = text if all(_allows(each, text, parameters) for each in schemas) else read(text)
    return Call(call.name, given, call.problem, id=call.id)


def _schemas(schema: Any, name: str, root: Mapping[str, Any], depth: int = 0) -> Iterator[Any]:
    """The schemas of one argument in the schema of all; none where anything is allowed.

    Patterns of names are not tried: they are anybody's, the names are a model's, and some take for ever.
    """
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    if "$ref" in schema:
        yield from _schemas(_referred(schema["$ref"], root), name, root, depth + 1)
    for each in schema.get("allOf", ()):
        yield from _schemas(each, name, root, depth + 1)
    own = [schema["properties"][name]] if name in schema.get("properties", {}) else []
    own = own or [*schema.get("patternProperties", {}).values()]
    yield from own or ([schema["additionalProperties"]] if "additionalProperties" in schema else [])


def _allows(schema: Any, text: str, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether a JSON schema allows a text, as far as its kind and its choices say."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if depth > _DEEPEST:
        return False  # a schema that refers to itself

    def allowed(each: Any) -> bool:
        return _allows(each, text, root, depth + 1)

    meant = "object" if "properties" in schema else "array" if "items" in schema else "string"
    kinds = schema.get("type", meant)
    return (
        "string" in ([kinds] if isinstance(kinds, str) else kinds)
        and text in schema.get("enum", [text])
        and schema.get("const", text) == text
        and ("$ref" not in schema or allowed(_referred(schema["$ref"], root)))
        and all(map(allowed, schema.get("allOf", ())))
        and all(any(map(allowed, schema[key])) for key in ("anyOf", "oneOf") if key in schema)
    )


def _referred(address: str, root: Any) -> Any:
    """What a schema's `$ref` means within its document; anything is allowed where that is not there."""
    for step in address.removeprefix("#").strip("/").split("/"):
        if step:
            root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return {} if root is None else root
