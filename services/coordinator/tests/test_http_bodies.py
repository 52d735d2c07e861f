"""Large and odd bodies are refused with 4xx by every route that reads one, and in bounded time."""

from __future__ import annotations

import pytest

PATHS = ("/v1/runs", "/v1/plans", "/v1/evaluations")
BODIES = {
    "deeper than any reader": "[" * 400_000 + "]" * 400_000,
    "deep": '{"workflow": ' + '{"a":' * 190 + "1" + "}" * 190 + "}",
    "many deep ones": '{"profile": {"stages": [' + ",".join(["[" * 150 + "]" * 150] * 3000) + "]}}",
    "an unknown key": '{"items_s": 1}',
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", BODIES)
async def test_an_odd_body_is_refused(api, path, body):
    answer = await api.post(path, content=BODIES[body], headers={"Content-Type": "application/json"})
    assert answer.status_code == 422 and answer.json()["problems"]


@pytest.mark.parametrize("path", PATHS)
async def test_of_very_many_problems_the_first_are_explained(api, path):
    """Each is compared with all keys there are: forty thousand of them took minutes, in which nobody was answered."""
    answer = await api.post(path, json={f"k{number}": number for number in range(40_000)})
    problems = answer.json()["problems"]
    assert answer.status_code == 422 and len(problems) == 51
    assert problems[-1]["problem"].endswith(" more problems")
