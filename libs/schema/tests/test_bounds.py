"""Every key of a spec that stands for many things has a bound, which holds before the things are made."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from headrace_schema.changing import RunChange, RunLabels
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import LONGEST_NAME, MOST, explain_value, first_of, nearest, problem
from headrace_schema.sections.base import FEW, MANY
from headrace_schema.sections.running import MAX_DEVICES, PlacementSection
from headrace_schema.spec import RunSpec
from headrace_schema.workflow import GraphSection
from headrace_schema.yaml_text import MAX_BYTES, MAX_DEPTH, MAX_DIGITS, MAX_NODES, YamlProblem, read_yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

MODELS = (RunSpec, EvaluationSpec, RunChange, RunLabels)
FREE = ("options", "arguments", "policy", "variants.*")
"""Mappings whose keys are a plug-in's or a model's own: a body's number of values bounds them."""


def found(model: type) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Path, schema and definitions of each key of a model, entries of lists and mappings too."""
    whole = model.model_json_schema()
    definitions = whole.get("$defs", {})

    def within(
        schema: dict[str, Any], path: str, above: frozenset[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        name = schema.get("$ref", "").rpartition("/")[2]
        if name and name not in above:
            yield from within(definitions[name], path, above | {name})
        for form in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from within(form, path, above)
        yield path, schema
        for key, inner in schema.get("properties", {}).items():
            yield from within(inner, f"{path}.{key}".strip("."), above)
        if isinstance(inner := schema.get("additionalProperties"), dict):
            yield from within(inner, f"{path}.*", above)
        if "items" in schema:
            yield from within(schema["items"], f"{path}[]", above)

    for path, schema in within(whole, "", frozenset()):
        yield path, schema, definitions


def kinds(kind: str) -> list[Any]:
    """(path, bound, schema) of the keys of a kind, of all models."""
    many = {"array": "maxItems", "object": "maxProperties"}
    return [
        pytest.param(schema, definitions, many.get(kind, ""), id=f"{model.__name__}.{path}")
        for model in MODELS
        for path, schema, definitions in found(model)
        if schema.get("type") == kind and not (kind == "object" and "properties" in schema)
        if not (kind == "object" and path.endswith(FREE))
    ]


@pytest.mark.parametrize(("schema", "definitions", "key"), [*kinds("array"), *kinds("object")])
def test_every_list_and_mapping_has_a_bound_that_holds(schema, definitions, key):
    """A schema's own reader, at the bound and one above; the models are made of the same numbers."""
    bound = schema.get(key)
    assert bound is not None and bound <= MANY, "say max_length=FEW, or MANY"
    entries = Draft202012Validator({key: bound})
    many: Any = dict.fromkeys(map(str, range(bound))) if key == "maxProperties" else [0] * bound
    assert entries.is_valid(many)
    assert not entries.is_valid({**many, "more": 0} if isinstance(many, dict) else [*many, 0])


@pytest.mark.parametrize(("schema", "definitions", "_"), kinds("integer"))
def test_every_integer_has_a_bound(schema, definitions, _):
    assert schema.get("maximum", schema.get("exclusiveMaximum", 2**70)) <= 2**63 or "const" in schema


def graph(stages: int, edges: int) -> dict[str, Any]:
    return {
        "stages": {f"s{number}": {"service": "reward"} for number in range(stages)},
        "edges": [{"source": "s0", "target": "s1"}] * edges,
    }


def spec(path: str, value: Any) -> dict[str, Any]:
    *sections, key = path.split(".")
    made: dict[str, Any] = {}
    inner = made
    for name in sections:
        inner = inner.setdefault(name, {})
    inner[key] = value
    return made


def names(count: int) -> list[str]:
    return [f"A{number}" for number in range(count)]


def scorers(count: int) -> list[dict[str, Any]]:
    return [{"name": "exact"}] * count


AT_BOUNDS = {
    "agent.command": (FEW, names),
    "data.exclude": (MANY, names),
    "environment.cameras": (FEW, lambda count: dict.fromkeys(names(count), "c")),
    "environment.env": (FEW, names),
    "environment.instructions": (MANY, lambda count: dict.fromkeys(names(count), "do")),
    "environment.roles": (FEW, lambda count: {key: {"policy": "a"} for key in names(count)}),
    "environment.state": (MANY, names),
    "environment.tasks": (MANY, names),
    "environment.variants": (MANY, lambda count: {key: {} for key in names(count)}),
    "evaluation.data": (FEW, lambda count: {f"s{n}": {"source": "copy_digits"} for n in range(count)}),
    "placement.rollout": (MAX_DEVICES, names),
    "reward.env": (FEW, names),
    "reward.evaluation": (FEW, scorers),
    "reward.scorers": (FEW, scorers),
    "reward.stages": (FEW, lambda count: dict.fromkeys(names(count), scorers(1))),
    "reward.stages.one": (FEW, scorers),
    "sampling.stop": (FEW, names),
    "tracking.trackers": (FEW, lambda count: [{"name": "wandb"}] * count),
    "trainer.freeze": (MANY, names),
    "trainer.lora.targets": (MANY, names),
    "workflow": (FEW, lambda count: graph(count, 1)),
    "workflow.edges": (4 * FEW, lambda count: graph(2, count)["edges"]),
    "environment.count": (2**16, int),
    "evaluation.samples": (2**16, int),
    "rollout.instances": (4096, int),
    "trainer.ranks": (4096, int),
    "steps": (2**31 - 1, int),
    "limits.step_timeout_s": (366 * 86400, int),
    "reward.timeout_s": (366 * 86400, int),
}


