"""The typed Python client of the coordinator's HTTP API. Knows no service and no terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import httpx
from headrace.client.access import Access
from headrace.client.errors import HeadraceError
from headrace.client.models import (
    Certificate,
    Checkpoint,
    Comparison,
    EvaluationRun,
    Event,
    Health,
    Instance,
    Leases,
    Recordings,
    Run,
    Step,
    Trajectory,
    Video,
)
from headrace.client.specs import Overrides, Spec, checking_s, fork_spec, load_spec
from headrace.client.tokens import find_ca, find_token
from headrace.client.transport import Transport

if TYPE_CHECKING:
    from headrace_servicekit.rpc.episodes import Episode

POLL_S = 0.5
EVENT_SILENCE_S = 60.0  # the server sends comments more often than this; longer silence is a dead connection


class Client:
    """A coordinator as Python sees it.

    Runs are named by their id (`r-1a2b`) or their resource name (`runs/r-1a2b`). Every method raises
    `HeadraceError` when the coordinator refuses (with its reason and the keys to mend) or does not answer for
    `patience_s` seconds. Without a `token` HEADRACE_TOKEN is used, or that of the fleet on HEADRACE_DATA_DIR
    (`.headrace`) if it serves `base_url`; an empty one is none. `ca_file`, else HEADRACE_CA_FILE, else that of the same
    fleet, is what the certificate of an `https:` URL must come from.

    A worked example, with a fleet that `headrace up` started:

        from headrace.client import Client

        with Client("http://127.0.0.1:8470") as client:
            run = client.submit("examples/tiny.yaml", {"steps": 50})
            for event in client.events(run.id):
                print(event.id, event.type, event.data)
            run = client.wait(run.id, timeout=600)
            print(run.state, run.evaluations[0].score, "->", run.evaluations[-1].score)
            print([step.reward_mean for step in client.metrics(run.id)])
    """

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        patience_s: float = 30.0,
        ca_file: Path | None = None,
    ) -> None:
        self.base_url = base_url
        token = find_token(base_url) if token is None else token.strip()
        self._transport = Transport(base_url, token, timeout_s, patience_s, ca_file or find_ca(base_url))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._transport.close()

    def link(self, run: str = "") -> str:
        """An address that opens the dashboard, or a run's page, in a browser; good once and for a minute."""
        path = str(self._transport.post("/v1/links")["path"])
        if run:
            path += f"&run={quote(run, safe='')}" if "?" in path else f"#/runs/{quote(run, safe='')}"
        return self.base_url.rstrip("/") + path

    @property
    def access(self) -> Access:
        """Who I am, and an admin's tokens."""
        return Access(self._transport)

    def healthy(self) -> bool:
        """Whether the coordinator answers and is ready to serve; never raises, never waits."""
        return self.health() is not None

    def health(self) -> Health | None:
        """What `/healthz` says of a coordinator that is ready to serve, else None; never raises, never waits."""
        try:
            return self.require_health()
        except HeadraceError:
            return None

    def require_health(self) -> Health:
        """As `health`; raises `HeadraceError` where the coordinator is not ready or is not one."""
        patience, self._transport.patience_s = self._transport.patience_s, 0.0
        try:
            return Health.from_json(self._transport.get("/healthz"))
        except ValueError as error:
            raise HeadraceError("UNREACHABLE", f"{self.base_url} is no coordinator of Headrace") from error
        finally:
            self._transport.patience_s = patience

    def submit(
        self,
        spec: Spec,
        overrides: Overrides = (),
        *,
        idempotency_key: str | None = None,
        visibility: str = "private",
    ) -> Run:
        """Queues a run from a dictionary or a YAML file; the same key with the same spec is the same run."""
        return Run.from_json(self._begin("runs", load_spec(spec, overrides), idempotency_key, visibility))

    def _begin(self, kind: str, body: dict[str, Any], key: str | None, visibility: str) -> dict[str, Any]:
        shared = {} if visibility == "private" else {"visibility": visibility}
        made: dict[str, Any] = self._transport.post(
            f"/v1/{kind}", body, idempotency_key=key, answer_s=checking_s(body), **shared
        )
        return made

    def fork(
        self,
        run: str,
        at: int | None = None,
        overrides: Overrides = (),
        *,
        idempotency_key: str | None = None,
        visibility: str = "private",
    ) -> Run:
        """Queues a run that continues from a checkpoint of `run`: of step `at`, or the newest valid one."""
        spec = fork_spec(self.get(run), at, overrides)
        return self.submit(spec, idempotency_key=idempotency_key, visibility=visibility)

    def check(self, spec: Spec, overrides: Overrides = ()) -> dict[str, Any]:
        """Checks a spec against schema and fleet without queueing it; returns the coordinator's answer."""
        body = load_spec(spec, overrides)
        answer: dict[str, Any] = self._transport.post(
            "/v1/runs", body, dry_run="true", answer_s=checking_s(body)
        )
        return answer

    @property
    def note(self) -> str:
        """What the coordinator said beside its last answer: what the fleet decides of a checked spec, and why."""
        return self._transport.note

    def evaluate(
        self,
        spec: Spec,
        overrides: Overrides = (),
        *,
        idempotency_key: str | None = None,
        visibility: str = "private",
    ) -> EvaluationRun:
        """Queues an evaluation of a model or a checkpoint on a suite, from a dictionary or a YAML file.

        It is a run too: `pause`, `resume`, `cancel`, `events` and `trajectories` take its id.
        """
        body = load_spec(spec, overrides)
        return EvaluationRun.from_json(self._begin("evaluations", body, idempotency_key, visibility))

    def replay(self, run: str, start: str, *, idempotency_key: str | None = None) -> EvaluationRun:
        """Queues one episode from a start state of a run's, or an evaluation's, episodes, and films it.

        The policy is the run's newest checkpoint. `start` is what a trajectory has in place of a prompt
        ("push-v3, seed 17"), or the name of a video.
        """
        made = self._transport.post(
            "/v1/evaluations:replay",
            idempotency_key=idempotency_key,
            answer_s=checking_s({}),
            run=run.removeprefix("runs/"),
            start=start,
        )
        return EvaluationRun.from_json(made)

    def check_evaluation(self, spec: Spec, overrides: Overrides = ()) -> dict[str, Any]:
        """Checks an evaluation's spec against suites and fleet without queueing it; returns the answer."""
        body = load_spec(spec, overrides)
        answer: dict[str, Any] = self._transport.post(
            "/v1/evaluations", body, dry_run="true", answer_s=checking_s(body)
        )
        return answer

    def evaluations(self) -> Sequence[EvaluationRun]:
        """All evaluations, newest first."""
        pages = self._transport.pages("/v1/evaluations", "evaluations")
        return [EvaluationRun.from_json(item) for item in pages]

    def evaluation(self, evaluation: str) -> EvaluationRun:
        """One evaluation."""
        name = evaluation.removeprefix("evaluations/")
        return EvaluationRun.from_json(self._transport.get(f"/v1/evaluations/{name}"))

    def videos(self, evaluation: str) -> Sequence[Video]:
        """The videos of an evaluation's episodes, by item."""
        name = evaluation.removeprefix("evaluations/")
        found = self._transport.get(f"/v1/evaluations/{name}/videos")
        return [Video.from_json(each) for each in found["videos"]]

    def video(self, evaluation: str, video: str) -> bytes:
        """The content of one video, an MP4 file."""
        name = evaluation.removeprefix("evaluations/")
        return self._transport.content(f"/v1/evaluations/{name}/videos/{quote(video)}")

    def episode(self, evaluation: str, video: str) -> Episode:
        """What the policy read and did in the episode of a video, as numpy arrays."""
        from headrace.common.v1 import common_pb2
        from headrace_servicekit.rpc.episodes import decode_episode

        name = evaluation.removeprefix("evaluations/")
        content = self._transport.content(f"/v1/evaluations/{name}/videos/{quote(video)}/episode")
        return decode_episode(common_pb2.ActionSegment.FromString(content))

    def compare(self, first: str, second: str) -> Comparison:
        """Second minus first, item by item: two evaluations of the same items."""
        return Comparison.from_json(
            self._transport.get("/v1/evaluations:compare", first=first, second=second)
        )

    def list(self) -> Sequence[Run]:
        """All runs, newest first, without their specs."""
        return [Run.from_json(item) for item in self._transport.pages("/v1/runs", "runs")]

    def get(self, run: str) -> Run:
        """One run."""
        return Run.from_json(self._transport.get(_path(run)))

    def events(self, run: str, after: int = 0, *, follow: bool = True) -> Iterator[Event]:
        """Events with ids above `after`, then live ones, until the run has ended; without `follow` what there is.

        A broken connection is taken up where it broke (Last-Event-ID): nothing is missed or doubled.
        """
        deadline = time.monotonic() + self._transport.patience_s
        while True:
            try:
                for event in self._stream(run, after, follow=follow):
                    after = event.id
                    deadline = time.monotonic() + self._transport.patience_s
                    yield event
                if not follow:
                    return
                if self.get(run).ended:
                    yield from self._stream(run, after)
                    return
            except httpx.TransportError as error:
                if time.monotonic() >= deadline:
                    raise self._transport.unreachable(error) from error
            time.sleep(POLL_S)

    def _stream(self, run: str, after: int, *, follow: bool = True) -> Iterator[Event]:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        path = f"{_path(run)}/events" + ("" if follow else "?follow=false")
        for data in self._transport.messages(path, headers, EVENT_SILENCE_S):
            event = Event.from_json(json.loads(data))
            if event.id > after:
                yield event

    def wait(self, run: str, timeout: float) -> Run:
        """The run once it has ended.

        HeadraceError DEADLINE_EXCEEDED after `timeout` seconds says what it waits for.
        """
        deadline = time.monotonic() + timeout
        while not (current := self.get(run)).ended:
            if time.monotonic() >= deadline:
                waits = "; ".join(current.waiting_for) or "nothing in particular"
                message = (
                    f"{current.name} is {current.state} after {timeout:g} s, at step {current.step}: {waits}"
                )
                raise HeadraceError("DEADLINE_EXCEEDED", message)
            time.sleep(POLL_S)
        return current

    def metrics(self, run: str) -> Sequence[Step]:
        """Committed steps of the live lineage, oldest first."""
        return [Step.from_json(item) for item in self._transport.pages(f"{_path(run)}/metrics", "steps")]

    def trajectories(
        self, run: str, step: int | None = None, limit: int | None = None
    ) -> Sequence[Trajectory]:
        """Settled trajectories as text, of one step or of all, at most `limit`."""
        found: list[Trajectory] = []
        filters = {} if step is None else {"step": step}
        for item in self._transport.pages(f"{_path(run)}/trajectories", "trajectories", **filters):
            trajectory = Trajectory.from_json(item)
            if step is None or trajectory.step == step:
                found.append(trajectory)
            if limit is not None and len(found) >= limit:
                break
        return found

    def endpoint(self, run: str) -> tuple[str, str]:
        """Base URL and key with which clients speak with the policy of an online run; no URL while nobody serves it."""
        found = self._transport.get(f"{_path(run)}/endpoint")
        return found["base_url"], found["api_key"]

    def certificates(self, run: str) -> Sequence[Certificate]:
        """Certificates, oldest first, abandoned ones included (`live` is false)."""
        pages = self._transport.pages(f"{_path(run)}/certificates", "certificates")
        return [Certificate.from_json(item) for item in pages]

    def plan(self, run: str) -> dict[str, Any]:
        """How the run uses its devices: mode, devices, reason, predicted and measured seconds."""
        found: dict[str, Any] = self._transport.get(f"{_path(run)}/plan")
        return found

    def timeline(self, run: str, steps: int = 20) -> dict[str, Any]:
        """What each device did in the newest steps: leases, work, and spans that label all of the devices' time."""
        found: dict[str, Any] = self._transport.get(f"{_path(run)}/timeline", steps=steps, labels="true")
        return found

    def checkpoints(self, run: str) -> Sequence[Checkpoint]:
        """Durable checkpoints, newest first."""
        pages = self._transport.pages(f"{_path(run)}/checkpoints", "checkpoints")
        return [Checkpoint.from_json(item) for item in pages]

    def recordings(self, run: str) -> Recordings:
        """Recordings of a run's steps, newest first, and the steps of which one was asked for."""
        return Recordings.from_json(self._transport.get(f"{_path(run)}/recordings"))

    def record(self, run: str, step: int) -> Recordings:
        """Has a step that is not made yet recorded; `recordings` has it once it is made."""
        return Recordings.from_json(self._transport.post(f"{_path(run)}:record", step=step))

    def download_recording(self, run: str, name: str, to: Path) -> None:
        """Writes a recording to a file, whole or not at all."""
        self._transport.download(f"{_path(run)}/recordings/{quote(name)}", to)

    def download_recorded_checkpoint(self, run: str, name: str, to: Path) -> None:
        """Writes the checkpoint that a recording begins with to a tar file, whole or not at all."""
        self._transport.download(f"{_path(run)}/recordings/{quote(name)}/checkpoint", to)

    def pause(self, run: str, *, now: bool = False) -> Run:
        """Pauses after the current step, or at once when `now` (the step is made again on resume)."""
        params: dict[str, Any] = {"now": "true"} if now else {}
        return Run.from_json(self._transport.post(f"{_path(run)}:pause", **params))

    def resume(self, run: str) -> Run:
        """Goes on with a paused run."""
        return Run.from_json(self._transport.post(f"{_path(run)}:resume"))

    def set(self, run: str, changes: Overrides) -> Run:
        """Changes a run from its next step on: `set(run, {"trainer.ranks": 2})`; raises HeadraceError if it cannot."""
        return Run.from_json(self._transport.post(f"{_path(run)}:set", load_spec({}, changes)))

    def label(self, run: str, tags: Sequence[str] | None = None, note: str | None = None) -> Run:
        """Gives a run other tags, another note, or both; what is None stays. Works on ended runs too."""
        given: dict[str, Any] = {"tags": None if tags is None else list(tags), "note": note}
        body = {name: value for name, value in given.items() if value is not None}
        return Run.from_json(self._transport.post(f"{_path(run)}:label", body))

    def share(self, run: str, visibility: str) -> Run:
        """Changes who sees a run, ended ones too: private, team or fleet."""
        return Run.from_json(self._transport.post(f"{_path(run)}:share", visibility=visibility))

    def cancel(self, run: str) -> Run:
        """Ends a run; the checkpoints that it has stay."""
        return Run.from_json(self._transport.post(f"{_path(run)}:cancel"))

    def delete(self, run: str) -> None:
        """Deletes an ended run with its checkpoints, export and files, for ever."""
        self._transport.post(f"{_path(run)}:delete")

    def instances(self) -> Sequence[Instance]:
        """Processes of the services."""
        return [Instance.from_json(item) for item in self._transport.pages("/v1/instances", "instances")]

    def leases(self) -> Leases:
        """Leases and devices."""
        return Leases.from_json(self._transport.get("/v1/leases"))

    def release_device(self, device: str, reason: str = "") -> str:
        """Ends the quarantine of a device whose last holder is known to be gone, and why. Its full name."""
        body = {"device": device} | ({"reason": reason} if reason else {})
        return str(self._transport.post("/v1/devices:release", body)["device"])

    def drain(self, instance: str) -> str:
        """Takes an instance out of use in order; its process ends, its supervisor starts another. Its incarnation."""
        return str(self._transport.post(f"/v1/instances/{quote(instance, safe='')}:drain")["incarnation"])

    def scale(self, kind: str, count: int, host: str = "") -> int:
        """Sets the number of processes of a kind (rollout, trainer, reward or simulator) on a host. Returns it."""
        body = {"count": count} | ({"host": host} if host else {})
        return int(self._transport.post(f"/v1/services/{kind}:scale", body)["count"])

    def spec_schema(self) -> dict[str, Any]:
        """JSON Schema of run specs."""
        schema: dict[str, Any] = self._transport.get("/v1/spec-schema")
        return schema


def _path(run: str) -> str:
    return f"/v1/runs/{run.removeprefix('runs/')}"
