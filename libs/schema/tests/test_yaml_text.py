"""YAML as users write it, by mistake and on purpose: data, or one sentence with the line."""

from pathlib import Path

import pytest
import yaml
from headrace_schema.yaml_text import MAX_BYTES, YamlProblem, read_yaml

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples").glob("*.yaml"))
BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_the_examples_read_as_any_yaml_reader_reads_them(file):
    assert read_yaml(file.read_text()) == yaml.safe_load(file.read_text())


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("name: 2026-01-01", {"name": "2026-01-01"}),
        ("lr: 2e-5", {"lr": 2e-5}),
        ("lr: -2E5", {"lr": -2e5}),
        ("a: &a {x: 1}\nb: {<<: *a, y: 2}", {"a": {"x": 1}, "b": {"x": 1, "y": 2}}),
        ("a: &a {x: 1}\nb: {<<: *a, x: 2}", {"a": {"x": 1}, "b": {"x": 2}}),
        ("", None),
        ("a: [0, 0.10, 1_000, 0x10, '010', '1:30']", {"a": [0, 0.1, 1000, 16, "010", "1:30"]}),
        ("a: [yes, ~, '1', 1]", {"a": [True, None, "1", 1]}),
    ],
)
def test_data(text, data):
    assert read_yaml(text) == data


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nlr: .nan", 2, "finite"),
        ("a: 1\nlr: -.inf", 2, "finite"),
        ("lr: 1e999", 1, "finite"),
        ("steps: " + "9" * 5000, 1, "has 5,000 digits"),
        ("seed: 010", 1, "010 would be read as octal"),
        ("seed: -0_7", 1, "read as octal"),
        ("a: 1\nat: 1:30", 2, "1:30 would be a number to the base 60"),
        ("at: 1:30.5", 1, "to the base 60"),
        ("a: !!int x", 1, "is not a number"),
        ("a: !!bool x", 1, "truth value"),
        ("a: 1\nb: &b\n  c: *b", 3, "inside of what it names"),
        ("&a [*a]", 1, "inside of what it names"),
        (BOMB, 5, "more than 20,000 values"),
        ("[" * 100_000, 1, "deeper than 64"),
        ("\n".join(" " * depth + "a:" for depth in range(100)), 64, "deeper than 64"),
        ("a: 1\nb: 2\na: 3", 3, "the key a is there already, in line 1"),
        ("x: {b: 1, b: 2}", 1, "the key b is there already"),
        ("on: 1", 1, "not a text"),
        ("2026-01-01: 1\n1: 2", 2, "not a text"),
        ("[a]: 1", 1, "not a text"),
        ("a: !!python/object/apply:os.system [ls]", 1, "tag"),
        ("a: !!binary aGk=", 1, "tag"),
        ("a: !!map x", 1, "expected a mapping"),
        ("a: 1\n---\nb: 2", 2, "single document"),
        ("a: [1\nb: 2", 2, "expected"),
        ("a: *b", 1, "undefined alias"),
        ("a: 1\nb: \x01", 2, "not allowed"),
        ('a: "\\ud800"', 1, "half a character"),
        ("a: " + "x" * MAX_BYTES, 0, "larger than 256 KiB"),
    ],
)
def test_what_is_refused_says_where(text, line, words):
    with pytest.raises(YamlProblem, match=words) as refused:
        read_yaml(text)
    assert refused.value.line == line and refused.value.fix
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200
