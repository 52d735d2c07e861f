"""MLflow. Does not know how a run's metrics reach it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from headrace_servicekit.registry import Options
from pydantic import Field
from typing_extensions import override

from headrace_coordinator.trackers.tracker import TrackedRun, Tracker

TAG = "headrace.run"
STATUS = {"SUCCEEDED": "FINISHED", "FAILED": "FAILED", "CANCELLED": "KILLED"}
PARAMETERS_A_CALL = 100
"""Most parameters that MLflow accepts in one batch."""


class MlflowOptions(Options):
    """Where the run appears."""

    experiment: str = Field(default="headrace", min_length=1, description="experiment; made if there is none")
    tracking_uri: str = Field(
        default="",
        description="http(s) address or file:///FOLDER, or a reference to one; default: MLFLOW_TRACKING_URI of the "
        "coordinator's environment, "
        "or else the folder `mlruns` of the data directory",
    )


class MlflowTracker(Tracker):
    """MLflow: one run, tagged headrace.run with the run's id; the spec's keys are its parameters."""

    options = MlflowOptions
    modules = ("mlflow",)
    install = "headrace-coordinator[mlflow]"

    def __init__(self, options: MlflowOptions, run: TrackedRun) -> None:
        folder = (run.directory.parent.parent / "mlruns").resolve()
        address = options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "") or folder.as_uri()
        if address.startswith("file:"):
            # MLflow 3 wants a confirmation that files are wanted: naming a file: address is one.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=address)
        self._id = self._find(options.experiment, run)

    def _find(self, experiment: str, run: TrackedRun) -> str:
        """The id of the MLflow run; creates it unless an earlier process of this run has."""
        known = self._client.get_experiment_by_name(experiment)
        place = known.experiment_id if known else self._client.create_experiment(experiment)
        for found in self._client.search_runs([place], f"tags.`{TAG}` = '{run.id}'", max_results=1):
            self._client.update_run(found.info.run_id, status="RUNNING")
            return str(found.info.run_id)
        made = self._client.create_run(place, run_name=run.id, tags={TAG: run.id})
        self._record_spec(made.info.run_id, run.spec)
        return str(made.info.run_id)

    def _record_spec(self, run_id: str, spec: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [Param(key, value) for key, value in _flat("", spec)]
        for start in range(0, len(parameters), PARAMETERS_A_CALL):
            self._client.log_batch(run_id, params=parameters[start : start + PARAMETERS_A_CALL])

    @override
    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[Metric(name, value, now, step) for name, value in scalars.items()]
        )

    @override
    def finish(self, state: str) -> None:
        if state:
            self._client.set_terminated(self._id, STATUS.get(state, "FINISHED"))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}".strip("."), item)
    else:
        yield prefix, str(value)[:500]
