"""Options are checked by the JSON Schema of their model as by the model itself."""

from typing import Literal

import pytest
from headrace_schema.from_json_schema import check_options
from headrace_schema.problems import sentence
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Inner(Strict):
    depth: int = Field(default=1, ge=1, le=4)


class Options(Strict):
    mode: Literal["fast", "exact"] = "fast"
    cap: PositiveFloat | None = None
    inner: Inner = Inner()
    layers: list[Inner] = Field(default_factory=list, max_length=2)
    words: list[str] = Field(default_factory=list)
    extra: dict[str, float] = Field(default_factory=dict)
    within: "Options | None" = None
    needed: str = Field(description="what is needed")


def found(**given):
    return [sentence(item) for item in check_options(Options.model_json_schema(), given, "x.options")]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"mode": "exact", "cap": 2, "inner": {"depth": 4}, "layers": [{"depth": 2}], "extra": {"a": 1.5}},
        {"cap": None, "words": ["a"]},
    ],
)
def test_what_the_model_takes_is_taken(given):
    Options.model_validate({"needed": "x", **given})
    assert found(needed="x", **given) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "x.options.needed: required key is missing; add it: what is needed"),
        ({"needed": "x", "mod": "fast"}, "x.options.mod: unknown key; did you mean mode?"),
        ({"needed": "x", "mode": "fsat"}, "x.options.mode: 'fsat' is not allowed; did you mean fast?"),
        ({"needed": "x", "inner": {"depth": 9}}, "x.options.inner.depth: must be at most 4, got 9"),
        ({"needed": "x", "inner": {"deph": 2}}, "x.options.inner.deph: unknown key; did you mean depth?"),
        ({"needed": "x", "layers": [{"depth": 0}]}, "x.options.layers[0].depth: must be at least 1, got 0"),
        ({"needed": "x", "cap": -1.0}, "x.options.cap: must be above 0, got -1.0"),
        ({"needed": "x", "words": "abc"}, "x.options.words"),
        ({"needed": "x", "within": {"needed": "x", "mod": 1}}, "x.options.within.mod: unknown key"),
        ({"needed": 3}, "x.options.needed"),
    ],
)
def test_what_the_model_refuses_is_refused_with_its_key(given, words):
    with pytest.raises(ValueError):
        Options.model_validate(given)
    assert any(words in text for text in found(**given)), found(**given)


def test_a_schema_that_is_not_understood_lets_pass():
    assert check_options({"properties": {"a": {"not": {"type": "string"}}}}, {"a": "x", "b": 1}, "o") == []
