"""Writes docs/http-api.md from the OpenAPI description, docs/grpc-api.md from the proto files, and the table of access
in docs/security.md.

`python -m ci.reference_docs [--check] FOLDER`. With --check it writes nothing and fails when a page is not current.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace_coordinator.access.table import TABLE

ROOT = Path(__file__).resolve().parents[1]
OPENAPI = ROOT / "services" / "coordinator" / "openapi.json"
PROTOS = ROOT / "proto" / "src"
WRITTEN = "<!-- Written by `make reference-docs`; change {source}. -->\n"
HTTP_HEAD = """# HTTP API

{written}
The coordinator's API, at the address that `headrace up` prints. Every request but `/healthz` bears the token:

```sh
curl -H "Authorization: Bearer $(cat .headrace/http-token)" http://127.0.0.1:8470/v1/runs
```

A refusal is an `ErrorView`: a `reason`, a `message`, and `problems`, each with a key, what is wrong and the fix. Lists
are pages (`page_size`, `page_token`). Writes take an `Idempotency-Key`: the same key and body give the same answer. GET
answers HEAD too; a 405 names the methods of the path in `Allow`. `GET /openapi.json` is the whole
description; `/docs` shows it in the browser and sends requests.
"""
GRPC_HEAD = """# gRPC API

