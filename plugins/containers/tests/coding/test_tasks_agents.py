"""Agents on tasks: the model itself by a shell and an edit tool, and commands that others wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from headrace_containers.provider import ContainerLost, EngineLost
from headrace_containers.tasks.agents import TaskAgent, filled
from headrace_containers.tasks.coding import Coding
from headrace_containers.tasks.options import AgentOptions, CodingOptions
from headrace_containers.tasks.proving import prove, write_proofs
from headrace_containers.tasks.reading import TaskSet
from headrace_containers.tasks.shim import Shim
from headrace_simulator.backends.base import BackendError
from headrace_simulator.backends.conversation.calls import ServiceLost
from scripted import scripted

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "coding"


def call(name, **arguments):
    return {
        "role": "assistant",
        "content": f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>",
    }


def item(folder, name="words"):
    return {"metadata": {"name": name, "digest": TaskSet.at(folder).read(name).digest}}


@pytest.fixture
def folder(making, tmp_path):
    making.make(tmp_path / "tasks", only=("words",))
    return tmp_path / "tasks"


@pytest.fixture
def shell(start, folder):
    made = Coding(CodingOptions(path=folder, turns=4, most_characters=300), start)
    yield made
    made.close()


def test_a_model_solves_a_task_with_a_shell_and_an_edit(shell, folder):
    messages, tools = shell.reset(1, item(folder))
    assert messages[-1]["content"].startswith("The repository in /app has a fault")
    assert [each["function"]["name"] for each in tools] == ["bash", "edit"]
    assert tools[0]["function"]["parameters"]["required"] == ["command"]
    told, reward, done = shell.step(call("bash", command="pwd; id -u; cat words.py; exit 3"))
    assert (reward, done) == (0.0, False) and told[0]["role"] == "tool" and told[0]["name"] == "bash"
    assert told[0]["content"].startswith("/app\n1000\ndef count(text)") and told[0]["content"].endswith(
        "(exit code 3)"
    )
    told, *_ = shell.step(call("edit", path="words.py", old='split(" ")', new="split()"))
    assert told[0]["content"] == "words.py is changed"
    assert shell.step({"role": "assistant", "content": "It is done."}) == ([], 1.0, True, {"success": True})


def test_the_last_turn_is_judged_and_a_new_task_begins_anew(shell, folder):
    shell.reset(1, item(folder))
    for _ in range(3):
        assert shell.step(call("bash", command="sed -i 's/split(\" \")/split()/' words.py"))[2] is False
    told, reward, done, info = shell.step(call("bash", command="true"))
    assert told and (reward, done, info["success"]) == (1.0, True, True), "its fourth turn"
    shell.reset(1, item(folder))
    assert shell.step({"role": "assistant", "content": "Nothing to do."})[1] == 0.0


def test_what_is_wrong_with_a_call_is_told_to_the_model(shell, folder):
    shell.reset(1, item(folder))
    told, *_ = shell.step(call("edit", path="words.py", old="t", new="x"))
    assert "has the old text 7 times; give one that it has once" in told[0]["content"], told
    told, *_ = shell.step(call("edit", path="/etc/shadow", old="root", new="x"))
    assert told[0]["content"].startswith("error: /etc/shadow cannot be read")
    told, *_ = shell.step(call("bash", command="seq 100000"))
    assert "characters are left out" in told[0]["content"] and len(told[0]["content"]) < 400


def test_a_command_that_does_not_end_is_killed(start, folder):
    shell = Coding(CodingOptions(path=folder, deadline_s=1.0), start)
    shell.reset(1, item(folder))
    told, _, done = shell.step(call("bash", command="echo begun; sleep 600"))
    assert "begun\n(killed after 1 s)" in told[0]["content"].replace("\n\n", "\n") and not done
    shell.close()


def test_a_turn_is_a_line_for_the_shell(start, folder):
    shell = Coding(CodingOptions(path=folder, parser="line", turns=1), start)
    messages, tools = shell.reset(1, item(folder))
    assert not tools and messages[0]["role"] == "user"
    told, reward, done, _ = shell.step(
        {"role": "assistant", "content": "sed -i 's/split(\" \")/split()/' words.py; echo 1"}
    )
    assert (told[0]["content"], reward, done) == ("1\n", 1.0, True)


class Ends:
    def __init__(self, error):
        self._error = error

    def exec(self, *given, **more):
        raise self._error

    def close(self):
        pass


def test_a_container_that_an_agent_loses_is_its_fault_and_an_engine_is_not(shell, folder):
    shell.reset(1, item(folder))
    shell._container.close()
    shell._container = Ends(ContainerLost("its memory was full"))
    shell._tools["bash"]._function.__self__._container = shell._container
    _, reward, done, info = shell.step(call("bash", command="true"))
    assert (reward, done, info) == (0.0, True, {"success": False})
    shell.reset(1, item(folder))
    shell._container.close()
    shell._tools["bash"]._function.__self__._container = Ends(EngineLost("the engine is gone"))
    with pytest.raises(ServiceLost, match="the engine is gone"):
        shell.step(call("bash", command="true"))


def test_tasks_that_differ_from_the_coordinators_are_named(start, folder, tmp_path):
    shell = Coding(CodingOptions(path=folder), start)
    given = {"metadata": {"name": "words", "digest": "another"}}
    with pytest.raises(BackendError, match="give both the same files") as caught:
        shell.reset(1, given)
    assert caught.value.field == "options_json.path"
    with pytest.raises(BackendError, match="there is no"):
        Coding(CodingOptions(path=tmp_path / "nowhere"), start)


def test_docker_of_an_agent_on_this_host_leads_into_the_container(start, folder):
    from headrace_containers.tasks.verifying import begin

    container = begin(start, TaskSet.at(folder).read("words"))
    with Shim(container, "/app") as shim:
        docker = shim.variables["MSWEA_DOCKER_EXECUTABLE"]

        def run(*command, stdin=b""):
            return subprocess.run([docker, *command], input=stdin, capture_output=True, env={})

        made = (
            run("run", "-d", "--name", "x", "-w", "/", "--rm", "any", "sleep", "2h").stdout.decode().strip()
        )
        ran = run("exec", "-w", "/app/tests", "-e", "A=b c", made, "bash", "-lc", 'pwd; echo "$A"; exit 5')
        assert (ran.stdout, ran.returncode) == (b"/app/tests\nb c\n", 5)
        assert run("exec", "-i", made, "cat", stdin=b"given").stdout == b"given"
        assert run("stop", made).returncode == 0
        ran = run("build", ".")
        assert ran.returncode == 1 and b"takes run and exec alone" in ran.stderr
    assert not shim.folder.exists()
    container.close()


AGENT = """
import os, subprocess, sys
docker = os.environ["MSWEA_DOCKER_EXECUTABLE"]
box = subprocess.run([docker, "run", "-d", "image", "sleep", "1"], capture_output=True, text=True).stdout.strip()
assert sys.argv[1].startswith("The repository"), sys.argv
assert os.environ["OPENAI_API_KEY"] == "sk-1"
change = "sed -i 's/split(\\" \\")/split()/' words.py"
subprocess.run([docker, "exec", "-w", sys.argv[2], box, "sh", "-c", change], check=True)
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def playing(monkeypatch):
    """What an agent's function returns in a fork, where its session's variables are."""

    def play(start, options, given):
        agent = TaskAgent(options, start)
        for name, text in {
            "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
            "OPENAI_API_KEY": "sk-1",
            "HEADRACE_ENDPOINT": "127.0.0.1:9",
        }.items():
            monkeypatch.setenv(name, text)
        return agent.called(1, given)

    return play


