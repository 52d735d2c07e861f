"""The batch script of a job, and what is refused before it is submitted."""

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from headrace_clusters.slurm import commands
from headrace_clusters.slurm.script import Asked, JobOptions, render
from typer.testing import CliRunner

SPEC = {"model": {"path": "m"}, "steps": 3, "data": {"source": "copy_digits"}}
SPEC["algorithm"] = {"prompts_per_step": 32}
SPEC["reward"] = {"scorers": [{"name": "exact"}]}


@pytest.fixture
def run(tmp_path, monkeypatch, headrace):
    """`run(keys of the spec, option, …)`: what `headrace slurm submit` says."""

    def submit(changes, *options, **environment):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(SPEC | changes))
        done = headrace("slurm", "submit", "run.yaml", *options, **environment)
        told = [line for line in done.stderr.splitlines(True) if "warning: model.path: " not in line]
        return replace(done, stderr="".join(told))

    return submit


def test_a_script_asks_slurm_for_what_is_asked_and_tells_the_job_the_rest(tmp_path, run):
    options = (
        "--nodes",
        "4",
        "--gpus",
        "h100:8",
        "--time",
        "1-12:00:00",
        "--sbatch",
        "--account=a b",
        "--tls",
    )
    options += ("--set", "steps=5", "--timeout", "900", "--requeue-at-limit", "--dry-run")
    spec = {"trainer": {"ranks": 32}, "rollout": {"instances": 32}}
    told = run(spec, *options)
    assert told.returncode == 0 and told.stderr == "", told
    lines = told.stdout.splitlines()
    assert [line for line in lines if line.startswith("#SBATCH ")] == [
        *("#SBATCH --job-name=headrace", "#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=1"),
        *(
            "#SBATCH --gpus-per-node=h100:8",
            "#SBATCH --exclusive",
            "#SBATCH --time=1-12:00:00",
            "#SBATCH --requeue",
        ),
        *("#SBATCH --open-mode=append", f"#SBATCH --output={tmp_path}/headrace-%j.out"),
        *("#SBATCH --signal=B:USR1@180", "#SBATCH --account='a b'"),
    ]
    command = shlex.split(lines[-1])
    assert command[:6] == ["exec", sys.executable, "-m", "headrace_cli", "slurm", "job"]
    assert command[6:] == [
        *(str(tmp_path / "run.yaml"), "--set", "steps=5", "--tls", "--timeout", "900", "--requeue-at-limit")
    ]


def test_the_job_reads_what_the_script_tells_it(tmp_path, monkeypatch):
    options = JobOptions(
        "where it/is", 2, 1, 3, 0, "vllm", "megatron", "web", "cpu:0", "ib0", 8480, True, 5.0, True
    )
    script = render(Asked(cpus=4, array="0-3"), options, tmp_path / "a 'b'.yaml", ["x=[1, 2]"], tmp_path)
    words = shlex.split(script.splitlines()[-1])[5:]
    told = []
    monkeypatch.setattr("headrace_clusters.slurm.batch.run_job", lambda *given: told.append(given) or 0)
    assert CliRunner().invoke(commands.app, words).exit_code == 0
    assert told == [(tmp_path / "a 'b'.yaml", ["x=[1, 2]"], options)]
    assert "--exclusive" not in script and "--cpus-per-task=4" in script and "headrace-%A_%a.out" in script
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    if shutil.which("shellcheck"):
        linted = subprocess.run(
            ["shellcheck", "-"], input=script, text=True, capture_output=True, check=False
        )
        assert linted.returncode == 0, linted.stdout


