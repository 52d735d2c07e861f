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


LONG = "a" * 60_000


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_long_path_is_compared_with_no_route(api, method):
    """It was, with each: three seconds without an answer to anybody."""
    answer = await api.request(method, f"/v1/{LONG}")
    assert answer.status_code == 404 and "did you mean" not in answer.text and len(answer.content) < 1000


async def test_of_very_many_parameters_the_first_are_explained(api):
    answer = await api.get("/v1/runs?" + "&".join(f"k{number}=1" for number in range(6000)))
    assert answer.status_code == 422 and len(answer.json()["problems"]) == 50


@pytest.mark.parametrize(
    "text",
    ["steps: 0x" + "f" * 60_000, "steps: 0b" + "1" * 60_000, f"!{LONG} a", f"{LONG}: 1", f"a: &a [*{LONG}]"],
    ids=lambda text: text[:9],
)
async def test_yaml_of_long_words_is_refused_in_a_few(api, text):
    """A number of 60,000 hexadecimal digits was told to be a bug of the coordinator."""
    answer = await api.post("/v1/runs", content=text, headers={"Content-Type": "application/yaml"})
    assert answer.status_code == 422 and len(answer.content) < 5000


@pytest.mark.parametrize("path", ["/v1/runs", "/v1/runs?dry_run"])
async def test_a_graph_of_many_stages_is_refused(api, path):
    """Their order took the cube of their number."""
    stages = {f"s{number}": {"service": "reward"} for number in range(700)}
    edges = [{"source": f"s{number}", "target": f"s{number + 1}"} for number in range(699)]
    problems = (await api.post(path, json={"workflow": {"stages": stages, "edges": edges}})).json()[
        "problems"
    ]
    told = {each["key"]: each["fix"] for each in problems}
    assert told["workflow.stages"] == "write at most 64 entries"
    assert told["workflow.edges"] == "write at most 256 entries"
