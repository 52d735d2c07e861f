"""What the pages name is there: modules, files, commands' tests, metrics."""

from __future__ import annotations

import contextlib
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from harness.processes import ROOT

PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("services/*/README.md"),
    *ROOT.glob("libs/*/README.md"),
    *ROOT.glob("plugins/*/README.md"),
]
MODULE = re.compile(r"\bheadrace_[a-z]+(?:\.[a-z_][a-zA-Z_]*)+")
SOURCES = [*ROOT.glob("*/*/src"), *ROOT.glob("cli/src"), ROOT / "tools/simulation", ROOT / "tools/fake_world"]
COMMAND = re.compile(r"^[#\s]*(?:\$ )?(?:\.venv/bin/)?(headrace [a-z].*)")
IN_BACKTICKS = re.compile(r"`([^`\s]+)`")
FOLDERS = (
    "benchmarks",
    "ci",
    "cli",
    "deploy",
    "docs",
    "examples",
    "integration_tests",
    "libs",
    "plugins",
    "services",
    "tools",
)
METRIC = re.compile(r"\bheadrace_[a-z_]+\b")
SUFFIXES = ("_total", "_created", "_bucket", "_count", "_sum")
GENERATED = {"http-api.md", "grpc-api.md", "run-spec.md"}


def lines():
    """Each line of each page that people write, with its place."""
    for page in PAGES:
        if page.name not in GENERATED and page.name != "CHANGELOG.md":
            for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
                yield f"{page.relative_to(ROOT)}:{number}", line


def defined(module: str) -> bool:
    """Whether a dotted name is a module, or a name that its module has."""
    path, rest = Path(), module.split(".")
    while rest:
        found = [source / path / rest[0] for source in SOURCES]
        if any(each.is_dir() or each.with_suffix(".py").is_file() for each in found):
            path /= rest.pop(0)
            continue
        break
    if not path.parts:
        return False
    texts = [
        file.read_text(encoding="utf-8")
        for source in SOURCES
        for file in ((source / path).with_suffix(".py"), source / path / "__init__.py")
        if file.is_file()
    ]
    return not rest or any(re.search(rf"\b{rest[0]}\b", text) for text in texts)