def test_a_signal_before_the_job_listens_does_not_end_its_script(tmp_path):
    script = render(Asked(), JobOptions(), tmp_path / "run.yaml", [], tmp_path)
    begun = script[: script.index("exec ")] + "kill -USR1 $$; echo goes on"
    assert (
        subprocess.run(["bash", "-c", begun], capture_output=True, text=True, check=False).stdout
        == "goes on\n"
    )


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        ({"steps": "many"}, (), "steps"),
        ({"stpes": 3}, (), "stpes"),
        ({}, ("--gpus", "eight"), "--gpus: 'eight' is not understood; write such as 8, h100:8 or 0"),
        ({}, ("--time", "soon"), "--time: 'soon' is not understood; write such as 12:00:00"),
        (
            {},
            ("--time", "3"),
            "--time: 3 is not longer than the 180 s in which the job saves its run and ends",
        ),
        (
            {},
            ("--sbatch", "account=a"),
            "--sbatch: 'account=a' is no option of sbatch; write such as --sbatch --acc",
        ),
        (
            {"trainer": {"ranks": 4}},
            ("--gpus", "2"),
            "trainer.ranks: the run takes 4, and 1 nodes with 2 GPUs each have 2 trainers; ask for more nodes or GPUs",
        ),
        (
            {"rollout": {"instances": 4}},
            ("--gpus", "3", "--nodes", "2", "--rollout", "1"),
            "rollout.instances: the run takes 4, and 2 nodes with 3 GPUs each have 2 rollouts",
        ),
    ],
)
def test_what_could_not_run_is_refused_with_its_key_before_anything_is_submitted(run, changes, options, told):
    done = run(changes, *options, "--dry-run")
    assert done.returncode == 2 and done.stdout == ""
    assert told in done.stderr, done.stderr


def test_a_run_that_leaves_gpus_idle_is_told_of(run):
    done = run({}, "--nodes", "2", "--gpus", "8", "--dry-run")
    assert (
        "warning: the run uses 1 of the job's 16 GPUs: trainer.ranks is 1, rollout.instances 1" in done.stderr
    )


def test_a_machine_without_slurm_says_so(run, tmp_path):
    done = run({}, PATH=str(tmp_path))
    assert done.returncode == 2
    assert "there is no sinfo in the PATH of this machine; run it where Slurm's commands are" in done.stderr


SINFO = "work*|2|64|gpu:h100:8(S:0-1)|2-00:00:00\nwork*|6|32|(null)|2-00:00:00\nold|4|16|gpu:v100:2,gpu:t4:1|infinite"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ("--partition", "wrk"),
            "--partition: 'wrk' is no partition of this cluster; write one of: work, old",
        ),
        (
            ("--nodes", "3", "--gpus", "8"),
            "--nodes: 3 nodes with 8 GPUs each are asked for, and work has 2 (2 with 8 h100 GPUs and 64 CPUs; 6 with "
            "no GPU and 32 CPUs); ask for fewer, or name another --partition",
        ),
        (("--gpus", "v100:8"), "--gpus: 1 nodes with v100:8 GPUs each are asked for, and work has 0"),
        (
            ("--partition", "old", "--gpus", "4"),
            "--gpus: 1 nodes with 4 GPUs each are asked for, and old has 0",
        ),
        (("--cpus", "65"), "--nodes: 1 nodes with 65 CPUs each are asked for, and work has 0"),
        (("--time", "3-0"), "--time: 3-0 is longer than the 48 hours that work allows"),
        (("--partition", "old", "--nodes", "4", "--gpus", "3"), ""),
    ],
)
def test_a_cluster_that_is_too_small_is_told_of_before_the_job_waits_for_ever(run, tmp_path, options, told):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {
        "sinfo": f"cat <<'END'\n{SINFO}\nEND",
        "sbatch": "cat >script; echo '12;cluster'",
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    done = run({}, *options, "--no-watch", PATH=f"{tools}:/usr/bin:/bin")
    assert told in done.stderr, done.stderr
    assert (tmp_path / "script").exists() is not told
    assert done.returncode == (2 if told else 0)
    if not told:
        assert f"job 12; log: {tmp_path}/headrace-12.out; files: {tmp_path}/headrace-12" in done.stdout


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "sbatch: error: Munge decode failed: Rewound credential\nsbatch: error: Protocol authentication error",
            "clocks: sbatch: Munge decode failed: Rewound credential; Protocol authentication error; the clocks of "
            "this machine and of Slurm's controller may be minutes apart; set both by NTP",
        ),
        (
            "sbatch: error: Unable to contact slurm controller (connect failure)",
            "Slurm's controller does not answer",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            "--sbatch: sbatch: Batch job submission failed: Invalid account",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            "--nodes: sbatch: Batch job submission failed: Requested node configuration is not available; ask for what",
        ),
    ],
)
def test_what_sbatch_says_becomes_one_sentence_with_a_fix(run, tmp_path, said, told):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {
        "sinfo": f"cat <<'END'\n{SINFO}\nEND",
        "sbatch": f"cat >&2 <<'END'\n{said}\nEND\nexit 1",
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    done = run({}, PATH=f"{tools}:/usr/bin:/bin")
    assert done.returncode in (1, 2) and told in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1, "one sentence"