{written}
What the services speak to each other, for authors of a service of their own; and `SessionService`, which
[loops of users' own](own-loop.md#over-grpc) speak.
"""
RPC = re.compile(r"rpc (\w+)\((stream )?([\w.]+)\) returns \((stream )?([\w.]+)\)")
FIELD = re.compile(r"^(optional |repeated )?(map<[^>]+>|[\w.]+) (\w+) = (\d+)")


def http_page() -> str:
    """The HTTP API: an entry a route, then the fields of every schema that answers and bodies use."""
    description = json.loads(OPENAPI.read_text(encoding="utf-8"))
    blocks = [HTTP_HEAD.format(written=WRITTEN.format(source="the routes and `libs/schema`"))]
    by_tag: dict[str, list[str]] = {}
    for path, methods in description["paths"].items():
        for method, route in methods.items():
            tag = route.get("tags", ["other"])[0]
            by_tag.setdefault(tag, []).append(_route(method.upper(), path, route))
    for tag, routes in by_tag.items():
        blocks += [f"## {tag.capitalize()}\n", *routes]
    blocks.append("## Schemas\n\nThe run spec has [a page of its own](run-spec.md).\n")
    for name, schema in description["components"]["schemas"].items():
        if not name.endswith("Section") and name != "RunSpec" and "properties" in schema:
            blocks += [f"### {name}\n", _text(schema.get("description", "")) + "\n", _fields(schema)]
    return "\n".join(blocks).rstrip() + "\n"


SECURITY = ROOT / "docs" / "security.md"
TABLE_HEAD = "<!-- From here on written by `make reference-docs`; change `access/table.py`. -->\n"


def security_page() -> str:
    """The page of who may do what: its own text, and the table of access, a row a route."""
    text = SECURITY.read_text(encoding="utf-8").partition(TABLE_HEAD)[0]
    description = json.loads(OPENAPI.read_text(encoding="utf-8"))
    rows = ["| route | scope | for | audited |", "| --- | --- | --- | --- |"]
    for path, methods in description["paths"].items():
        for method, route in methods.items():
            row = TABLE[route["operationId"]]
            scope = f"`{row.scope}`" if row.scope else "none: no token"
            audited = "yes" if row.audited else "refusals"
            rows.append(f"| {method.upper()} `{path}` | {scope} | {row.rule.value} | {audited} |")
    return text + TABLE_HEAD + "\n" + "\n".join(rows) + "\n"


def _route(method: str, path: str, route: dict[str, Any]) -> str:
    lines = [f"### {method} {path}\n", _text(route.get("description", "")) + "\n"]
    rows = [
        f"| `{item['name']}` | {item['in']} | {_kind(item['schema'])} | {_text(item.get('description', ''))} |"
        for item in route.get("parameters", [])
    ]
    if rows:
        lines += ["| parameter | in | type | meaning |\n| --- | --- | --- | --- |", *rows, ""]
    bodies = route.get("requestBody", {}).get("content", {})
    if bodies:
        first = next(iter(bodies.values()))
        lines.append(f"Body: {_kind(first['schema'])} as {' or '.join(f'`{name}`' for name in bodies)}.\n")
    answers = [f"{status} {_answer(answer)}" for status, answer in route["responses"].items() if status < "4"]
    return "\n".join([*lines, f"Answers: {'; '.join(answers)}.\n"])


def _answer(answer: dict[str, Any]) -> str:
    kinds = [_kind(body["schema"]) for body in answer.get("content", {}).values() if "schema" in body]
    return next((kind for kind in kinds if kind != "any"), _text(answer.get("description", "")).rstrip("."))


def _fields(schema: dict[str, Any]) -> str:
    rows = ["| field | type | meaning |", "| --- | --- | --- |"]
    for name, value in schema["properties"].items():
        rows.append(f"| `{name}` | {_kind(value)} | {_text(value.get('description', ''))} |")
    return "\n".join(rows) + "\n"


def _kind(schema: dict[str, Any]) -> str:
    """A type in words."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(option) for option in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("{}", "`{}`")


def grpc_page() -> str:
    """The gRPC API: services with their calls, messages with their fields, as the proto files comment them."""
    blocks = [GRPC_HEAD.format(written=WRITTEN.format(source="the proto files"))]
    for file in sorted(PROTOS.rglob("*.proto")):
        blocks += [f"## {file.relative_to(PROTOS).as_posix()}\n", *_proto(file.read_text(encoding="utf-8"))]
    return "\n".join(blocks).rstrip() + "\n"


def _proto(text: str) -> Iterator[str]:
    comment: list[str] = []
    rows: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            comment.append(line.removeprefix("//").strip())
            continue
        found = _row(line, _text(" ".join(comment)))
        if opened := re.match(r"(service|message|enum) (\w+) \{", line):
            yield from _table(rows)
            rows = []
            yield f"### {opened[1]} {opened[2]}\n\n{_text(' '.join(comment))}\n"
        elif found:
            rows.append(found)
        comment = []
    yield from _table(rows)


def _row(line: str, comment: str) -> str:
    if rpc := RPC.match(line):
        asked, answered = f"{rpc[2] or ''}{rpc[3]}", f"{rpc[4] or ''}{rpc[5]}"
        return f"| `{rpc[1]}` | {asked} → {answered} | {comment} |"
    if field := FIELD.match(line):
        return f"| `{field[3]}` | {_text((field[1] or '') + field[2])} | {comment} |"
    if value := re.match(r"([A-Z][A-Z0-9_]+) = (\d+);", line):
        return f"| `{value[1]}` | {value[2]} | {comment} |"
    return ""


def _table(rows: list[str]) -> Iterator[str]:
    if rows:
        yield "\n".join(["| name | type | meaning |", "| --- | --- | --- |", *rows]) + "\n"


def main(arguments: list[str]) -> int:
    """Writes or checks the pages; exit status 1 when one is not current."""
    check, folder = "--check" in arguments, Path(arguments[-1])
    stale = 0
    pages = {"http-api.md": http_page, "grpc-api.md": grpc_page, "security.md": security_page}
    for name, made in pages.items():
        fresh = made()
        file = folder / name
        if not check:
            file.write_text(fresh, encoding="utf-8")
            continue
        present = file.read_text(encoding="utf-8") if file.exists() else ""
        changes = difflib.unified_diff(
            present.splitlines(True), fresh.splitlines(True), str(file), "fresh", n=0
        )
        sys.stdout.writelines(changes)
        stale += present != fresh
    if stale:
        print("the reference pages are not what the code says; run: make reference-docs")
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
