"""What a job's batch script runs, on its first node: starts the fleet, makes the run, ends all in order.

However it ends, the steps get SIGTERM first: by this process, or by Slurm itself as it cancels or preempts a job.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from headrace.client import Client, HeadraceError, load_spec
from headrace_cli.connection import find_target
from headrace_cli.dry_run import check_schema
from headrace_cli.errors import CommandError, refused, user_error
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.state import is_locked, living_state
from headrace_cli.output import console, error_console
from headrace_cli.show.reporters import PlainReporter
from headrace_cli.show.runs import run_table
from headrace_cli.watching import Snapshot, follow
from headrace_schema.spec import RunSpec
from headrace_servicekit.rpc.addresses import host_port

from headrace_clusters.slurm.addresses import free_ports, own_address
from headrace_clusters.slurm.layout import lay_out
from headrace_clusters.slurm.programs import ask, host_names
from headrace_clusters.slurm.script import SIGNAL
from headrace_clusters.slurm.steps import Steps

if TYPE_CHECKING:
    from headrace.client import Run

    from headrace_clusters.slurm.script import JobOptions

OWN = ("HEADRACE_URL", "HEADRACE_TOKEN", "HEADRACE_DATA_DIR")
"""Variables of the user's shell, which sbatch hands on: they name another fleet."""
LOOK_S = 0.3
COORDINATOR_S = 60.0
"""How long the coordinator may be away, such as while it is restarted."""
LOCK_S = 150.0
"""How long a file server keeps the lock of a node that is gone."""
STARTS = 4
"""Starts of a node that keeps losing its part, after which the job fails."""
ENDED_FROM_OUTSIDE = (0, 128 + signal.SIGTERM, 128 + signal.SIGINT)
REQUEUED_S = 120.0
SAVE_S = 3600.0
"""A checkpoint may take as long as Slurm lets it: what is ended by the limit itself has missed it."""
LIMIT = signal.Signals[f"SIG{SIGNAL}"]


