"""Compares the size of the code with ceilings that only fall: `python -m ci.ceilings [--walks] [--lower]`.

Fails where a figure is above its ceiling in `ci/ceilings.json`, and names a ceiling that can be lowered; `--lower`
lowers it. `--raise KEY…` writes the present figure of KEY as its ceiling, for a commit that says why. With `--walks` it
measures on a fleet how far it is to read (`ci/walks.py`), which takes minutes. Ceilings have three digits, rounded up.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import grimp

from ci.plan import PACKAGES, UNITS

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "ci" / "ceilings.json"
FELL = 0.98
"""The share of its ceiling below which a figure says that the ceiling can be lowered."""
GENERATED = ("_pb2.py", "_pb2_grpc.py")
WRITTEN_PAGES = {"docs/grpc-api.md", "docs/http-api.md", "docs/run-spec.md"}
"""Pages that a script writes: their words are not ours."""
MODES = "reasoning|embodied|agentic|text|episodes|collocated|disaggregated|hybrid|offloaded|resident"
MODE = re.compile(rf"""["']({MODES})["']""")
WORKFLOWS = {"reasoning", "embodied", "agentic", "texts", "episode", "episodes"}
"""Kinds of runs by their names in the spec and in the code."""
OUTSIDE_CORE = ("plugins/", "tools/")


def figures() -> dict[str, float]:
    """What is counted in the files that git knows, by the name of the ceiling."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in _names("*.py", "*.md")}
    tests = {name: text for name, text in texts.items() if _is_test(name)}
    code = {name: text for name, text in texts.items() if name not in tests and not name.endswith(GENERATED)}
    found: dict[str, float] = {}
    dists = {
        folder: {n: t for n, t in code.items() if n.startswith(f"{folder}/") and n.endswith(".py")}
        for folder in sorted(set(UNITS.values()))
    }
    core = {n: t for each in dists.values() for n, t in each.items() if not n.startswith(OUTSIDE_CORE)}
    found |= {f"lines of {folder}": _lines(files) for folder, files in dists.items() if files}
    found["lines of the core"] = _lines(core)
    found["longest file"] = max(text.count("\n") for files in dists.values() for text in files.values())
    found["mode lines"] = sum(
        bool(MODE.search(line))
        for name, text in core.items()
        if not name.startswith("libs/schema/")
        for line in text.splitlines()
    )
    found["conditions on workflows"] = sum(_conditions(ast.parse(text)) for text in core.values())
    found |= _imports()
    found["lines of tests"] = _lines({n: t for n, t in tests.items() if n.endswith(".py")})
    found["monkeypatch.setattr in tests"] = sum(text.count("monkeypatch.setattr(") for text in tests.values())
    found["words of docs"] = sum(
        len(text.split())
        for name, text in texts.items()
        if name.endswith(".md") and name not in WRITTEN_PAGES
    )
    return found


def _names(*patterns: str) -> list[str]:
    """Files of the working tree that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted({name for name in listing.stdout.splitlines() if (ROOT / name).is_file()})


def _is_test(name: str) -> bool:
    return "/tests/" in name or name.startswith("integration_tests/")


def _lines(files: Mapping[str, str]) -> int:
    return sum(text.count("\n") for text in files.values())


def _imports() -> dict[str, float]:
    """The share of modules that exactly one other imports; imports without which no folder would have a circle."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    modules = {
        name for name in graph.modules if not name.endswith("__main__") and not graph.find_children(name)
    }
    alone = sum(len(graph.find_modules_that_directly_import(name)) == 1 for name in modules)
    circles = sum(
        len(graph.nominate_cycle_breakers(name)) for name in graph.modules if graph.find_children(name)
    )
    return {"modules with one importer, %": round(100 * alone / len(modules), 1), "upward imports": circles}


def _conditions(tree: ast.AST) -> int:
    """Lines with a condition that names a workflow."""
    return len({line for test in _tested(tree) for part in ast.walk(test) for line in _workflow_at(part)})


def _tested(tree: ast.AST) -> Iterator[ast.AST]:
    """The expressions and patterns that decide what is done."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.match_case):
            yield from filter(None, (node.pattern, node.guard))
        elif isinstance(node, ast.Compare | ast.BoolOp):
            yield node


def _workflow_at(node: ast.AST) -> Iterator[int]:
    """The line of a string or a name that names a workflow."""
    match node:
        case ast.Constant(value=str(text), lineno=line) if text in WORKFLOWS:
            yield line
        case ast.Name(id=text, lineno=line) | ast.Attribute(attr=text, lineno=line):
            if WORKFLOWS.intersection(text.lower().split("_")):
                yield line


def walks() -> dict[str, float]:
    """How far it is to read from a request to its effect."""
    from ci.walks import RUNS, measure  # starts a fleet

    found = measure(ROOT, RUNS, names=False)
    sizes = {
        (walk, size): found[walk][size]
        for walk in ("submission", "answer")
        for size in ("functions", "files")
    }
    return {f"walk {walk}, {size}": count for (walk, size), count in sizes.items()} | {
        "walk learn, frames": found["learn"]["frames"]
    }


def rounded_up(figure: float) -> float:
    """The least number of three digits that is not below the figure."""
    unit = 10.0 ** (math.floor(math.log10(figure)) - 2) if figure else 1.0
    unit = max(unit, 0.1 if figure % 1 else 1.0)
    ceiling = math.ceil(round(figure / unit, 6)) * unit
    return round(ceiling, 1) if ceiling % 1 else int(ceiling)


def compare(found: Mapping[str, float], ceilings: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Sentences for figures without a ceiling or above it, and those for ceilings that can be lowered."""
    bad = [
        f"{key}: {figure} has no ceiling; write it: --raise '{key}'"
        for key, figure in found.items()
        if key not in ceilings
    ]
    lower = []
    for key, ceiling in ceilings.items():
        figure = found.get(key, 0)
        if key not in found:
            lower.append(f"{key}: is not counted any more")
        elif figure > ceiling:
            bad.append(
                f"{key}: {figure}, above its ceiling of {ceiling}. Remove as much elsewhere, or raise it: "
                f"`python -m ci.ceilings --raise '{key}'`, in a commit of its own that says why"
            )
        elif rounded_up(figure) < ceiling * FELL:
            lower.append(f"{key}: {figure}, well below its ceiling of {ceiling}")
    return bad, lower


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where a figure is above its ceiling."""
    parser = argparse.ArgumentParser(prog="python -m ci.ceilings", description=__doc__)
    parser.add_argument("--walks", action="store_true", help="measure what a fleet calls, too")
    parser.add_argument("--lower", action="store_true", help="write ceilings that fell")
    parser.add_argument(
        "--raise", nargs="+", default=[], metavar="KEY", dest="raised", help="write these anew"
    )
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    found = figures() | (walks() if options.walks else {})
    stored: dict[str, float] = json.loads(options.file.read_text(encoding="utf-8"))
    counted = {key: value for key, value in stored.items() if options.walks or not key.startswith("walk ")}
    if unknown := set(options.raised) - found.keys():
        parser.error(f"no figure {', '.join(sorted(unknown))}; there are: {', '.join(found)}")
    if options.lower or options.raised:
        kept = {key: value for key, value in counted.items() if key in found}
        fresh = (
            {key: min(value, rounded_up(found[key])) for key, value in kept.items()}
            if options.lower
            else counted
        )
        fresh = {**fresh, **{key: rounded_up(found[key]) for key in options.raised}}
        stored = {**{key: value for key, value in stored.items() if key not in counted}, **fresh}
        options.file.write_text(json.dumps(dict(sorted(stored.items())), indent=2) + "\n", encoding="utf-8")
        counted = fresh
    bad, lower = compare(found, counted)
    for sentence in (*bad, *lower):
        print(sentence)
    if lower:
        print("`python -m ci.ceilings --lower` writes the lower ceilings")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