def test_modules_that_pages_name_are_there():
    wrong = [
        f"{place}: {name}"
        for place, line in lines()
        for name in MODULE.findall(line)
        if not name.endswith((".py", ".egg")) and not defined(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_files_that_pages_name_are_there():
    wrong = []
    for place, line in lines():
        for name in IN_BACKTICKS.findall(line):
            name = name.partition(":")[0].partition("#")[0].rstrip("/")
            if (
                name.split("/")[0] in FOLDERS
                and "source-en" not in name
                and "/" in name
                and not re.search(r"[A-Z]{3,}|…|\{|<", name)
            ):
                wrong += [f"{place}: {name}"] if not [*ROOT.glob(name)] else []
    assert not wrong, "\n".join(wrong)


def test_links_of_the_site_s_pages_lead_to_its_pages():
    """`make docs` is strict: a file beside the site is named in backticks."""
    wrong = []
    for page in sorted(ROOT.glob("docs/**/*.md")):
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            if not target.is_file() or not target.is_relative_to(ROOT / "docs"):
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert not wrong, "\n".join(wrong)


def test_modules_that_pages_name_by_their_path_are_there():
    """`learning/step.py` of a service's page, `coordinator/run/` of any page."""
    packages = {path.name: path for source in SOURCES for path in source.glob("headrace*") if path.is_dir()}
    wrong = []
    for place, line in lines():
        own = re.match(r"(?:services|libs)/(\w+)/README", place)
        for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*/[a-z_]+(?:/|\.py))`", line):
            service, _, rest = name.partition("/")
            roots = [packages[f"headrace_{own[1]}"] / name] if own else []
            roots += [packages[f"headrace_{service}"] / rest] if f"headrace_{service}" in packages else []
            roots += [ROOT / name]
            if (own or f"headrace_{service}" in packages) and not any(each.exists() for each in roots):
                wrong.append(f"{place}: {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", ["docs/architecture/bugs.md"])
def test_tests_that_commands_run_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    wrong = []
    for command in re.findall(r"`(pytest [^`]+)`", text):
        files, _, words = command.removeprefix("pytest ").partition(" -k ")
        for file in files.split():
            if not (ROOT / file).is_file():
                wrong.append(f"{file} is not there: {command}")
            elif words and len(files.split()) == 1:
                wanted = re.findall(
                    r"\w+", words.replace(" or ", " ").replace(" and ", " ").replace("not ", "")
                )
                if not any(word.lower() in (ROOT / file).read_text().lower() for word in wanted):
                    wrong.append(f"nothing is chosen: {command}")
    assert not wrong, "\n".join(wrong)


def commands():
    """Each `headrace …` command line of the pages and of the examples' comments, as words, with its place."""
    examples = [*ROOT.glob("examples/**/*.yaml"), *ROOT.glob("examples/**/*.md")]
    for page in [*PAGES, *examples]:
        if page.name in GENERATED or page.name == "CHANGELOG.md":
            continue
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            found = [text for text in re.findall(r"`([^`]+)`", line) if text.startswith("headrace ")]
            found += [match[1] for match in [COMMAND.match(line)] if match and "`" not in line]
            for text in found:
                text = re.split(r"\s(?:#|&&|\||;)\s|\s{2,}|;$", text)[0].rstrip("\\")
                with contextlib.suppress(ValueError):  # A quotation that goes on in the next line.
                    yield f"{page.relative_to(ROOT)}:{number}", shlex.split(text)[1:]


@pytest.mark.parametrize("line", ["You see: ", "Takes: "])
def test_each_example_says_what_one_sees_and_how_long_it_takes(line):
    examples = [*ROOT.glob("examples/**/*.yaml"), *ROOT.glob("examples/**/*.ipynb")]
    assert len(examples) > 100
    form = re.compile(rf'^(# |\s*"){line}\S.{{3,}}', re.MULTILINE)
    silent = [str(each.relative_to(ROOT)) for each in examples if not form.search(each.read_text("utf-8"))]
    assert not silent, f"say '{line}…' in the head of {', '.join(silent)}"


@cache
def whole_command() -> Any:
    """`headrace` with all that is below it."""
    from headrace_cli.main import app

    return typer.main.get_command(app)


def problem_of(words: list[str]) -> str:
    """What is wrong with the words after `headrace`: a command or an option that is not there."""
    command = whole_command()
    while hasattr(command, "commands") and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        if words[0] not in command.commands:
            return f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    if hasattr(command, "commands") and words and words[0] != "--help":
        command = command.commands["submit"]  # `headrace eval FILE`
    known = {"--help"} | {
        option for parameter in command.params for option in parameter.opts + parameter.secondary_opts
    }
    unknown = [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
    missing = [word for word in words if word.startswith("examples/") and not (ROOT / word).is_file()]
    return ", ".join(unknown + missing)


def test_commands_of_pages_are_commands():
    found = list(commands())
    assert len(found) > 100
    wrong = [f"{place}: {' '.join(words)}: {why}" for place, words in found if (why := problem_of(words))]
    assert not wrong, "\n".join(wrong)


def test_the_page_of_metrics_has_each_name():
    modules = [
        file.read_text(encoding="utf-8")
        for source in SOURCES
        for file in source.rglob("*.py")
        if "prometheus_client" in file.read_text(encoding="utf-8")
    ]
    named = {name for text in modules for name in re.findall(r'"(headrace_[a-z_]+)"', text)}
    page = {
        name.removesuffix(next((end for end in SUFFIXES if name.endswith(end)), ""))
        for name in METRIC.findall((ROOT / "docs/metrics.md").read_text(encoding="utf-8"))
    }
    assert named and named == page


def test_commands_that_messages_name_are_there():
    """In texts of the product's modules, and in the dashboard's scripts: an error must not send anybody to nowhere."""
    wrong = []
    for source in SOURCES:
        for file in [*source.rglob("*.py"), *source.rglob("dashboard/**/*.js")]:
            text = file.read_text(encoding="utf-8")
            for match in re.finditer(r"(?<![\w./-])headrace ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", text):
                if "import" in match[0]:
                    continue
                if problem := problem_of([word for word in match.groups() if word]):
                    place = f"{file.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
                    wrong.append(f"{place}: {match[0]}: {problem}")
    assert not wrong, "\n".join(wrong)
