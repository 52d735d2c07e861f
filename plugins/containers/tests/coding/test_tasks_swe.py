"""Tasks in SWE-bench's form: a commit, tests that must pass, and tests that must stay so."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from headrace_containers.provider import BadPath
from headrace_containers.tasks.proving import prove
from headrace_containers.tasks.reading import NoTasks, TaskSet
from headrace_containers.tasks.swe import names_in
from headrace_containers.tasks.task import BadTask, Start
from headrace_containers.tasks.verifying import begin, judge
from namespaces import Namespaces, missing

PYTEST = 'env PYTHONPATH="$PYTHONPATH:/opt/site" python3 -m pytest'
CHEATS = {
    "ends well": "printf 'import os\\nos._exit(0)\\n' > words.py",
    "all tests pass": """
        { echo 'import _pytest.runner as runner'
          echo 'was = runner.pytest_runtest_makereport'
          echo 'import _pytest.reports as reports'
          echo 'old = reports.TestReport.__init__'
          echo 'def new(self, *a, **k):'
          echo '    old(self, *a, **k)'
          echo '    self.outcome = "passed"'
          echo 'reports.TestReport.__init__ = new'; } >> words.py
    """,
    "prints what is expected": """
        { echo 'import os'
          echo 'for name in ("test_hidden", "test_seen"):'
          echo '    os.write(1, f"PASSED tests/test_words.py::{name}\\\\n".encode())'
          echo '    os.write(1, f" passed tests/test_words.py::{name}\\\\n".encode())'
        } >> words.py
    """,
    "conftest": """
        printf 'def pytest_runtest_call(item):\\n    item.obj = lambda: None\\n' | tee conftest.py > tests/conftest.py
    """,
    "edits the tests": "printf 'def test_hidden():\\n    pass\\ndef test_seen():\\n    pass\\n' > tests/test_words.py",
    "breaks what worked": """
        printf 'def count(text):\\n    return len(text.split()) if text != "a b" else 3\\n' > words.py
    """,
}


@pytest.fixture
def start() -> Iterator[Start]:
    if why := missing():
        pytest.skip(f"containers of namespaces: {why}")
    made = Namespaces(pytest=True)
    yield made.start
    made.close()


@pytest.fixture
def tasks(making, tmp_path):
    making.make_swe(tmp_path, "with-pytest", PYTEST)
    return TaskSet.at(tmp_path / "rows.jsonl")


def test_a_row_is_proven_by_its_own_change(start, tasks):
    assert len(tasks.names) == 10
    for name in tasks.names[:3]:
        task = tasks.read(name)
        proof = prove(start, task)
        assert (proof.nothing, proof.oracle, proof.wrong) == (0.0, 1.0, None), proof.said


@pytest.mark.parametrize("cheat", CHEATS)
def test_only_the_tests_names_and_the_control_count(start, tasks, cheat):
    task = tasks.read("made__words")
    container = begin(start, task)
    ran = container.exec(("sh", "-c", CHEATS[cheat]))
    assert ran.exit_code == 0, ran.stderr
    judged = judge(start, task, container)
    assert judged.reward == 0.0, judged.said
    told = {"all tests pass": "the control test did not fail", "ends well": "the control test did not fail"}
    assert told.get(cheat, "") in judged.said


def test_the_commit_is_what_is_solved_and_not_what_came_after(start, tasks, tmp_path):
    (tmp_path / "repositories" / "words" / "words.py").write_text("not even Python")
    container = begin(start, tasks.read("made__words"))
    assert b"len(text.split(" in container.read("/testbed/words.py")
    with pytest.raises(BadPath):
        container.read("/testbed/.git/HEAD")
    container.close()


def rows(tmp_path, *given):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in given))
    return file


ROW = {"instance_id": "a", "problem_statement": "b", "image": "c", "FAIL_TO_PASS": '["t.py::x"]'}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS"),
        ({"problem_statement": ""}, "problem_statement"),
        ({"instance_id": None}, "line 1 of rows.jsonl: instance_id"),
    ],
)
def test_a_line_that_is_no_task_is_named(tmp_path, change, words):
    with pytest.raises(BadTask, match=words):
        TaskSet.at(rows(tmp_path, {**ROW, **change}))


def test_what_a_row_lacks_is_named(tmp_path, making):
    making.make_swe(tmp_path, "with-pytest", PYTEST)
    with pytest.raises(BadTask, match="give each an instance_id of its own"):
        TaskSet.at(rows(tmp_path, ROW, ROW))
    with pytest.raises(NoTasks, match="is empty"):
        TaskSet.at(rows(tmp_path))
    without = {key: value for key, value in ROW.items() if key != "image"}
    with pytest.raises(BadTask, match="it names no repository, and no image has it"):
        TaskSet.at(rows(tmp_path, without)).read("a")
    with pytest.raises(BadTask, match="has no commit deadbeef"):
        TaskSet.at(rows(tmp_path, {**ROW, "repo": "repositories/words", "base_commit": "deadbeef"})).read("a")


def test_files_of_a_patch_are_named():
    patch = "--- a/one.py\n+++ b/one.py\n@@ -1 +1 @@\n-a\n+b\n--- /dev/null\n+++ b/two/new.py\n@@ -0,0 +1 @@\n+c\n"
    assert names_in(patch) == ["one.py", "two/new.py"]