def too_many(path: str, value: Any) -> list[str]:
    """What is said of the number of a key's entries, or of the number itself, in a spec that has nothing else."""
    about = [each for each in explain_value(RunSpec, spec(path, value)) if each.key.startswith(path)]
    return [
        f"{each.problem}; {each.fix}"
        for each in about
        if "at most" in each.problem + each.fix or "more than" in each.problem
    ]


@pytest.mark.parametrize("path", AT_BOUNDS)
def test_a_key_takes_its_bound_and_not_one_more(path):
    bound, make = AT_BOUNDS[path]
    assert too_many(path, make(bound)) == []
    (refused,) = too_many(path, make(bound + 1))
    assert str(bound) in refused


@pytest.mark.parametrize("power", [1, 3, 9, 18, 40, 400, 4000])
def test_counts_beyond_any_wire_are_refused(power):
    assert too_many("steps", 10**power) if power > 9 else not too_many("steps", 10**power)


# --- ranges of devices


@given(st.integers(1, 4 * MAX_DEVICES), st.integers(1, 40))
def test_ranges_make_no_more_devices_than_there_may_be(width, count):
    """Whatever the ranges, the number is known first: memory stays that of one list at its bound."""
    asked = ",".join(f"h{number}/cpu:0-{width - 1}" for number in range(count))
    tracemalloc.start()
    problems = explain_value(
        PlacementSection, {"mode": "disaggregated", "rollout": asked, "trainer": ["gpu:0"]}
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert any("more than" in each.problem for each in problems) is (width * count > MAX_DEVICES)
    assert peak < 8 << 20


@pytest.mark.parametrize("digits", [9, 10, 100])
def test_a_range_of_huge_numbers_is_no_range_or_refused(digits):
    big = "9" * digits
    problems = explain_value(PlacementSection, {"rollout": f"cpu:0-{big}", "trainer": f"cpu:0-{big}"})
    assert bool(problems) is (digits == 9)  # With more digits it is a name, which no machine has.


def test_stages_of_a_graph_are_put_in_order_however_they_are_joined():
    """A chain, the slowest order to find: as many stages as there may be."""
    chain = graph(FEW, 0)
    chain["edges"] = [{"source": f"s{n}", "target": f"s{n + 1}"} for n in reversed(range(FEW - 1))]
    assert GraphSection.model_validate(chain).reward_stages == list(chain["stages"])


# --- texts of YAML


def yaml_at(kind: str, size: int) -> str:
    return {
        "scalars": "[" + "x," * (size - 1) + "]",
        "depth": "[" * size + "]" * size,
        "digits": "a: 0x" + "f" * (size - 2),
        "decimals": "a: " + "9" * size,
        "bytes": "a: " + "b" * (size - 3),
    }[kind]


YAML = {
    "scalars": MAX_NODES,
    "depth": MAX_DEPTH,
    "digits": MAX_DIGITS,
    "decimals": MAX_DIGITS,
    "bytes": MAX_BYTES,
}


@pytest.mark.parametrize("kind", YAML)
def test_yaml_takes_its_bound_and_not_one_more(kind):
    read_yaml(yaml_at(kind, YAML[kind]))
    with pytest.raises(YamlProblem) as refused:
        read_yaml(yaml_at(kind, YAML[kind] + 1))
    assert len(str(refused.value)) < 200


@given(st.integers(2, 20), st.integers(1, 30), st.booleans())
def test_aliases_count_as_often_as_they_are_repeated(width, depth, merged):
    """A billion laughs, by lists and by merges."""
    lines = ["a0: &a0 {x: 1}" if merged else "a0: &a0 [x]"]
    for number in range(1, depth + 1):
        inner = ", ".join([f"*a{number - 1}"] * width)
        lines.append(f"a{number}: &a{number} " + ("{<<: [%s]}" if merged else "[%s]") % inner)
    tracemalloc.start()
    try:
        if width**depth > MAX_NODES:
            with pytest.raises(YamlProblem, match="holds more than"):
                read_yaml("\n".join(lines))
        else:
            with_refusal_or_not = "\n".join(lines)
            try:
                read_yaml(with_refusal_or_not)
            except YamlProblem as error:
                assert "holds more than" in str(error)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sign", ["", "-", "+"])
@pytest.mark.parametrize(
    "digits", ["0x" + "f" * 254, "0b" + "1" * 254, "0x" + "f" * 60_000, "1e" + "9" * 60_000]
)
def test_numbers_of_any_base_are_numbers_or_refused(sign, digits):
    """Those to the base 16 have no bound of Python's own: 60,000 digits were a number that no float could hold."""
    try:
        value = read_yaml(f"a: {sign}{digits}")["a"]
        assert isinstance(value, int if digits.startswith("0x") and not sign else str)  # YAML 1.2's core
    except YamlProblem as error:
        assert len(str(error)) < 200


# --- what is told


@pytest.mark.parametrize(("count", "told"), [(0, 0), (MOST, MOST), (MOST + 1, MOST + 1), (4090, MOST + 1)])
def test_of_many_problems_the_first_are_told_and_how_many_more(count, told):
    shown = first_of([problem(f"k{number}", "is wrong", "mend it") for number in range(count)])
    assert len(shown) == told
    if count > MOST:
        assert shown[-1].problem == f"{count - MOST:,} more problems"


def test_a_users_own_text_is_told_in_part():
    (shown,) = first_of([problem("a" * 60_000, "b" * 60_000, "c" * 60_000)])
    assert max(len(shown.key), len(shown.problem), len(shown.fix)) < 2100


@pytest.mark.parametrize(("length", "compared"), [(LONGEST_NAME, True), (LONGEST_NAME + 1, False)])
def test_long_names_are_compared_with_none(length, compared):
    """A path of 60,000 characters that is no route was compared for three seconds, in which nobody was answered."""
    name = "a" * length
    assert (nearest(name, [name[:-1]]) is not None) is compared
