"""How `ci/walks.py` counts, from traces as its tracer writes them."""

import json

import pytest


@pytest.fixture
def walks(monkeypatch, repository):
    monkeypatch.syspath_prepend(str(repository))
    from ci import walks

    return walks


def lines(kind, functions, calls, *stacks):
    numbered = [{"function": i, "file": file, "name": name} for i, (file, name) in enumerate(functions)]
    return [json.dumps(item) for item in ({"kind": kind}, *numbered, *stacks, {"calls": calls})]


SUBMIT, COUNT, RENEW = (
    ("headrace_a/http.py", "submit"),
    ("headrace_a/http.py", "count"),
    ("headrace_b/l.py", "renew"),
)


def test_a_walk_is_what_every_run_calls_and_an_idle_fleet_does_not(walks):
    one = walks.read_process(lines("coordinator", [SUBMIT, RENEW], [(0, 100), (1, 110), (0, 200), (1, 5)]))
    two = walks.read_process(lines("trainer", [COUNT, SUBMIT], [(0, 105), (1, 205)]))
    runs = [(100, 120), (200, 220)]
    assert walks.walk([one, two], runs, idle=(0, 50)) == {SUBMIT}
    assert walks.walk([one, two], runs[:1], idle=(0, 50)) == {SUBMIT, COUNT}
    assert walks.walk([one, two], runs[:1], idle=(50, 60)) == {SUBMIT, COUNT, RENEW}


def test_functions_and_files_are_counted_by_package(walks):
    counted = walks.count([SUBMIT, COUNT, RENEW, SUBMIT], names=True)
    assert (counted["functions"], counted["files"]) == (3, 2)
    assert counted["by_package"]["headrace_a"] == {"functions": 2, "files": 1}
    assert counted["names"] == {"headrace_a/http.py": ["count", "submit"], "headrace_b/l.py": ["renew"]}


def test_the_way_of_learn_crosses_tasks_and_threads(walks):
    learn, read, work = ("t/s.py", "Servicer.Learn"), ("t/s.py", "Stream.read"), ("t/q.py", "Queue.work")
    compute, micro = ("t/c.py", "compute"), ("t/b.py", "Backend.micro")
    stacks = [
        {"stack": "task", "task": read, "frames": [("k/guard.py", "guard"), learn]},
        {"stack": "task", "task": work, "frames": [read]},
        {"stack": "submit", "thread": "compute", "frames": [work, compute]},
        {"stack": "submit", "thread": "disk", "frames": [work]},
        {"stack": "backward", "thread": "compute_0", "frames": [micro]},
    ]
    assert walks.learn_segments(stacks) == [[learn], [read], [work, compute], [micro]]
    assert walks.learn_segments(stacks[1:]) == []


def test_the_tracer_sees_named_functions_of_ours_alone(walks):
    from ci import walk_tracer

    def code(file, source, name):
        scope = {}
        exec(compile(source, file, "exec"), scope)
        return scope[name].__code__

    source = "def learn():\n    pass\nshort = lambda: 0\n"
    ours = code("/somewhere/src/headrace_trainer/session/session.py", source, "learn")
    assert walk_tracer._ours(ours) == ("headrace_trainer/session/session.py", "learn")
    assert walk_tracer._ours(code("/somewhere/headrace_trainer/step.py", source, "short")) is None
    assert walk_tracer._ours(code("/somewhere/headrace_cli/main.py", source, "learn")) is None
    assert walk_tracer._ours(code("/somewhere/torch/nn.py", source, "learn")) is None
