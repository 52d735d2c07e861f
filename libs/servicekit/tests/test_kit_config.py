"""Configuration errors name the key, the reason and the nearest valid value."""

from typing import Literal

import grpc
import pytest
from headrace_servicekit.config import parse_config, settings_from_environment
from headrace_servicekit.problems import KeyProblem, explain
from headrace_servicekit.rpc.errors import ServiceError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["grpo", "ppo"] = "grpo"
    group_size: int = Field(8, gt=0)


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    algorithm: Inner = Inner()
    scorers: list[Inner] = []
    maybe: Inner | None = None
    path: str

    @model_validator(mode="after")
    def _pair(self):
        if self.path == "bad":
            raise ValueError("path: cannot be bad; name a directory")
        return self


def problems(data):
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(data)
    return explain(caught.value, Outer)


def test_an_unknown_key_gets_its_nearest_sibling():
    (problem,) = problems({"path": "x", "algorithm": {"groupsize": 4}})
    assert problem.key == "algorithm.groupsize" and problem.problem == "unknown key"
    assert problem.fix == "did you mean 'group_size'? allowed keys: name, group_size"


def test_keys_in_lists_and_optional_sections_are_found():
    (problem,) = problems({"path": "x", "scorers": [{"nam": "grpo"}]})
    assert problem.key == "scorers.0.nam" and "'name'" in problem.fix
    (problem,) = problems({"path": "x", "maybe": {"group_sze": 1}})
    assert "'group_size'" in problem.fix


def test_a_wrong_value_gets_the_allowed_ones():
    (problem,) = problems({"path": "x", "algorithm": {"name": "grp"}})
    assert problem.problem == "'grp' is not allowed"
    assert problem.fix == "did you mean 'grpo'? allowed values: grpo, ppo"


def test_missing_keys_types_and_bounds():
    missing, bound = problems({"algorithm": {"group_size": 0}})[::-1]
    assert (missing.key, missing.fix) == ("path", "add it")
    assert bound.key == "algorithm.group_size" and "greater than 0" in bound.fix
    (kind,) = problems({"path": "x", "algorithm": {"group_size": "many"}})
    assert "'many' is not valid" in kind.problem and "integer" in kind.fix


def test_a_validators_sentence_keeps_its_key():
    (problem,) = problems({"path": "bad"})
    assert str(problem) == "path: cannot be bad; name a directory"


class Combination(ValueError):
    """As a schema of its own may raise it: several problems, each with its key."""

    problems = (KeyProblem("a", "too big", "use 1"), KeyProblem("b", "too small", "use 2"))


class Pair(BaseModel):
    @model_validator(mode="after")
    def _refuse(self):
        raise Combination


class Holder(BaseModel):
    pair: Pair


def test_a_validators_own_problems_keep_their_keys():
    with pytest.raises(ServiceError) as caught:
        parse_config(Holder, {"pair": {}}, "config_json")
    assert caught.value.message == "config_json: pair.a: too big; use 1 | pair.b: too small; use 2"
    assert caught.value.metadata == {"key": "pair.a", "fix": "use 1"}


def test_parse_config_reads_json_and_says_where():
    parsed = parse_config(Outer, '{"path": "x"}', "config_json")
    assert parsed.path == "x"
    with pytest.raises(ServiceError) as caught:
        parse_config(Outer, {"path": "x", "algoritm": {}}, "config_json of the trainer")
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT and error.reason == "INVALID"
    assert error.message.startswith(
        "config_json of the trainer: algoritm: unknown key; did you mean 'algorithm'?"
    )
    assert error.metadata["key"] == "algoritm"


def test_text_that_is_no_json_is_refused():
    with pytest.raises(ServiceError, match="config_json"):
        parse_config(Outer, "{path", "config_json")


class Settings(BaseModel):
    batch: int = Field(64, ge=1)
    limit_s: float = 1.0


def test_settings_come_from_the_environment_and_a_mistake_names_its_variable(monkeypatch):
    monkeypatch.setenv("HEADRACE_TEST_BATCH", "8")
    assert settings_from_environment(Settings, "HEADRACE_TEST_") == Settings(batch=8, limit_s=1.0)
    monkeypatch.setenv("HEADRACE_TEST_BATCH", "0")
    with pytest.raises(ServiceError, match="HEADRACE_TEST_BATCH"):
        settings_from_environment(Settings, "HEADRACE_TEST_")