def test_a_command_on_the_host_is_judged_however_it_ends(start, folder, tmp_path, playing):
    (tmp_path / "agent.py").write_text(AGENT)
    for code in ("0", "1"):
        command = [sys.executable, str(tmp_path / "agent.py"), "{instruction}", "{workdir}", code]
        options = AgentOptions(path=folder, command=command, runs="host")
        assert playing(start, options, item(folder)) == {"reward": 1.0, "success": True}
    lazy = AgentOptions(path=folder, command=["true"], runs="host")
    assert playing(start, lazy, item(folder)) == {"reward": 0.0, "success": False}
    missing = AgentOptions(path=folder, command=["no-such-agent"], runs="host")
    with pytest.raises(RuntimeError, match="no-such-agent cannot be run"):
        playing(start, missing, item(folder))


def test_a_command_in_the_container_finds_the_sessions_endpoint(start, folder, playing, monkeypatch):
    """Its address there, its key, and what is to be done; nothing else of this process."""
    monkeypatch.setenv("SECRET_OF_THE_SERVICE", "hidden")
    seen = []

    def watched(spec):
        seen.append(spec)
        return start(spec)

    script = """
        test "$OPENAI_BASE_URL" = http://127.0.0.1:3129/v1 && test "$OPENAI_API_KEY" = sk-1 &&
        test -z "$SECRET_OF_THE_SERVICE" && test "$KEY" = value && test "$HEADRACE_TASK" = words &&
        sed -i 's/split(" ")/split()/' words.py
    """
    options = AgentOptions(path=folder, command=["sh", "-c", script], variables={"KEY": "value"}, cpus=2)
    assert playing(watched, options, item(folder)) == {"reward": 1.0, "success": True}
    assert [each.network.endpoint for each in seen] == ["127.0.0.1:9", ""], "the tests reach nothing"
    assert {each.limits.cpus for each in seen} == {2.0}
    broken = AgentOptions(path=folder, command=["no-such-agent"])
    with pytest.raises(RuntimeError, match="no-such-agent cannot be run"):
        playing(start, broken, item(folder))


