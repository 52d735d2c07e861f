"""YAML as users write it, by mistake and on purpose: data, or one sentence with the line."""

from pathlib import Path

import pytest
import yaml
from headrace_schema.yaml_text import MAX_BYTES, YamlProblem, read_yaml, write_yaml

EXAMPLES = [
    file
    for file in sorted((Path(__file__).resolve().parents[3] / "examples").glob("*.yaml"))
    if "\n---\n" not in file.read_text()  # of several runs
]
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
        ("lr: -2E5", {"lr": -2e5}),
        ("a: &a {x: 1}\nb: {<<: *a, y: 2}", {"a": {"x": 1}, "b": {"x": 1, "y": 2}}),
        ("a: &a {x: 1}\nb: {<<: *a, x: 2}", {"a": {"x": 1}, "b": {"x": 2}}),
        ("", None),
        ("a: [0, 0.10, 0x10, 0o10, '010', '1:30']", {"a": [0, 0.1, 16, 8, "010", "1:30"]}),
        ("a: [~, null, NULL, nUll, '1', 1, +1, -0]", {"a": [None, None, None, "nUll", "1", 1, 1, 0]}),
        ("a:\nb: x", {"a": None, "b": "x"}),
    ],
)
def test_data(text, data):
    assert read_yaml(text) == data


@pytest.mark.parametrize(
    "word", ["NO", "no", "on", "On", "off", "yes", "Yes", "y", "n", "tRue", "=", "<<", "0b1", "1_000"]
)
def test_words_of_yaml_1_1_are_texts(word):
    """(S3 B17)"""
    assert read_yaml(f"{word if word != '<<' else 'a'}: {word}\nb: [{word}]") == {
        word if word != "<<" else "a": word,
        "b": [word],
    }


@pytest.mark.parametrize(
    "text", ["2026-01-01", "2026-01-01T00:00:00Z", "12:30:45", "1:30", "1:30.5", "1.2.3", "1e", "e5"]
)
def test_dates_times_and_versions_are_texts(text):
    """(S3 B17)"""
    assert read_yaml(f"at: {text}") == {"at": text}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("1e+5", 1e5),
        ("-.5e3", -500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("010", 10),
        ("08", 8),
    ],
)
def test_numbers_of_the_core_schema(text, number):
    """(S3 B17)"""
    value = read_yaml(f"a: {text}")["a"]
    assert (value, type(value)) == (number, type(number))


@pytest.mark.parametrize("character", ["\x85", "\u2028", "\u2029"])
def test_line_ends_of_yaml_1_1_stay_in_texts(character):
    """(S3 B17)"""
    text = f"a: x{character}y\nb: 'x{character} y'\nc: |\n  x{character}y\n  z\nd: \"x{character}\"\n"
    kept = f"x{character}y"
    assert read_yaml(text) == {"a": kept, "b": f"x{character} y", "c": f"{kept}\nz\n", "d": f"x{character}"}
    with pytest.raises(YamlProblem) as refused:
        read_yaml(f"a: x{character}y\nb: 1\nb: 2")
    assert refused.value.line == 3


@pytest.mark.parametrize("character", [*"\u00a0\u200b\u200d\u2060\u00ad\ufeff\u3000\u202f\u3164\u2028\x85"])
def test_a_key_with_what_nobody_sees_is_refused_with_its_place(character):
    """(S3 B17)"""
    for form in ("a:\n  {}", "a: 1\n# é\n{}", "a: {{b: {}}}", "{}"):
        for key in (f"lr{character}: 1", f"l{character}r: 1", f"'lr{character}': 1"):
            text = form.format(key)
            with pytest.raises(YamlProblem) as refused:
                read_yaml(text)
            problem, lines = refused.value, text.split("\n")
            assert lines[problem.line - 1][problem.column - 1] == character, (text, str(problem))
            assert repr(character)[1:-1] in str(problem)
    assert read_yaml('"lr\\u00a0": 1') == {"lr\u00a0": 1}  # an escape can be seen


def test_what_nobody_sees_between_key_and_value_is_named():
    """(S3 B17)"""
    for text in ("a: 1\nb:\u00a02\nc: 3", "a: 1\nb\u200b\nc: 3"):
        with pytest.raises(YamlProblem, match=r"'\\(xa0|u200b)', which cannot be seen") as refused:
            read_yaml(text)
        assert (refused.value.line, refused.value.column) in [(2, 3), (2, 2)]


def test_a_mark_of_order_is_no_part_of_the_first_key():
    """(S3 B17)"""
    assert read_yaml("\ufeffname: x") == {"name": "x"}


def test_what_is_written_is_read_alike_by_both_versions():
    """(S3 B17)"""
    texts = [
        "1e-5",
        "010",
        "0o7",
        "0x1",
        "yes",
        "NO",
        "null",
        "~",
        "",
        "12:30",
        "2026-01-01",
        "1_0",
        "<<",
        "=",
        ".5",
        "-.5e3",
    ]
    data = {
        "texts": [*texts, "x\u2028\x85", "é", "\ufeff"],
        "numbers": [1e-5, 1e300, 10, 0.1],
        "yes": [True, None],
    }
    assert read_yaml(write_yaml(data)) == data == yaml.safe_load(write_yaml(data))


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nlr: .nan", 2, "finite"),
        ("a: 1\nlr: -.inf", 2, "finite"),
        ("lr: 1e999", 1, "finite"),
        ("steps: " + "9" * 5000, 1, "has 5,000 digits"),
        ("steps: 0x" + "9" * 5000, 1, "digits"),
        ("k" * 99 + "\u00a0: 1", 1, "cannot be seen"),
        ("a: !!int x", 1, "is not a number"),
        ("a: !!bool x", 1, "truth value"),
        ("a: 1\nb: &b\n  c: *b", 3, "inside of what it names"),
        ("&a [*a]", 1, "inside of what it names"),
        (BOMB, 5, "more than 20,000 values"),
        ("[" * 100_000, 1, "deeper than 64"),
        ("\n".join(" " * depth + "a:" for depth in range(100)), 64, "deeper than 64"),
        ("a: 1\nb: 2\na: 3", 3, "the key a is there already, in line 1"),
        ("x: {b: 1, b: 2}", 1, "the key b is there already"),
        ("true: 1", 1, "not a text"),
        ("2026-01-01: 1\n1: 2", 2, "not a text"),
        ("a:\t1", 1, "'.t' that cannot start any token"),
        ("a:\n\tb: 1", 2, "'.t' that cannot start any token"),
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
    assert bool(refused.value.column) == bool(line)
    assert "\t" not in text or "spaces in place of the tab" in refused.value.fix
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200