class Told(BaseException):
    """A signal: the time limit is near, or somebody ends the job."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_job(spec: Path, sets: Sequence[str], options: JobOptions) -> int:
    """Makes a spec's run on a fleet over this job's nodes; returns the exit status. Raises CommandError."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        raise user_error(
            "headrace slurm job", "this is no job of Slurm", "submit one: headrace slurm submit SPEC"
        )
    for name in OWN:
        os.environ.pop(name, None)
    for number in (LIMIT, signal.SIGTERM):
        signal.signal(number, _tell)
    made: JobRun | None = None
    try:
        try:
            made = JobRun(job, spec, sets, options)
            made.start()
            made.follow()
        finally:
            for number in (LIMIT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # What follows has deadlines.
    except Told as told:
        if made is None or told.number != LIMIT:
            error_console().print("the job is ended from outside; started again, it goes on with its run")
            return 128 + signal.SIGTERM
        made.save()
        made.stop()
        return made.at_limit()
    except HeadraceError as error:
        raise refused(error) from error
    finally:
        if made is not None:
            made.stop()
    return 0


def _tell(number: int, frame: FrameType | None) -> None:
    for each in (LIMIT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # The first one decides.
    raise Told(number)


class JobRun:
    """A job's fleet and its run."""

    def __init__(self, job: str, spec: Path, sets: Sequence[str], options: JobOptions) -> None:
        self._job, self._options, self._spec_file = job, options, spec
        self._spec = load_spec(spec, [completed(text) for text in sets])
        self._nodes = host_names(os.environ["SLURM_JOB_NODELIST"])
        self._gpus = gpus_of_each()
        check_schema(self._spec)
        model = RunSpec.model_validate(self._spec)
        self._layout = lay_out(model, options, len(self._nodes), self._gpus)
        self._place = DataDir.at(completed(options.data_dir or default_data_dir()))
        self._place.prepare()
        self._own = self._place.root / "slurm"
        self._own.mkdir(exist_ok=True)
        told = (
            (ask("scontrol", "show", "node", "-o", self._nodes[0]) + " ")
            .partition("NodeAddr=")[2]
            .split(" ")[0]
        )
        self._address = own_address(options.interface, told)
        self._port = free_ports(self._address, int(job), options.port)
        self._steps = Steps(own_name(), self._own)
        self._run: Run | None = None
        self._began = self._step = 0

    def start(self) -> None:
        """Starts the head, then the other nodes; returns when all instances are ready."""
        self._wait_for_lock()
        self._steps.start(self._nodes[0], self._up())
        self._until("the head", self._answers)
        for node in self._nodes[1:]:
            self._steps.start(node, self._join(node))
        self._until("the other nodes", self._is_complete)

    def follow(self) -> None:
        """Submits the run, or finds the one that this job had before, and shows it until it has ended."""
        with self._client(COORDINATOR_S) as client:
            run = self._run = self._submitted(client)
            self._began = self._step = run.step
            reporter = _Reporter(self._look_after)
            if run.step:
                console().print(f"run {run.id} goes on after step {run.step}")
                reporter.begin_at(Snapshot(run, client.metrics(run.id)))
            if self._paused.exists():
                client.resume(run.id)
                self._paused.unlink()
            run = self._run = follow(client, run.id, reporter).run
            console().print(run_table(run))
        if run.state != "SUCCEEDED":
            raise CommandError(
                f"run {run.id} {run.state}: {run.reason or 'no reason given'}", reason=run.state
            )

    def save(self) -> None:
        """Pauses the run, which saves a checkpoint of its last step however long that takes; a new start resumes it."""
        if self._run is None or self._run.ended:
            return
        try:
            with self._client(0) as client:
                self._paused.touch()
                client.pause(self._run.id, now=True)
                deadline = time.monotonic() + SAVE_S
                while (run := client.get(self._run.id)).state != "PAUSED" and not run.ended:
                    if time.monotonic() > deadline or self._steps.ended():
                        break
                    time.sleep(LOOK_S)
                self._run, self._step = run, run.step
        except (HeadraceError, CommandError) as error:
            error_console().print(f"the run could not be paused: {error}", markup=False)

    def stop(self) -> None:
        """Ends the fleet in order, on all nodes."""
        self._steps.stop()

    def at_limit(self) -> int:
        """What becomes of a job whose time limit is near, its run saved and its fleet ended."""
        run = f"run {self._run.id} is saved after step {self._step}" if self._run else "there is no run yet"
        if not self._options.requeue_at_limit:
            again = f"--data-dir {self._place.root}"
            fix = f"go on: headrace slurm submit {self._spec_file} {again} …, or let it: --requeue-at-limit"
            raise CommandError(f"the time limit is near; {run}; {fix}", reason="TIME_LIMIT")
        if self._step == self._began:
            problem = f"no step was made within it, so the job is not queued again; {run}"
            raise user_error("--time", problem, "give a longer one")
        console().print(f"the time limit is near; {run}, and the job is queued again")
        ask("scontrol", "requeue", own_name())
        time.sleep(REQUEUED_S)  # Slurm ends this process.
        return 0

    @property
    def _paused(self) -> Path:
        """Says that this job, and no person, has paused the run."""
        return self._own / "paused"

    def _wait_for_lock(self) -> None:
        if is_locked(self._place):
            told = f"{self._place.root} is in use; a node that is gone keeps its lock for up to {LOCK_S:g} s"
            error_console().print(told, markup=False)
        deadline = time.monotonic() + LOCK_S
        while is_locked(self._place):
            if time.monotonic() > deadline:
                problem = f"{self._place.root} is in use by another fleet"
                raise user_error("--data-dir", problem, "end that one, or name another directory")
            time.sleep(LOOK_S)

    def _up(self) -> list[str]:
        own = ["--listen", self._address, "--port", str(self._port), "--data-dir", str(self._place.root)]
        return self._command("up", 0, [*own, *(["--tls"] if self._options.tls else [])])

    def _join(self, node: str) -> list[str]:
        own = [host_port(self._address, self._port), "--token-file", str(self._place.token_file)]
        own += ["--name", node, "--data-dir", str(self._own / node)]
        own += ["--ca-file", str(self._place.authority)] if self._options.tls else []
        return self._command("join", self._nodes.index(node), own)

    def _command(self, name: str, number: int, own: Sequence[str]) -> list[str]:
        options = self._options
        counts = self._layout.counts(number, options.simulator)
        found = [sys.executable, "-m", "headrace_cli"]
        found += ["slurm", "part", str(self._place.root)] if number else []
        found += [name, *own, "--foreground"]
        found += [word for kind, count in counts.items() for word in (f"--{kind}", str(count))]
        found += ["--timeout", f"{options.timeout:g}", "--engine", options.engine]
        found += ["--backend", options.backend, "--sim", options.sim]
        return [*found, *(["--devices", options.devices] if options.devices else [])]

    def _client(self, patience_s: float) -> Client:
        target = find_target(None, self._place.root)
        return Client(target.url, target.token, patience_s=patience_s, ca_file=target.ca_file)

    def _until(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._options.timeout
        while not done():
            for node, status in self._steps.ended().items():
                raise self._failed(node, status)
            if time.monotonic() > deadline:
                raise CommandError(
                    f"{what} did not start within {self._options.timeout:g} s (--timeout); see {self._own}"
                )
            time.sleep(LOOK_S)

    def _failed(self, node: str, status: int) -> CommandError | Told:
        if status in ENDED_FROM_OUTSIDE:
            return Told(signal.SIGTERM)
        log = self._place.root if node == self._nodes[0] else self._own / node
        return CommandError(
            f"node {node} has ended with status {status}, as is said above; {sys.executable} must be Headrace's Python "
            f"there too, and its logs are in {log / 'logs'}"
        )

    def _answers(self) -> bool:
        if (state := living_state(self._place)) is None or state.phase != "running":
            return False
        with self._client(0) as client:
            return client.health() is not None

    def _is_complete(self) -> bool:
        with self._client(0) as client:
            try:
                ready = {item.name: item for item in client.instances() if item.state == "READY"}
            except HeadraceError:
                return False
        for number, node in enumerate(self._nodes):
            counts = self._layout.counts(number, self._options.simulator)
            names = [f"{kind}-{index}" for kind, count in counts.items() for index in range(count)]
            names = [f"{name}.{node}" for name in names] if number else names
            if not all(name in ready for name in names):
                return False
            self._require_gpus(node, {device for name in names for device in ready[name].devices})
        return True

    def _require_gpus(self, node: str, devices: set[str]) -> None:
        seen = sum("/gpu:" in name for name in devices)
        if devices and seen < self._gpus and not self._options.devices:
            problem = f"Slurm gave {self._gpus} GPUs of {node}, and Headrace sees {seen} there"
            raise user_error("--gpus", problem, "see `nvidia-smi` there, or name --devices")

    def _submitted(self, client: Client) -> Run:
        """The run of this spec in the data directory that goes on or has succeeded, or a new one."""
        digest = hashlib.sha256(json.dumps(self._spec, sort_keys=True).encode()).hexdigest()[:16]
        file, before = self._own / f"run-{digest}", ""
        if file.exists():
            before = file.read_text(encoding="utf-8")
            try:
                if not (run := client.get(before)).ended or run.state == "SUCCEEDED":
                    return run
            except HeadraceError as error:
                if error.reason != "NOT_FOUND":
                    raise
        run = client.submit(self._spec, idempotency_key=f"slurm-{self._job}-{digest}-{before}")
        aside = file.with_suffix(".new")
        aside.write_text(run.id, encoding="utf-8")
        aside.replace(file)
        return run

    def _look_after(self, step: int) -> None:
        """Starts again what a node has lost; the job ends with its head."""
        self._step = step
        for node, status in self._steps.ended().items():
            if node == self._nodes[0] or status in ENDED_FROM_OUTSIDE or self._steps.starts[node] >= STARTS:
                raise self._failed(node, status)
            error_console().print(
                f"node {node} has lost its part of the fleet (status {status}), which starts again"
            )
            self._steps.start(node, self._join(node))


class _Reporter(PlainReporter):
    """Prints what is new of a run, and looks after its fleet each time."""

    def __init__(self, look_after: Callable[[int], None]) -> None:
        super().__init__(console())
        self._look_after = look_after

    def update(self, snapshot: Snapshot) -> None:
        """Prints what is new."""
        super().update(snapshot)
        self._look_after(snapshot.run.step)


def gpus_of_each() -> int:
    """GPUs that this job asks for on each node. SLURM_GPUS_ON_NODE counts those that whole nodes have besides."""
    asked = os.environ.get("SLURM_GPUS_PER_NODE") or "0"
    return sum(int(each.rpartition(":")[2]) for each in asked.split(","))


def default_data_dir() -> str:
    """In the directory of submission."""
    return "headrace-%A_%a" if "SLURM_ARRAY_TASK_ID" in os.environ else "headrace-%j"


def own_name() -> str:
    """What names this job alone to Slurm's programs: one job of an array has the array's id, which names all of it."""
    return completed("%A_%a" if "SLURM_ARRAY_TASK_ID" in os.environ else "%j")


def completed(text: str) -> str:
    """A text with this job's numbers, as Slurm writes them in names of logs: %j, and of an array %A and %a."""
    job = os.environ["SLURM_JOB_ID"]
    known = {
        "%j": job,
        "%A": os.environ.get("SLURM_ARRAY_JOB_ID", job),
        "%a": os.environ.get("SLURM_ARRAY_TASK_ID", ""),
    }
    for name, value in known.items():
        text = text.replace(name, value)
    return text
