"""POST /v1/plans: a prediction for plain data; refusals name the keys."""

from __future__ import annotations

import pytest

REQUEST = {
    "workflow": {"name": "reasoning", "barrier": "group", "group_size": 8},
    "items": 256,
    "profile": {
        "stages": {
            "generate": {"fixed_s": 10, "item_s": 0.5, "lengths": {"quantiles": {"0.5": 60, "1": 260}}},
            "score": {"item_s": 0.001},
            "learn": {
                "points": [
                    {"items": 256, "devices": devices, "seconds": seconds}
                    for devices, seconds in ((8, 40.0), (16, 22.0), (32, 12.0))
                ],
                "memory": {"state_gib": 112, "sharded_over_all": True},
            },
        }
    },
    "cluster": {"gpu": {"count": 16, "memory_gib": 80}},
}


def changed(path: str, value):
    """The request with one key changed."""
    keys = path.split(".")
    made = {**REQUEST}
    inner = made
    for key in keys[:-1]:
        inner[key] = {**inner[key]}
        inner = inner[key]
    inner[keys[-1]] = value
    return made


async def test_a_plan_is_predicted_and_explained(api, served):
    answer = await api.post("/v1/plans", json=REQUEST)
    assert answer.status_code == 200, answer.text
    plan = answer.json()
    assert plan["devices"] == {"gpu": 16} and plan["lower_bound_s"] <= plan["step_s"]
    assert {bar["stage"] for bar in plan["timeline"]} == {"generate", "score", "learn"}
    assert plan["fit_errors"]["learn"] < 0.05
    assert served.event_log.state.runs == {}


async def test_a_plan_is_simulated_on_request(api):
    answer = await api.post("/v1/plans", json={**REQUEST, "simulation": {"iterations": 2, "seed": 5}})
    assert answer.status_code == 200, answer.text
    found = answer.json()["simulation"]
    assert len(found["steps_s"]) == 2 and "chrome_trace" not in found
    assert found["drawn"]["generate"]["longest"] <= found["drawn"]["generate"]["limit"]


@pytest.mark.parametrize(
    ("path", "value", "key", "words"),
    [
        ("simulation", {"iterations": 0}, "simulation.iterations", "at least 1"),
        ("items", 0, "items", "at least 1"),
        ("workflow.name", "own", "workflow.name", "not built in"),
        ("workflow.barier", "group", "workflow.barier", "did you mean"),
        ("cluster", {"gpu": {"count": 1, "memory_gib": 80}}, "stages.learn", "112.0 GiB"),
        ("cluster", {"tpu": {"count": 8}}, "stages.generate", "8 tpu"),
        ("cluster", {"gpu": {"count": 10**8}}, "cluster.gpu.count", "at most 16384"),
        (
            "profile.stages.learn",
            {"points": [{"items": 8, "devices": 1, "seconds": 1}]},
            "stages.learn.points",
            "1 points",
        ),
        (
            "workflow",
            {"name": "w", "stages": ["a"], "edges": [{"source": "b", "target": "a"}]},
            "edges[0].source",
            "'b'",
        ),
        (
            "workflow",
            {
                "name": "w",
                "stages": ["a", "b", "c"],
                "edges": [
                    {"source": s, "target": t} for s, t in (("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"))
                ],
            },
            "stages.a",
            "cycles that overlap",
        ),
    ],
)
async def test_refusals_name_the_key_and_the_number(api, path, value, key, words):
    answer = await api.post("/v1/plans", json=changed(path, value))
    assert answer.status_code == 422, answer.text
    found = {item["key"]: item["problem"] + item["fix"] for item in answer.json()["problems"]}
    assert key in found and words in found[key], found


async def test_a_search_that_would_take_too_long_is_refused(api):
    stages = [f"s{n}" for n in range(10)]
    request = {
        **REQUEST,
        "workflow": {"name": "wide", "stages": stages},
        "profile": {"stages": {stage: {"item_s": 1.0} for stage in stages}},
        "cluster": {"gpu": {"count": 4096}},
    }
    answer = await api.post("/v1/plans", json=request)
    assert answer.status_code == 422
    assert "too many to search" in answer.text


ROBOTS = {
    "workflow": {"name": "embodied"},
    "items": 64,
    "profile": {"stages": {name: {"item_s": 0.1} for name in ("generate", "simulate", "learn")}},
    "cluster": {"gpu": {"count": 8}},
    "seats": {"stages": {"generate": ["0", "1"], "simulate": ["2"], "learn": ["3"]}},
}


async def test_a_plan_has_the_devices_that_stages_are_given(api):
    answer = await api.post("/v1/plans", json=ROBOTS)
    assert answer.status_code == 200, answer.text
    plan = answer.json()
    assert plan["devices"] == {"gpu[0-1]": 2, "gpu[2]": 1, "gpu[3]": 1}
    assert {bar["stage"]: bar["count"] for bar in plan["timeline"]} == {
        "generate": 2,
        "simulate": 1,
        "learn": 1,
    }
    assert plan["mode"].startswith("disaggregated") and plan["seats"] == ROBOTS["seats"]["stages"]
    stages = {**ROBOTS["seats"]["stages"], "learn": ["0", "1", "2"]}
    turns = (await api.post("/v1/plans", json={**ROBOTS, "seats": {"stages": stages}})).json()
    assert turns["mode"] == "collocated, offloaded"
    assert turns["idle_share"] < 1 - sum(bar["busy"] for bar in turns["timeline"]) / (6 * turns["step_s"])


@pytest.mark.parametrize(
    ("stages", "key", "words"),
    [
        ({"generate": ["0"], "simulate": ["0"], "learn": ["1"]}, "seats.stages.simulate", "at the same time"),
        ({"generate": ["0"], "simulate": ["1"]}, "seats.stages.learn", "no gpu is named for it"),
        ({"generate": ["0"], "act": ["1"]}, "seats.stages.act", "no stage 'act'"),
        ({"generate": [], "simulate": ["1"], "learn": ["2"]}, "seats.stages.generate", "no device is named"),
        (
            {"generate": [*"0123"], "simulate": [*"4567"], "learn": ["8"]},
            "cluster.gpu.count",
            "9 gpu are named and the cluster has 8",
        ),
    ],
)
async def test_devices_of_stages_that_cannot_be_are_refused(api, stages, key, words):
    answer = await api.post("/v1/plans", json={**ROBOTS, "seats": {"stages": stages}})
    assert answer.status_code == 422, answer.text
    (problem,) = answer.json()["problems"]
    assert problem["key"] == key and words in problem["problem"]
