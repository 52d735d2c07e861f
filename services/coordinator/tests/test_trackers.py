"""Trackers: processes beside a run that get its figures, and that can do it no harm."""

import asyncio
import json
import os
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from headrace_coordinator.projections.projection import RunProjection
from headrace_coordinator.trackers import TrackedRun, processes, tracker_problems
from headrace_coordinator.trackers.notify import NotifyOptions, NotifyTracker
from headrace_coordinator.trackers.processes import Trackers
from headrace_schema.resources.evaluations import EvaluationView
from headrace_schema.resources.views import StepView
from headrace_schema.sections.tracking import TrackingSection
from headrace_schema.spec import RunSpec

PLUGIN = """
    import json, os, time
    from headrace_coordinator.trackers import Tracker
    from headrace_servicekit.registry import Options

    class Given(Options):
        fails_at: int = 0
        hangs: bool = False
        api_key: str = ""

    class Recorder(Tracker):
        "Writes what it gets."
        options = Given

        def __init__(self, options, run):
            self.given, self.file = options, run.directory / "got.jsonl"
            self.write({"begins": run.id, "steps": run.spec["steps"], "key": len(options.api_key)})

        def write(self, what):
            with self.file.open("a") as file:
                file.write(json.dumps(what) + chr(10))

        def log(self, step, scalars):
            if step == self.given.fails_at:
                raise ConnectionError("the tracker's server is away, asked with " + self.given.api_key)
            self.write({"step": step, **scalars})

        def finish(self, state):
            while self.given.hangs:
                time.sleep(1)
            self.write({"ends": state})
"""
SPEC = {
    "steps": 3,
    "model": {"path": "owner/model"},
    "data": {"source": "copy_digits"},
    "reward": {"scorers": [{"name": "exact"}]},
}


def step_view(step: int, version: int | None = None, **figures: float) -> StepView:
    return StepView(
        step=step,
        version=version or step,
        wall_s=2.0,
        reward_mean=0.25 * step,
        tokens=100,
        tokens_per_s=50.0,
        stage_s={},
        devices={},
        trained=32,
        dropped=0,
        max_staleness=0,
        figures=figures,
    )


@pytest.fixture(autouse=True)
def published(tmp_path, monkeypatch):
    """A package on the path that publishes the tracker `recorder`."""
    package = tmp_path / "package"
    (package / "recorder-1.dist-info").mkdir(parents=True)
    (package / "recorder_plugin.py").write_text(textwrap.dedent(PLUGIN))
    (package / "recorder-1.dist-info" / "METADATA").write_text("Name: recorder\nVersion: 1\n")
    entry = "[headrace.trackers]\nrecorder = recorder_plugin:Recorder\n"
    (package / "recorder-1.dist-info" / "entry_points.txt").write_text(entry)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *sys.path]))
    monkeypatch.syspath_prepend(str(package))


class Tracked:
    """A run's directory and its trackers."""

    def __init__(self, directory, end_s: float = 60.0, **options):
        self.directory, self.notes = directory / "runs" / "run-1", []
        self.tracking = TrackingSection.model_validate(
            {"trackers": [{"name": "recorder", "options": options}]}
        )
        self.trackers = Trackers(end_s)

    def begin(self) -> RunProjection:
        projection = RunProjection(self.directory, self.tracking)
        spec = {**SPEC, "tracking": self.tracking.model_dump()}
        projection.spec(RunSpec.model_validate(spec).model_dump(mode="json"))
        self.trackers.begin(self.tracking, self.directory, self.notes.append)
        return projection

    async def end(self, projection: RunProjection, state: str) -> None:
        projection.close()
        self.trackers.end(self.directory, state)
        await asyncio.wait(list(self.trackers._tasks.values()), timeout=90)

    def got(self) -> list[dict]:
        return [json.loads(line) for line in (self.directory / "got.jsonl").read_text().splitlines()]


async def test_a_tracker_gets_every_figure_once_over_pauses_and_the_final_state(tmp_path):
    run = Tracked(tmp_path)
    projection = run.begin()
    projection.step(step_view(1, loss=0.5, entropy=float("nan")))
    await run.end(projection, "")
    projection = run.begin()
    projection.step(step_view(2))
    projection.step(step_view(1, version=9))  # a rewind
    scored = EvaluationView(kind="heldout", step=2, version=2, score=0.4, parts={}, answers=8, examples=[])
    projection.evaluation(scored)
    await run.end(projection, "SUCCEEDED")
    got = run.got()
    assert run.notes == []
    assert [item.get("step", item.get("ends", item.get("begins"))) for item in got] == [
        *("run-1", 1, ""),
        *("run-1", 2, 1, 2, "SUCCEEDED"),
    ]
    assert got[1]["train/reward"] == 0.25 and got[1]["trainer/loss"] == 0.5
    assert "trainer/entropy" not in got[1]
    assert got[6] == {"step": 2, "evaluation/heldout": 0.4}


