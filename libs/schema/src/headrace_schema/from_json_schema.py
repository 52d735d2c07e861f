"""A model made of a JSON Schema, as pydantic writes them: so that options are checked where their class is not.

Knows types, bounds, choices, lists, mappings and nested models. What it does not know it lets pass: whoever has the
class checks again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from headrace_schema.problems import explain_value
from headrace_schema.resources.views import KeyProblemView

PLAIN: dict[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "null": type(None)}
BOUNDS = {
    "minimum": "ge",
    "maximum": "le",
    "exclusiveMinimum": "gt",
    "exclusiveMaximum": "lt",
    "minLength": "min_length",
    "maxLength": "max_length",
    "minItems": "min_length",
    "maxItems": "max_length",
}


def check_options(schema: Mapping[str, Any], given: Mapping[str, Any], key: str) -> list[KeyProblemView]:
    """What is wrong with options under `key`, by the JSON Schema of their model; empty when nothing is."""
    return explain_value(_model(json.dumps(schema, sort_keys=True)), dict(given), key)


@cache
def _model(schema_json: str) -> type[BaseModel]:
    schema = json.loads(schema_json)
    definitions = schema.get("$defs", {})
    if "$ref" in schema:  # a model that holds itself
        schema = definitions.get(schema["$ref"].rpartition("/")[2], {})
    return _object("Options", schema, definitions)


def _object(name: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> type[BaseModel]:
    required = schema.get("required", [])
    fields: dict[str, Any] = {}
    for key, value in schema.get("properties", {}).items():
        if key.startswith("_"):
            continue  # no pydantic model has such a field
        default = ... if key in required else value.get("default")
        annotation = _annotation(key, value, definitions)
        fields[key] = (annotation, Field(default, description=value.get("description"), **_bounds(value)))
    closed = schema.get("additionalProperties") is False
    config = ConfigDict(extra="forbid" if closed else "allow", allow_inf_nan=False, protected_namespaces=())
    return create_model(name, __config__=config, **fields)


def _annotation(name: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        target = schema["$ref"].rpartition("/")[2]
        others = {
            key: value for key, value in definitions.items() if key != target
        }  # a model may hold itself
        return _annotation(target, definitions.get(target, {}), others)
    if "const" in schema:
        return Literal[schema["const"]]
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    if schema.get("anyOf"):
        return reduce(or_, (_bounded(name, option, definitions) for option in schema["anyOf"]))
    kind = schema.get("type")
    if kind == "array":
        return list[_bounded(name, schema.get("items", {}), definitions)]  # type: ignore[misc]
    if kind == "object":
        return _object(name, schema, definitions) if "properties" in schema else dict[str, Any]
    return PLAIN.get(str(kind), Any)


def _bounded(name: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    annotation = _annotation(name, schema, definitions)
    return Annotated[annotation, Field(**_bounds(schema))] if _bounds(schema) else annotation


def _bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {word: schema[key] for key, word in BOUNDS.items() if key in schema and "anyOf" not in schema}
