"""`headrace slurm` on a real Slurm: a job's ends, and how it goes on after each.

The quick twin, without Slurm, is plugins/clusters/tests/test_slurm_*.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path

import pytest
import yaml
from harness.processes import mentioning
from harness.slurm_cluster import Slurm, slurm, why_not
from harness.specs import small_spec
from harness.waiting import wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
HEADRACE = (sys.executable, "-m", "headrace_cli")
SUBMIT = (*HEADRACE, "slurm", "submit", "run.yaml", "--simulator", "0")
TWO = ("--nodes", "2")
START_S = 240.0
"""Of a fleet on two cores that others use."""


class Job:
    """A job with its fleet's files."""

    def __init__(self, cluster: Slurm, *options: str) -> None:
        self.cluster = cluster
        done = cluster.run(*SUBMIT, "--json", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        self.id, self.log_file, self.files = found["job"], Path(found["log"]), Path(found["data_dir"])

    def of_array(self, number: int) -> Job:
        """One job of an array."""
        made = copy(self)
        made.id = f"{self.id}_{number}"
        made.log_file = Path(str(self.log_file).replace("_N", f"_{number}"))
        made.files = Path(str(self.files).replace("_N", f"_{number}"))
        return made

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    @property
    def state(self) -> str:
        return self.cluster.job(self.id)["JobState"]

    def steps(self) -> list[int]:
        """Numbers of the steps that its run has committed, in their order."""
        files = list((self.files / "runs").glob("*/metrics.jsonl"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [line["step"] for line in lines if line["type"] == "step"]

    def until_step(self, step: int) -> None:
        wait_for(lambda: self._has(lambda: max(self.steps(), default=0) >= step), f"step {step}", START_S)

    def until_log(self, text: str, wait_s: float = START_S) -> None:
        wait_for(lambda: self._has(lambda: text in self.log), repr(text), wait_s)

    def _has(self, done: Callable[[], bool]) -> bool:
        assert done() or self.state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"), self.log
        return done()

    def until_ended(self, wait_s: float = 120.0) -> str:
        """The state in which it ends."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return wait_for(
            lambda: self.state if self.state in ended else None, f"the end; its log:\n{self.log}", wait_s
        )

    def headrace(self, *words: str) -> str:
        """`headrace …` on its fleet, at another machine of the cluster's network."""
        return self.cluster.said(*HEADRACE, *words, "--data-dir", str(self.files))

    def cancel_run(self) -> None:
        (run,) = json.loads(self.headrace("run", "list", "--json"))["runs"]
        self.headrace("run", "cancel", run["id"])


def nothing_is_left(cluster: Slurm, files: Path) -> None:
    """Fails unless the fleet has ended in order: a launcher that is killed leaves its shared memory."""
    wait_for(lambda: cluster.states() == ["idle"] * len(cluster.nodes), "idle nodes", 90)
    assert [cluster.shared_memory(node) for node in cluster.nodes] == [[], []]
    assert not [process.cmdline() for process in mentioning(str(files))]


@pytest.fixture
def spec(cluster: Slurm, tiny_model: Path) -> Iterator[Callable[..., None]]:
    """Writes the run's spec where all nodes see it."""
    yield lambda **changes: write_spec(cluster, tiny_model, **changes)
    cluster.run("scancel", "--user=root")
    wait_for(lambda: not cluster.run("squeue", "-h").stdout.strip(), "the jobs to end", 90)


def write_spec(cluster: Slurm, model: Path, **changes: object) -> None:
    made = small_spec(model, **{"rollout__instances": 2, "checkpoint__interval_steps": 0, **changes})
    (cluster.folder / "home" / "run.yaml").write_text(yaml.safe_dump(made))


def test_a_job_trains_over_its_nodes_and_is_followed_to_its_end(cluster, spec):
    spec(steps=8)
    following = subprocess.Popen(
        cluster.command(*SUBMIT, *TWO),
        env=cluster.environment(),
        cwd=cluster.folder / "home",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        job = re.match(r"job (\d+); log: (\S+); files: (\S+)", following.stdout.readline())
        assert job, following.stderr.read()
        wait_for(lambda: Path(job[2]).exists(), "the job's log", START_S)
        following.send_signal(signal.SIGINT)
        _, told = following.communicate(timeout=30)
        assert following.returncode == 130
        assert f"job {job[1]} goes on; follow it again: headrace slurm watch {job[1]}" in told
        again = cluster.run(*HEADRACE, "slurm", "watch", job[1], timeout_s=START_S)
    finally:
        following.kill()
    assert again.returncode == 0, again.stdout + again.stderr
    assert "step 8/8" in again.stdout and "SUCCEEDED" in again.stdout
    assert "rollout-0.n2" in (Path(job[3]) / "slurm" / "n2.out").read_text()
    nothing_is_left(cluster, Path(job[3]))


@pytest.fixture
def interrupted(cluster, spec) -> Callable[..., Job]:
    """Starts a job that goes on for long; it has made some steps."""

    def start(*options: str) -> Job:
        spec(steps=5000)
        job = Job(cluster, *TWO, *options)
        job.until_step(3)
        return job

    return start


def goes_on(job: Job, before: int) -> None:
    """Fails unless the job's run goes on after the last step of before, and none is made twice."""
    job.until_log("goes on after step ")
    restored = int(re.findall(r"goes on after step (\d+)", job.log)[-1])
    assert restored >= before >= 3
    job.until_step(restored + 2)
    steps = job.steps()
    assert steps == list(range(1, len(steps) + 1)), "each step once"
    told = job.log.rpartition("goes on after step ")[2]
    assert f"step {restored}/" not in told, "the log tells no step twice"
    job.cancel_run()
    assert job.until_ended() == "FAILED" and "CANCELLED" in job.log
    nothing_is_left(job.cluster, job.files)


def test_a_job_saves_its_run_before_the_time_limit_and_is_queued_again(interrupted):
    job = interrupted("--time", "3", "--save-before", "75", "--requeue-at-limit")
    job.until_log("the time limit is near; run ")
    saved = int(re.findall(r"is saved after step (\d+)", job.log)[0])
    goes_on(job, saved)


def test_a_job_at_its_time_limit_says_how_to_go_on(interrupted, cluster, spec):
    job = interrupted("--time", "2", "--save-before", "40")
    assert job.until_ended() == "FAILED"
    assert re.search(r"the time limit is near; run \S+ is saved after step \d+; go on: .*--data-dir", job.log)
    nothing_is_left(cluster, job.files)
    before = job.steps()[-1]
    again = Job(cluster, *TWO, "--data-dir", str(job.files))
    goes_on(again, before)


def test_a_cancelled_job_keeps_its_last_step(interrupted, cluster):
    job = interrupted()
    before = job.steps()[-1]
    cluster.said("scancel", job.id)
    assert job.until_ended() == "CANCELLED"
    nothing_is_left(cluster, job.files)
    goes_on(Job(cluster, *TWO, "--data-dir", str(job.files)), before)


def test_a_preempted_job_goes_on_when_the_nodes_are_free_again(interrupted, cluster):
    job = interrupted()
    before = job.steps()[-1]
    cluster.said("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true")
    wait_for(lambda: job.state in ("PENDING", "REQUEUED"), "the preemption", 120)
    goes_on(job, before)


def test_a_job_that_loses_a_node_goes_on_with_others(interrupted, cluster):
    job = interrupted()
    before, lost = job.steps()[-1], cluster.nodes[1]
    cluster.kill_node(lost)
    wait_for(lambda: job.state == "PENDING", "the job to be queued again", 180)
    lost.connect()
    cluster.begin_node(lost)
    goes_on(job, before)


def test_a_head_that_cannot_start_ends_the_job_with_its_sentence(cluster, spec):
    spec(steps=8)
    for options, told in (
        (("--interface", "ib7"), "error: --interface: 'ib7' of this node has no address"),
        (("--port", "6817"), "error: --port: 6818 is in use by another program"),  # slurmd has the next one
    ):
        job = Job(cluster, *TWO, *options)
        assert job.until_ended(60) == "FAILED"
        assert told in job.log
        nothing_is_left(cluster, job.files)


def test_gpus_that_headrace_does_not_see_end_the_job(cluster, spec):
    spec(steps=8)
    job = Job(cluster, "--gpus", "3", "--trainer", "1", "--rollout", "2")
    assert job.until_ended(START_S) == "FAILED"
    assert "--gpus: Slurm gave 3 GPUs of n1, and Headrace sees 0 there; see `nvidia-smi` there" in job.log
    nothing_is_left(cluster, job.files)


def test_two_jobs_of_an_array_have_fleets_side_by_side_on_one_node(cluster, spec):
    spec(steps=5000, rollout__instances=1)
    options = ("--array", "3-4", "--cpus", "1", "--sbatch", "--nodelist=n1", "--set", "seed=%a")
    array = Job(cluster, *options)
    jobs = [array.of_array(number) for number in (3, 4)]
    for job in jobs:
        job.until_step(1)
    places = [json.loads((job.files / "fleet.json").read_text())["url"] for job in jobs]
    assert len({*places}) == 2, "each has a port of its own"
    runs = (json.loads(file.read_text()) for job in jobs for file in (job.files / "runs").glob("*/run.json"))
    assert {run["seed"] for run in runs} == {3, 4}
    # To Slurm, the id of the one that ends first names the other too.
    first, other = sorted(jobs, key=lambda job: cluster.job(job.id)["JobId"] != array.id)
    assert cluster.job(first.id)["JobId"] == array.id
    first.cancel_run()
    assert first.until_ended() == "FAILED" and "CANCELLED" in first.log
    other.until_step(max(other.steps()) + 3)
    assert other.state == "RUNNING", other.log
    other.cancel_run()
    assert other.until_ended() == "FAILED" and "CANCELLED" in other.log
    for job in jobs:
        nothing_is_left(cluster, job.files)


def test_nodes_of_ipv6_alone_make_a_fleet(tmp_path, tiny_model):
    if reason := why_not():
        pytest.skip(f"skipped: {reason}")
    with slurm(tmp_path, "n1", "n2", ipv6=True) as cluster:
        write_spec(cluster, tiny_model, steps=3)
        job = Job(cluster, *TWO)
        assert job.until_ended(START_S) == "COMPLETED", job.log
        assert "http://[fd00:231:47::" in (job.files / "slurm" / "n2.out").read_text()
        nothing_is_left(cluster, job.files)
