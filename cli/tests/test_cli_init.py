"""`headrace init` writes specs that submission takes; `headrace doctor` says what is wrong with a machine."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest
from headrace.client import load_spec
from headrace_cli.commands.doctor import GIB, room_findings, torch_findings
from headrace_cli.commands.init import KINDS, spec_text
from headrace_schema.spec import RunSpec


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, "") for kind in KINDS),
        ("answers", "own.py:score"),
        ("examples", "lora"),
        ("preferences", "orpo"),
        ("robot", "grpo"),
    ],
)
def test_what_it_writes_is_valid_by_the_rules_of_a_submission(headrace, tmp_path, kind, how):
    file = tmp_path / "Mine 1.yaml"
    own = ["--how", how] if how else []
    if how == "own.py:score":
        (tmp_path / "own.py").write_text(
            "def score(prompt, completion, reference, metadata):\n    return 1.0\n", encoding="utf-8"
        )
    done = headrace("init", str(file), "--kind", kind, *own, "--json", HEADRACE_URL="")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["valid"] and {each["key"] for each in answer["warnings"]} <= {
        "model.path",  # the tiny model is not made here
        "data.options.path",  # nor are there pairs
    }
    spec = RunSpec.model_validate(load_spec(file))
    assert spec.name == "mine-1"
    if how:
        named = [spec.algorithm.name, *(each.name for each in spec.reward.scorers)]
        assert how in named or spec.trainer.lora is not None or str(tmp_path / how) in named


def test_a_file_that_is_there_stays_and_a_wrong_kind_is_named(headrace, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("mine", encoding="utf-8")
    done = headrace("init", str(file))
    assert done.returncode == 2 and "is there" in done.stderr and file.read_text(encoding="utf-8") == "mine"
    done = headrace("init", str(tmp_path / "new.yaml"), "--kind", "video")
    assert (
        done.returncode == 2 and "answers, examples" in done.stderr and not (tmp_path / "new.yaml").exists()
    )


def test_texts_of_users_stay_texts(tmp_path):
    text = spec_text(tmp_path / "x.yaml", "answers", "a: b", "my #rows.jsonl", "exact", 3)
    (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
    spec = load_spec(tmp_path / "x.yaml")
    assert spec["model"]["path"].endswith("a: b") and spec["data"]["options"]["path"].endswith(
        "my #rows.jsonl"
    )


def test_on_a_terminal_five_questions_are_asked(tmp_path):
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "headrace_cli", "init", str(tmp_path / "mine.yaml")]
    process = subprocess.Popen(
        command,
        stdin=follower,
        stdout=subprocess.PIPE,
        stderr=follower,
        env={**os.environ, "HEADRACE_URL": ""},
    )
    os.close(follower)
    heard, answers = b"", iter([b"2\n", b"\n", b"\n", b"lora\n", b"7\n"])
    ends = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < ends:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                heard += os.read(leader, 4096)
            except OSError:
                break
            if heard.rstrip().endswith(b"]:"):
                heard += b"answered"  # a prompt's last blank may come by itself
                os.write(leader, next(answers))
    assert process.wait(timeout=30) == 0, heard
    os.close(leader)
    spec = load_spec(tmp_path / "mine.yaml")
    assert spec["workflow"] == "supervised" and spec["steps"] == 7 and spec["trainer"]["lora"]["rank"] == 16


CPU_BUILD = {"version": "2.13.0+cpu", "cuda": None, "hip": None, "gpus": []}
CUDA_BUILD = {"version": "2.13.0", "cuda": "13.0", "hip": None, "gpus": [["H200", 140 * GIB, "9.0"]]}


def test_gpus_that_torch_cannot_use_are_a_problem():
    problems = [each for each in torch_findings(CPU_BUILD, ["GPU-1"], {"GPU-1": 140 * GIB}) if each.problem]
    assert [(each.what, each.value) for each in problems] == [("GPUs", "1: 140 GiB")]
    assert "can use 0 of them" in problems[0].problem and "install torch" in problems[0].fix
    assert not [each for each in torch_findings(CUDA_BUILD, ["GPU-1"], {}) if each.problem]
    assert not [each for each in torch_findings(CPU_BUILD, [], {}) if each.problem]
    (missing, _) = torch_findings("No module named 'torch'", [], {})
    assert missing.problem == "No module named 'torch'"


def test_too_little_room_is_a_problem(tmp_path):
    found = {each.what: each for each in room_findings(GIB, GIB // 16, 5 * GIB, tmp_path)}
    assert "--shm-size" in found["/dev/shm"].fix and "5.0 GiB free" in found["disk"].value
    assert found["disk"].problem and not found["memory"].problem
    assert not [each for each in room_findings(GIB, GIB, 10 * GIB, tmp_path) if each.problem]


def test_doctor_names_a_proxy_between_the_services_and_exits_with_one(headrace, tmp_path):
    place = ("--data-dir", str(tmp_path / "none"), "--json")
    done = headrace("doctor", *place, http_proxy="http://proxy.example:3128", no_proxy="")
    found = {each["what"]: each for each in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1 and "may go to the proxy" in found["proxies"]["problem"]
    assert found["devices"]["value"].startswith("headrace up leases ") and "torch" in found
    assert "proxy.example" not in done.stdout
    done = headrace("doctor", *place, http_proxy="http://proxy.example:3128", no_proxy="localhost,x")
    proxies = [each for each in json.loads(done.stdout)["findings"] if each["what"] == "proxies"]
    assert [each["problem"] for each in proxies] == [""]


def test_doctor_says_what_walls_users_code_gets_here_and_up_refuses_where_there_are_none(headrace, tmp_path):
    place = ["--data-dir", str(tmp_path / "fleet")]
    done = headrace("doctor", *place, "--json", HEADRACE_CONTAINED_REACH="")
    walls = {each["what"]: each["value"] for each in json.loads(done.stdout)["findings"]}["--trust contained"]
    assert "network" in walls.lower() and ("cgroup v" in walls or "no cgroup" in walls)
    done = headrace("up", *place, "--trust", "shut")
    assert done.returncode == 2 and "use open or contained" in done.stderr
    done = headrace("up", *place, "--trust", "contained", HEADRACE_CONTAINED_PROCESSES="many")
    assert done.returncode == 2 and "HEADRACE_CONTAINED_PROCESSES" in done.stderr
    own = {"HEADRACE_CONTAINED_PROCESSES": "64", "HEADRACE_CONTAINED_REACH": "https://x"}
    done = headrace("up", *place, "--trust", "contained", **own)
    assert done.returncode == 2 and "HEADRACE_CONTAINED_REACH" in done.stderr
    assert not (tmp_path / "fleet").exists()
