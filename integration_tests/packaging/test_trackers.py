"""The coordinator's extras for trackers: the real packages, without a network, read a run's files to the end."""

import json
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from headrace_coordinator.projections.projection import RunProjection
from headrace_schema.resources.views import StepView
from headrace_schema.spec import RunSpec

pytestmark = [
    pytest.mark.nightly,  # quick: test_trackers of the coordinator, with a tracker that a package publishes
    pytest.mark.timeout(900),
]
OPTIONS = {
    "wandb": {"project": "tests", "mode": "offline", "tags": ["one"]},
    "mlflow": {"experiment": "tests"},
    "trackio": {"project": "tests"},
}


@pytest.fixture(scope="module")
def installed(make_environment):
    environment = make_environment("trackers")
    extras = ",".join([*OPTIONS, "notify"])
    dists = (
        "headrace-proto",
        "headrace-servicekit",
        "headrace-schema",
        "headrace-planner",
        f"headrace-coordinator[{extras}]",
    )
    environment.install(*dists, pins="trackers.txt")
    return environment


@pytest.fixture
def run(tmp_path):
    """Directory of a run of three steps, its second one made again after a rewind."""
    directory = tmp_path / "data" / "runs" / "tracked-1"
    spec = {
        "model": {"path": "owner/model"},
        "data": {"source": "copy_digits"},
        "reward": {"scorers": [{"name": "exact"}]},
        "tracking": {"trackers": [{"name": name, "options": options} for name, options in OPTIONS.items()]},
    }
    projection = RunProjection(directory)
    projection.spec(RunSpec.model_validate(spec).model_dump(mode="json"))
    for version, step in enumerate((1, 2, 2, 3), 1):
        projection.step(step_view(step, version))
    projection.close()
    return directory


def step_view(step, version):
    return StepView(
        step=step,
        version=version,
        wall_s=1.0,
        reward_mean=version / 4,
        tokens=10,
        tokens_per_s=10.0,
        stage_s={"learn": 0.5},
        devices={},
        trained=4,
        dropped=0,
        max_staleness=0,
        figures={"loss": 0.5},
    )


def track(environment, name, run):
    """Runs the tracker's process as the coordinator does, until the run's end."""
    variables = {"TRACKIO_DIR": str(run / "trackio")}
    environment.run(
        "-m", "headrace_coordinator.trackers", name, str(run), given="SUCCEEDED", variables=variables
    )


def test_wandb_offline_writes_what_wandb_sync_reads(installed, run):
    track(installed, "wandb", run)
    [file] = run.glob("wandb/offline-run-*/run-tracked-1.wandb")
    content = file.read_bytes()
    assert content.count(b"train/reward") >= 4 and b"owner/model" in content and b"trainer/loss" in content


def test_mlflow_keeps_metrics_parameters_and_the_end_in_files(installed, run):
    track(installed, "mlflow", run)
    track(installed, "mlflow", run)  # a coordinator that was restarted: the same run, nothing twice
    [metric] = run.parent.parent.glob("mlruns/*/*/metrics/train/reward")
    rows = [line.split() for line in metric.read_text().splitlines()]
    assert [(float(value), int(step)) for _, value, step in rows] == [
        (0.25, 1),
        (0.5, 2),
        (0.75, 2),
        (1.0, 3),
    ]
    entry = metric.parents[2]
    assert (entry / "params" / "model.path").read_text() == "owner/model"
    assert (entry / "tags" / "headrace.run").read_text() == "tracked-1"


def test_trackio_keeps_every_step_in_its_local_store(installed, run):
    track(installed, "trackio", run)
    with sqlite3.connect(run / "trackio" / "tests.db") as store:
        rows = store.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("tracked-1", step) for step in (1, 2, 2, 3)]
    assert json.loads(rows[0][2])["train/reward"] == 0.25


def test_apprise_carries_an_alert_and_the_runs_end(installed, run):
    said = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            said.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["message"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    spec = json.loads((run / "run.json").read_text())
    url = f"json://127.0.0.1:{server.server_address[1]}/"
    spec["tracking"] = {
        "alerts": [{"figure": "train/reward", "above": 0.9}],
        "trackers": [{"name": "notify", "options": {"urls": [url]}}],
    }
    (run / "run.json").write_text(json.dumps(spec))
    track(installed, "notify", run)
    server.shutdown()
    server.server_close()
    assert said == [
        "tracked-1, step 3: train/reward is 1, above 0.9 (tracking.alerts[0])",
        "tracked-1 is SUCCEEDED after step 3",
    ]
