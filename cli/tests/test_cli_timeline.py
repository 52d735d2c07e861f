"""`headrace run timeline`: lanes with labels, sums, and the plan's step, in narrow and wide terminals."""

from __future__ import annotations

import json

import pytest
from headrace_cli.show.timeline import GLYPHS, chrome_trace, device_seconds, timeline_lines

NOW = 1_700_000_000.0
BOTH = ["box-1/cpu:0", "box-1/cpu:1"]


def span(stage, label, start, end, devices, instance=""):
    return {
        "stage": stage,
        "label": label,
        "instance": instance,
        "devices": devices,
        "start": NOW + start,
        "end": NOW + end,
    }


def timeline():
    """One step: a rollout waits for the tail of the other, then both cores learn."""
    labels = [
        span("generate", "decode", 0.0, 4.0, BOTH, "rollout-0"),
        span("generate", "decode", 4.0, 6.0, BOTH[:1], "rollout-0"),
        span("generate", "wait for tail", 4.0, 6.0, BOTH[1:], "rollout-1"),
        span("score", "work", 3.0, 6.5, []),
        span("switch", "switch", 6.0, 7.0, BOTH, "trainer-0"),
        span("learn", "train", 7.0, 10.0, BOTH, "trainer-0"),
    ]
    parts = [{"kind": "step", "step": 7, "start": NOW, "end": NOW + 10.0}]
    return {"parts": parts, "work": [], "holds": [], "labels": labels, "tail": None, "older": True}


def plan(**changed):
    found = {
        "mode": "collocated",
        "chosen_by": "auto",
        "from_step": 3,
        "rollout": [],
        "trainer": [],
        "reason": "the fastest",
        "predicted_s": {"generate": 5.0, "learn": 3.0, "step": 9.0},
        "measured_s": {"generate": 6.0, "learn": 3.0, "step": 10.0},
    }
    return found | changed


@pytest.mark.parametrize("width", [60, 120])
def test_lanes_show_what_each_device_did_when(width):
    lines = list(timeline_lines(timeline(), plan(), width))
    assert max(map(len, lines)) <= width
    first, second, host = (
        next(line for line in lines if line.startswith(name)) for name in ("cpu:0", "cpu:1", "host")
    )
    room = width - len("cpu:0") - 2
    assert [first.count(GLYPHS[label]) / room for label in ("decode", "switch", "train")] == pytest.approx(
        [0.6, 0.1, 0.3], abs=0.05
    )
    assert second.count(GLYPHS["wait for tail"]) / room == pytest.approx(0.2, abs=0.05)
    assert GLYPHS["wait for tail"] not in first and host.count(GLYPHS["work"]) / room == pytest.approx(
        0.35, abs=0.05
    )
    text = "\n".join(lines)
    for words in (
        "step 7, 10 s",
        "--steps shows more",
        "t wait for tail",
        "decode",
        "50.0%",
        "generate: predicted 5 s",
    ):
        assert words in text, words
    assert "last step 6 s (+20%)" in text


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "in 3 of 8 steps, at most 2.5 s; an algorithm.max_staleness of about 2 would end that (now 1)"),
        ({"enough": None}, "at most 2.5 s; no algorithm.max_staleness up to 16 would end that (now 1)"),
        ({"waited": 0}, "waited for no tail in 8 steps: a larger algorithm.max_staleness saves nothing"),
    ],
)
def test_the_bound_that_ends_the_waits_for_tails_is_named(changed, text):
    tail = {"max_staleness": 1, "steps": 8, "waited": 3, "longest_s": 2.5, "enough": 2, **changed}
    assert text in " ".join("\n".join(timeline_lines({**timeline(), "tail": tail}, None, 60)).split())
    assert "tail in" not in "\n".join(timeline_lines(timeline(), None, 60))


def test_the_plan_is_drawn_in_turns_or_side_by_side():
    def bars(one):
        lines = list(timeline_lines(timeline(), one, 80))
        at = next(index for index, line in enumerate(lines) if line.startswith("plan: "))
        return lines[at + 1 : at + 3]

    generate, learn = bars(plan())
    assert learn.index("█") >= len(generate)
    side_by_side = plan(mode="disaggregated", rollout=["box/cpu:0"], trainer=["box/cpu:1"])
    generate, learn = bars(side_by_side | {"predicted_s": {"generate": 8.0, "learn": 7.0, "step": 9.0}})
    assert learn.index("█") < len(generate) and generate.startswith("generate cpu:0")
    lines = list(timeline_lines(timeline(), plan(predicted_s={}), 80))
    assert "it predicts no seconds" in lines[-1]


def test_device_seconds_leave_out_work_without_a_device():
    found = device_seconds(timeline()["labels"])
    assert found == {
        ("generate", "decode"): 10.0,
        ("learn", "train"): 6.0,
        ("generate", "wait for tail"): 2.0,
        ("switch", "switch"): 2.0,
    }
    trace = chrome_trace(timeline())["traceEvents"]
    spent = sum(each["dur"] for each in trace if each["ph"] == "X" and each["cat"] != "work")
    assert spent == 20e6
    assert {each["args"]["name"] for each in trace if each["ph"] == "M"} == {*BOTH, "host"}


def test_the_command_asks_for_labels_and_writes_a_trace(headrace, coordinator, tmp_path):
    run = {"id": "r-1", "name": "runs/r-1", "state": "RUNNING", "spec": {}}
    coordinator.routes |= {
        "GET /v1/runs/r-1/timeline": (200, timeline()),
        "GET /v1/runs/r-1/plan": (200, plan()),
        "GET /v1/runs/r-1": (200, run),
    }
    trace = tmp_path / "trace.json"
    done = headrace("run", "timeline", "r-1", "--steps", "5", "--chrome-trace", str(trace))
    assert done.returncode == 0 and "cpu:1" in done.stdout, done.stderr
    (asked,) = coordinator.requests("GET /v1/runs/r-1/timeline")
    assert asked.query == {"steps": ["5"], "labels": ["true"]}
    assert len(json.loads(trace.read_text())["traceEvents"]) > 8
    machine = json.loads(headrace("run", "timeline", "r-1", "--json").stdout)
    assert machine["plan"]["mode"] == "collocated" and machine["timeline"]["labels"]
    lost = headrace("run", "timeline", "r-1", "--chrome-trace", str(tmp_path / "no" / "trace.json"))
    assert lost.returncode == 2 and "--chrome-trace" in lost.stderr
    coordinator.routes["GET /v1/runs/r-1/timeline"] = (200, timeline() | {"parts": [], "labels": []})
    assert "no step of the run has ended yet" in headrace("run", "timeline", "r-1").stdout
