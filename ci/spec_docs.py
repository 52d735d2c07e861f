"""Writes docs/run-spec.md from the run spec's schema: every key, and what does not go together.

`python -m ci.spec_docs [--check] FILE`. With --check it writes nothing and fails when the file is not current.
"""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import Any

from headrace_schema.rules.table import table_rows
from headrace_schema.spec import RunSpec

HEAD = """# Run spec

<!-- Written by `make spec-docs` from `libs/schema`; change the text there. -->

A run is one YAML (or JSON) document. These are its keys, in the order of the schema. A key without a default must be
given; an unknown key is refused with the nearest valid one. `headrace run submit FILE --dry-run` checks a document
against your fleet without starting anything, `--set a.b=c` overrides a key, and `headrace spec-schema` prints the JSON
Schema that this page is made from. The files in `examples/` are complete documents.

Integers are at most 2147483647 unless said otherwise. Numbers that do not fit (a batch that the ranks cannot share
evenly, too few devices, …) are refused with the key and the nearest value, and so is
[what does not go together](#what-does-not-go-together).

## Secrets

A spec holds no secret: API, page, recordings and trackers show it as it is. In `options`, at any depth and under any
key, a text of one of these forms is a reference, which only the process that uses the secret replaces:

| write | what is used |
| --- | --- |
| `env:NAME` | a variable of the service that uses it, named nowhere else; none with `HEADRACE_` before it |
| `file:PATH` | a text file of that service's host, of at most 64 KiB; none of the data directory |
| `Bearer env:NAME` | the same behind `Bearer`, `Basic` or `Token`, as headers have it |

That service is a reward service for `reward`, a simulator for `environment` and `agent`, the coordinator for `data` and
`tracking`, a rollout or a trainer for their options. Paths are relative to the spec, as all are.

```yaml
reward:
  scorers:
    - {name: judge, options: {base_url: "https://judge.example/v1", model: m, api_key: env:JUDGE_KEY}}
environment:
  options: {mcp: [{command: [town-server], env: {TOWN_TOKEN: file:town.token}}]}
```

A secret that is written out is refused with its key: under keys such as `api_key`, `*_token`, `password`,
`client_secret` or `authorization` (not `max_tokens`, `tokenizer`, `eos_token`, `password_file`), in an address
(`https://user:password@host`, `?access_token=…`), and among the arguments of a command, which all users of a machine
see: references are refused there too, so let the program read a variable. `EMPTY` and `none` are no secrets.

A variable or file that is not there is told with its key as a run is submitted or opened. Where an error, a verdict's
detail or a tool's answer repeats a secret of six or more characters, the reference stands there instead.
"""
TOGETHER = """## What does not go together

The key of the first column is refused in a spec that asks for the second one, too, with this reason and this way out.
What an engine or an algorithm cannot do is what its plug-in registers ([Extending](extending.md)).

| key | with | because | so |
| --- | --- | --- | --- |"""
BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minItems": "at least {} items",
}
USUAL_LIMITS = {2**31 - 1, 2**63}


def page() -> str:
    """The whole page."""
    schema = RunSpec.model_json_schema()
    definitions = schema["$defs"]
    blocks = [HEAD, "## The document itself\n", table("", schema, definitions)]
    for path, section in sections("", schema, definitions):
        blocks += [
            f"## `{path}`\n",
            f"{section.get('description', '').strip()}\n",
            table(path, section, definitions),
        ]
    blocks += [TOGETHER, *(f"| {' | '.join(map(_cell, row))} |" for row in table_rows())]
    return "\n".join(blocks).rstrip() + "\n"


def sections(
    path: str, schema: dict[str, Any], definitions: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """All sections below a schema with their dotted paths; `[]` marks an element of a list. Each type once."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}

    def walk(path: str, schema: dict[str, Any]) -> None:
        for key, value in schema["properties"].items():
            below = f"{path}.{key}".strip(".")
            for option in (value, *value.get("oneOf", [])):
                target, mark = reference(option), ""
                if "items" in option:
                    target, mark = reference(option["items"]), "[]"
                elif named := option.get("patternProperties"):
                    target, mark = reference(*named.values()), ".NAME"
                if target and target not in found:
                    found[target] = (below + mark, definitions[target])
                    walk(*found[target])

    walk(path, schema)
    return list(found.values())


def reference(value: dict[str, Any]) -> str:
    """Name of the definition that a property, required or optional, refers to, or nothing."""
    options = [value, *value.get("anyOf", [])]
    return next((str(option["$ref"]).rpartition("/")[2] for option in options if "$ref" in option), "")


def table(path: str, section: dict[str, Any], definitions: dict[str, Any]) -> str:
    """One row per key of a section."""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    required = section.get("required", [])
    for key, value in section["properties"].items():
        if reference(value):
            given = "required" if key in required else "none" if "anyOf" in value else ""
            rows.append(f"| `{key}` | section | {given} | {_about(value, definitions)} |")
            continue
        default = "required" if key in required else f"`{json.dumps(_default(value), ensure_ascii=False)}`"
        meaning = _cell(value.get("description", ""))
        rows.append(f"| `{key}` | {_cell(kind(value))} | {default} | {meaning} |")
    return "\n".join(rows) + "\n"


def _default(value: dict[str, Any]) -> Any:
    return value.get("default", {} if value.get("type") == "object" else [])


def _about(value: dict[str, Any], definitions: dict[str, Any]) -> str:
    own = value.get("description") or definitions[reference(value)].get("description", "")
    return _cell(own.split("\n")[0])


def kind(value: dict[str, Any]) -> str:
    """A property's type and bounds in words."""
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "enum" in value:
        return " or ".join(f"`{json.dumps(option)}`" for option in value["enum"])
    if options := value.get("anyOf", value.get("oneOf")):
        return " or ".join(sorted((kind(option) for option in options), key=len))
    if "$ref" in value:
        return "section"
    if value.get("type") == "array":
        return ", ".join([f"list of {_element(value['items'])}", *_bounds(value)])
    return ", ".join([str(value.get("type", "any")), *_bounds(value)])


def _element(items: dict[str, Any]) -> str:
    return "sections" if reference(items) else f"{kind(items)}s"


def _bounds(value: dict[str, Any]) -> list[str]:
    bounds = [
        words.format(value[key]) for key, words in BOUNDS.items() if value.get(key, 2**63) not in USUAL_LIMITS
    ]
    return bounds + ([f"matches `{value['pattern']}`"] if "pattern" in value else [])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Writes or checks the page; exit status 1 when it is not current."""
    check, file = "--check" in arguments, Path(arguments[-1])
    return write_or_check(file, page(), check=check, target="spec-docs")


def write_or_check(file: Path, fresh: str, *, check: bool, target: str) -> int:
    """Writes a page; or shows how the file differs from it, which is exit status 1."""
    if not check:
        file.write_text(fresh, encoding="utf-8")
        return 0
    present = file.read_text(encoding="utf-8") if file.exists() else ""
    sys.stdout.writelines(
        difflib.unified_diff(present.splitlines(True), fresh.splitlines(True), str(file), "source", n=0)
    )
    if present != fresh:
        print(f"{file} is not what its source says; run: make {target}")
    return int(present != fresh)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
