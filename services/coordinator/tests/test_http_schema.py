"""schemathesis against the API's own description: every answer has a documented status, type and shape.

Half of the requests follow the description, half break it. One that breaks it must be refused; one that follows it may
be refused only for what the tables say.
"""

from __future__ import annotations

import json
import os
from functools import cache

import httpx
import pytest
from headrace_coordinator.api.http.openapi import description
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from served_parts import SPEC, Served, serving

if os.environ.get("CI") != "true":
    pytest.importorskip("schemathesis")  # a development dependency; CI fails without it
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

DOCUMENT = json.loads(description())
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
TOKEN = "of-this-test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
EXAMPLES = 6
SLOW = {"/v1/runs": 2, "/v1/sessions": 2, "/v1/evaluations": 3}
"""Fewer examples of bodies that take long to make: the run spec has some two hundred keys."""
REFUSED_VALUES = {
    "page_token": "a token that the list did not give, or whose entry is gone, would begin somewhere else",
    "count": "a whole number is written without a fraction: 2, not 2.0",
    "trainer.ranks": "as count",
    "host": "there is no host of this name",
}
"""Parameters of which a value may be refused that the description allows, and why."""
REFUSED_BODIES = {
    "/v1/runs": "its names are looked up in the fleet: model, data, scorers, devices",
    "/v1/evaluations": "its names are looked up in the fleet: model, suite, checkpoint",
    "/v1/quotas": "a count is written as an integer: 2, not 2.0",
    "/v1/sessions": "as /v1/runs, and its workflow is session",
    "/v1/plans": "a workflow must be a graph, and its stages must fit the cluster",
}
"""Operations whose bodies are judged beyond their schema, and why."""


@cache
def schema():
    """The description, read once."""
    return schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Names of things that there are behind the API; the run has ended, so that its events end too."""
    served = Served(tmp_path_factory.mktemp("served"))
    served.app = served.app_with(TOKEN)
    with serving(served) as address, httpx.Client(base_url=address, headers=BEARER) as client:
        run = client.post("/v1/runs", json=SPEC).json()["id"]
        client.post(f"/v1/runs/{run}:cancel").raise_for_status()
        yield {"address": address, "run_id": run, "name": "rollout-0", "kind": "rollout"}


def modes(path, method):
    """A request can break the description only where it takes more than a name in its path."""
    operation = DOCUMENT["paths"][path][method]
    outside = [item for item in operation.get("parameters", []) if item["in"] != "path"]
    can_break = outside or "requestBody" in operation
    return [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if can_break else [])]


def on_purpose(path, response):
    """The checks that do not hold for an answer, on purpose."""
    if response.status_code == 503:  # Documented: nobody can do it now, such as scale where no supervisor is.
        return [not_a_server_error]
    if response.status_code != 422:
        return []
    keys = {item["key"] for item in response.json()["problems"]}
    explained = path in REFUSED_BODIES or (keys and keys <= REFUSED_VALUES.keys())
    return [positive_data_acceptance] if explained else []


def exercise(path, method, mode, known):
    """Sends requests that follow the description, or break it, and judges the answers."""

    @given(case=schema()[path][method].as_strategy(generation_mode=mode), real=st.booleans())
    @settings(
        max_examples=SLOW.get(path, EXAMPLES) if method == "post" else EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def answers(case, real):
        if real and mode is GenerationMode.POSITIVE:
            case.path_parameters.update({name: known[name] for name in case.path_parameters if name in known})
        response = case.call(base_url=known["address"], headers={"Host": "localhost", **BEARER})
        case.validate_response(response, excluded_checks=on_purpose(path, response))

    answers()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_answer_is_as_described(known, path, method):
    for mode in modes(path, method):
        exercise(path, method, mode, known)