async def test_a_tracker_that_fails_is_told_and_the_next_process_sends_the_rest(tmp_path):
    run = Tracked(tmp_path, fails_at=2)
    projection = run.begin()
    for step in (1, 2, 3):
        projection.step(step_view(step))
    await run.end(projection, "")
    [note] = run.notes
    assert note.startswith("the tracker recorder failed: ConnectionError: the tracker's server is away")
    assert note.endswith("; the run goes on without it")
    assert {"ends": ""} not in run.got()
    run.tracking = TrackingSection.model_validate({"trackers": [{"name": "recorder"}]})
    await run.end(run.begin(), "SUCCEEDED")
    # What the process had sent and not noted down comes twice, never not.
    assert [item["step"] for item in run.got() if "train/reward" in item][-3:] == [1, 2, 3]


async def test_a_tracker_that_hangs_is_ended_with_a_note(tmp_path):
    run = Tracked(tmp_path, end_s=1.0, hangs=True)
    projection = run.begin()
    projection.step(step_view(1))
    await run.end(projection, "SUCCEEDED")
    [note] = run.notes
    assert "was ended: it had not sent everything 1 s after the run" in note
    assert run.trackers._tasks == {}


async def test_stopping_the_coordinator_ends_trackers_that_go_on_later(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "STOP_S", 0.5)
    run = Tracked(tmp_path, hangs=True)
    run.begin().close()
    await run.trackers.stop()
    assert run.trackers._tasks == {}


def problems(*trackers: dict) -> dict[str, str]:
    tracking = TrackingSection.model_validate({"trackers": trackers})
    return {item.key: f"{item.problem}; {item.fix}" for item in tracker_problems(tracking)}


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    [(key, words)] = problems({"name": name}).items()
    assert key == "tracking.trackers[0].name"
    assert f"pip install 'headrace-coordinator[{name}]'" in words


def test_unknown_trackers_and_options_are_refused():
    wrong = problems(
        {"name": "wandbb"}, {"name": "recorder", "options": {"hang": True}}, {"name": "recorder"}
    )
    assert "did you mean 'wandb'?" in wrong["tracking.trackers[0].name"]
    assert "did you mean 'hangs'?" in wrong["tracking.trackers[1].options.hang"]
    assert "named twice" in wrong["tracking.trackers[2].name"]
    assert problems({"name": "recorder", "options": {"hangs": True}}) == {}


async def test_a_tracker_gets_its_secret_and_nothing_in_the_runs_directory_shows_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKER_KEY", "secret-of-the-tracker")
    run = Tracked(tmp_path, api_key="env:TRACKER_KEY", fails_at=2)
    projection = run.begin()
    projection.step(step_view(1, loss=0.5))
    projection.step(step_view(2))
    await run.end(projection, "SUCCEEDED")
    assert run.got()[0]["key"] == len("secret-of-the-tracker")
    (note,) = run.notes
    assert "the tracker's server is away, asked with env:TRACKER_KEY" in note
    files = [file for file in run.directory.rglob("*") if file.is_file()]
    assert not [file for file in files if b"secret-of" in file.read_bytes()] and len(files) >= 4
    monkeypatch.delenv("TRACKER_KEY")
    (told,) = tracker_problems(run.tracking)
    assert told.key == "tracking.trackers[0].options.api_key" and "no variable TRACKER_KEY" in told.problem


@pytest.fixture
def webhook():
    """An address that keeps what is posted to it, and refuses the first message."""
    said, refusals = [], [503]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = refusals.pop() if refusals else 200
            if status == 200:  # before the answer, behind which the test looks
                said.append(json.loads(body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/hook", said
    server.shutdown()
    server.server_close()


def test_a_webhook_is_told_once_of_a_bound_that_is_passed_and_of_the_end(tmp_path, webhook):
    url, said = webhook
    spec = {"tracking": {"alerts": [{"figure": "trainer/grad_norm", "above": 10}]}}
    waits = []
    tracker = NotifyTracker(NotifyOptions(urls=[url]), TrackedRun("r-1", spec, tmp_path), waits.append)
    for step, norm in enumerate((1.0, 12.0, 13.0, 1.0, 20.0), 1):
        tracker.log(step, {"train/reward": 0.5, "trainer/grad_norm": norm})
        tracker.log(step, {"evaluation/heldout": 0.5})
    tracker.finish("SUCCEEDED")
    assert [(each["kind"], each["step"]) for each in said] == [("alert", 2), ("alert", 5), ("end", 5)]
    assert said[0]["text"] == "r-1, step 2: trainer/grad_norm is 12, above 10 (tracking.alerts[0])"
    assert waits == [2.0], "a message that is refused is sent again"


def test_an_address_of_apprise_wants_apprise(monkeypatch):
    monkeypatch.setattr("headrace_coordinator.trackers.notify.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"headrace-coordinator\[notify\]"):
        NotifyOptions(urls=["mailto://user@example.org"])