MINI = Path(__file__).resolve().parents[4] / ".envs" / "mini" / "bin" / "mini"


@pytest.mark.nightly  # quick: the command on the host above, which uses the same `docker`
def test_mini_swe_agent_solves_a_task_as_it_is(start, folder, monkeypatch):
    """Unmodified, with the command of examples/coding/mini.yaml and a policy that knows the answer."""
    if not MINI.exists():
        pytest.skip("there is no .envs/mini: `bash ci/agents.sh` makes it")
    spec = yaml.safe_load((EXAMPLES / "mini.yaml").read_text())
    command = [str(MINI), *spec["agent"]["command"][1:]]
    says = [
        "cat words.py",
        "sed -i 's/split(\" \")/split()/' words.py",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]
    agent = TaskAgent(
        AgentOptions(**spec["environment"]["options"] | {"path": folder, "command": command}), start
    )
    with scripted(says) as (url, asked):
        for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
            monkeypatch.setenv(name, url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
        assert agent.called(1, item(folder)) == {"reward": 1.0, "success": True}
    first, last = asked[0]["messages"], asked[-1]["messages"]
    assert "The repository in /app has a fault" in first[-1]["content"] and len(asked) == 3
    assert "def count(text)" in last[3]["content"], "its commands ran in the task's container"


def test_places_of_a_command(folder):
    task = TaskSet.at(folder).read("words")
    assert filled(["a", "{instruction}", "--cwd={workdir}", "{task}"], task) == [
        "a",
        task.instruction,
        "--cwd=/app",
        "words",
    ]


def test_the_source_gives_proven_tasks_alone(start, folder):
    from headrace_containers.sources import Harbor
    from headrace_schema.problems import Impossible

    with pytest.raises(Impossible) as caught:
        list(Harbor(path=str(folder)).items())
    (problem,) = caught.value.problems
    assert problem.key == "data.options.path" and problem.problem.startswith("words: nothing has shown")
    assert "headrace tasks prove" in problem.fix and "data.options.exclude" in problem.fix
    left = Harbor(path=str(folder), unproven="leave_out")
    assert not list(left.items()) and left.left_out() == {"nothing has shown that its tests can tell": 1}
    assert len(list(Harbor(path=str(folder), unproven="allow").items())) == 1

    (folder / "words" / "tests" / "test.sh").write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    task = TaskSet.at(folder).read("words")
    write_proofs(folder, {"words": prove(start, task)})
    with pytest.raises(Impossible, match="words: its tests give 1 to an agent that does nothing"):
        list(Harbor(path=str(folder)).items())

    (folder / "words" / "tests" / "test.sh").write_text("#!/bin/sh\nexec python3 -I /tests/check.py\n")
    task = TaskSet.at(folder).read("words")
    write_proofs(folder, {"words": prove(start, task)})
    source = Harbor(path=str(folder))
    (found,) = source.items()
    assert (found.question, found.id) == (task.instruction, "words")
    assert found.metadata == {"name": "words", "digest": task.digest}
    with pytest.raises(Impossible, match="there is no task sentences"):
        list(Harbor(path=str(folder), exclude=["sentences"]).items())
