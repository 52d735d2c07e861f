"""The task `shell`: what the model is told, what a check sees, and that it is out of the model's reach."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from containers.brokers import BrokerProcess
from harness.waiting import wait_for
from headrace_containers.backend import Containers
from headrace_containers.client import BROKER_VARIABLE
from headrace_containers.shell import Shell
from headrace_simulator.backends.base import BackendError
from headrace_simulator.backends.conversation.calls import ServiceLost

ITEM = {"question": "What is six times seven?", "answer": "42"}


@pytest.fixture
def options(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of a small container, by the broker of this test."""
    monkeypatch.setenv(BROKER_VARIABLE, str(broker.folder))
    limits = {"memory_mib": 256, "processes": 64, "disk_mib": 32}
    return {"image": "python:3.11-slim", "provider_options": {"pull": "never"}, "warm": 0, "limits": limits}


def made(options: dict[str, Any]) -> Shell:
    shell = Containers().converse("shell", options)
    assert isinstance(shell, Shell)
    return shell


def called(name: str, **arguments: str) -> dict[str, str]:
    text = json.dumps({"name": name, "arguments": arguments})
    return {"role": "assistant", "content": f"<tool_call>\n{text}\n</tool_call>"}


def test_the_model_works_in_a_container_and_a_check_that_it_cannot_see_rewards_it(options, broker, tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "task.txt").write_text("write the answer to answer.txt\n")
    (tmp_path / "grading").mkdir()
    (tmp_path / "grading" / "grade.py").write_text(
        "import os, pathlib\n"
        "right = pathlib.Path('answer.txt').read_text().strip() == os.environ['ANSWER']\n"
        "pathlib.Path('/checks/reward').write_text('0.75' if right and 'done' in os.environ['COMPLETION'] else '0')\n"
    )
    shell = made(
        options
        | {
            "tools": ["bash", "read_file", "write_file"],
            "files": str(tmp_path / "project"),
            "setup": "echo ready > setup.txt",
            "check": "cd /workspace && python3 -P /checks/grade.py",
            "check_files": str(tmp_path / "grading"),
            "system": "Work.",
        }
    )
    messages, tools = shell.reset(0, ITEM)
    assert [each["content"] for each in messages] == ["Work.", ITEM["question"]]
    assert [each["function"]["name"] for each in tools] == ["bash", "read_file", "write_file"]

    def told(message: dict[str, str]) -> str:
        ((answer,), reward, done, _) = shell.step(message)
        assert answer["role"] == "tool" and (reward, done) == (0.0, False)
        return str(answer["content"])

    assert told(called("bash", command="cat task.txt setup.txt; id -u; exit 3")) == (
        "write the answer to answer.txt\nready\n1000\n[exit code 3]"
    )
    assert told(called("write_file", path="answer.txt", content="42")) == "answer.txt has 2 characters"
    assert told(called("read_file", path="answer.txt")) == "42"
    assert "there is no /workspace/nothing" in told(called("read_file", path="nothing"))
    assert "ls: cannot access '/checks'" in told(called("bash", command="ls /checks; mkdir /checks"))
    # What it leaves running is ended before the check, and cannot change the answer meanwhile.
    told(
        called(
            "bash",
            command="(while :; do echo 41 > answer.txt; done) & sleep 0.2; kill $!; echo 42 > answer.txt; echo ok",
        )
    )
    assert "ANSWER" not in told(called("bash", command="env")), (
        "the right answer is no variable of its commands"
    )
    messages, reward, done, info = shell.step({"role": "assistant", "content": "done"})
    assert (messages, reward, done, info) == ([], 0.75, True, {"success": False})
    wait_for(lambda: not broker.containers(), "its container to end with the episode")

    shell.reset(1, ITEM)
    _, reward, _, _ = shell.step({"role": "assistant", "content": "done"})
    assert reward == 0.0, "a new episode begins without what the last one wrote"


def test_an_exit_code_is_a_reward_where_nothing_is_written(options):
    for check, reward in (('[ "$COMPLETION" = right ]', 1.0), ("exit 3", 0.0), ("sleep 600", 0.0)):
        shell = made(options | {"check": check, "check_s": 3})
        shell.reset(0, ITEM)
        assert shell.step({"role": "assistant", "content": "right"})[1:] == (
            reward,
            True,
            {"success": reward == 1},
        )
    shell = made(options)
    shell.reset(0, ITEM)
    assert shell.step({"role": "assistant", "content": "right"})[1:] == (0.0, True, {}), "scorers judge"


def test_a_command_that_takes_too_long_is_told_and_the_next_one_runs(options):
    shell = made(options | {"command_s": 5.0})
    shell.reset(0, ITEM)
    (late,), *_ = shell.step(called("bash", command="sleep 60"))
    assert "was stopped" in late["content"]
    (answer,), *_ = shell.step(called("bash", command="echo on; head -c 100000 /dev/zero | tr '\\0' x"))
    assert answer["content"].startswith("on\nxxx") and len(answer["content"]) < 9000


def test_a_container_that_is_lost_ends_its_episode_by_name(options, broker):
    shell = made(options)
    shell.reset(0, ITEM)
    subprocess.run(["docker", "kill", *broker.containers()], check=True, capture_output=True, timeout=60)
    with pytest.raises(ServiceLost):
        shell.step(called("bash", command="ls"))
    shell.reset(1, ITEM)
    (answer,), *_ = shell.step(called("bash", command="echo anew"))
    assert answer["content"].startswith("anew")


@pytest.mark.parametrize(
    ("changed", "key", "said"),
    [
        ({"image": "no-such-image:7"}, "options_json.image", "no-such-image:7"),
        ({"image": ""}, "options_json.image", "give an image"),
        ({"build": "/no/such/folder", "image": ""}, "options_json.build", "/no/such/folder/Dockerfile"),
        ({"files": "/no/such/folder"}, "options_json.files", "/no/such/folder"),
        ({"tools": ["bsh"]}, "options_json.tools", "did you mean 'bash'"),
        ({"limits": {"memory_mb": 1}}, "options_json.limits.memory_mb", "memory_mib"),
        ({"provider": "dokcer"}, "options_json.provider", "docker"),
        ({"provider_options": {"pul": "never"}}, "options_json.provider_options.pul", "pull"),
        ({"setup": "echo broken >&2; exit 4"}, "options_json.setup", "exit code 4: broken"),
        ({"network": {"allow": ["http://x/"]}}, "options_json.network.allow", "HOST:PORT"),
        ({"user": "nobody-of-that-name"}, "options_json.user", "nobody-of-that-name"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(options, changed, key, said):
    with pytest.raises(BackendError) as caught:
        made(options | changed).reset(0, ITEM)
    assert caught.value.field == key and said in caught.value.message
