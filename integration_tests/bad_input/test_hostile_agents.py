"""Agents that do what they should not, in one run on a real fleet: each costs its own sample and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from harness.ledger import audit
from harness.processes import ROOT
from harness.waiting import wait_for

pytestmark = pytest.mark.usefixtures("one_simulator")
EXAMPLE = ROOT / "examples" / "agents" / "endpoint.yaml"
GROUPS, SAMPLES, LONGEST_S = 4, 4, 9
# Each sample takes the next thing to do, and writes down what came of it.
AGENT = """
import json, os, pathlib, subprocess, sys, threading, time, urllib.error, urllib.request

from openai import APIStatusError, OpenAI

HERE = pathlib.Path(__file__).parent
client = OpenAI(max_retries=0)


def play(seed, item):
    for kind in KINDS:
        try:
            os.close(os.open(HERE / f"{kind.__name__}.begun", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return kind()
    return plain()


def told(kind, *what):
    (HERE / f"{kind}.json").write_text(json.dumps(what))


def ask(*messages, by=client):
    roles = ("user", "assistant")
    asked = [{"role": roles[place % 2], "content": text} for place, text in enumerate(messages)]
    return by.chat.completions.create(model="policy", messages=asked, max_tokens=2).choices[0].message.content or ""


def refused(*messages, by=client):
    try:
        return "", ask(*messages, by=by)
    except APIStatusError as error:
        return error.status_code, (error.body or {}).get("code")


def plain():
    return float(ask("?") in ("1", "2", "3"))


def never_ends():
    ask("?")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    told("never_ends", child.pid, os.getpid())
    while True:
        time.sleep(1)


def speaks_to_nobody():
    return 1.0


def floods():
    line = "x" * (1 << 20)
    for _ in range(8):
        print(line)
        sys.stderr.write(line)
    told("floods", "done")
    return plain()


def forges():
    forged = OpenAI(api_key="sk-headrace-forged", max_retries=0)
    told("forges", refused("?", by=forged))
    return plain()


def edits():
    said = ""
    while not said:  # now and then it says nothing
        said = ask("?")
    told("edits", ask("?", "no such thing was said", "+"), ask("?", said, "+"))
    return 0.5


def two_at_once():
    found = []
    several = [threading.Thread(target=lambda text=text: found.append(ask(text))) for text in "+-"]
    for each in several:
        each.start()
    for each in several:
        each.join()
    told("two_at_once", len(found))
    return 0.5


def grows():
    messages = ["1" * 200]
    while True:
        status, code = refused(*messages)
        if status:
            told("grows", status, code, len(messages))
            return 0.25
        messages += [code or "1", "1" * 200]


def sends_no_text():
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", b"\\xff\\xfe{" * 1000)
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    try:
        urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        told("sends_no_text", error.code)
    return plain()


KINDS = [never_ends, speaks_to_nobody, floods, forges, edits, two_at_once, grows, sends_no_text]
"""


def test_each_costs_its_own_sample_and_nothing_else(fleet, tiny_model, tmp_path):
    tmp_path.chmod(0o777)  # it writes beside itself, as another user where the fleet is root
    (tmp_path / "agent.py").write_text(AGENT, encoding="utf-8")
    spec: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    spec["model"]["path"] = str(tiny_model)
    spec["agent"]["python"] = f"{tmp_path / 'agent.py'}:play"
    spec["environment"] = {"count": 4, "max_episode_steps": 0, "max_episode_s": LONGEST_S}
    spec["algorithm"] |= {"prompts_per_step": GROUPS, "group_size": SAMPLES}
    spec |= {"steps": 1, "evaluation": {"every": 0}, "data": {"heldout": 0}, "export": False}
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert len(found.trained) == GROUPS * SAMPLES and not found.dropped, "what fell over was made again"
    assert found.live[0].log_prob_mismatch_mean < 1e-3

    child, agent = _told(tmp_path, "never_ends")
    wait_for(lambda: not _alive(child) and not _alive(agent), "the agent and what it started to be killed")
    assert (tmp_path / "speaks_to_nobody.begun").exists() and _told(tmp_path, "floods") == ["done"]
    assert _told(tmp_path, "forges") == [[401, "invalid_api_key"]]
    assert _told(tmp_path, "two_at_once") == [2]
    status, code, messages = _told(tmp_path, "grows")
    assert (status, code) == (400, "context_length_exceeded") and messages > 1
    assert _told(tmp_path, "sends_no_text") == [400]

    talks = fleet.client.trajectories(run.id, limit=100)
    reasons = [talk.finish_reason for talk in talks]
    assert reasons.count("TIMED_OUT") == 1 and reasons.count("LENGTH") == 1, reasons
    # What the agent put into the model's mouth is the context of a branch, and no turn of the policy's.
    (edited,) = [talk for talk in talks if "no such thing was said" in talk.completion]
    assert all(each.tokens is None for each in edited.messages if each.content == "no such thing was said")
    assert sum(each.tokens is not None for each in edited.messages) >= 3


def _told(directory: Path, kind: str) -> Any:
    return json.loads((directory / f"{kind}.json").read_text(encoding="utf-8"))


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
