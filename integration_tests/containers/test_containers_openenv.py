"""Servers of OpenEnv by their image: each environment has one in a container, which is reached from inside."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import websockets
from containers.brokers import BrokerProcess
from containers.test_containers_run import example
from harness.ledger import audit
from harness.waiting import wait_for
from headrace.client import HeadraceError
from headrace_containers.backend import Containers
from headrace_containers.client import BROKER_VARIABLE
from headrace_environments.servers import ServerLost
from headrace_simulator.backends.base import BackendError

SERVER = Path(__file__).with_name("openenv_server.py")
IMAGE = "headrace-test-openenv:latest"
DOCKERFILE = """FROM python:3.11-slim
COPY . /app
WORKDIR /app
ENTRYPOINT ["python3", "openenv_server.py"]
CMD ["8000"]
"""


@pytest.fixture(scope="module")
def image(engine: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image whose own command is a server of OpenEnv, as those of OpenEnv are."""
    folder = tmp_path_factory.mktemp("image")
    (folder / "Dockerfile").write_text(DOCKERFILE)
    shutil.copy(SERVER, folder)
    shutil.copytree(
        Path(websockets.__file__).parent,
        folder / "websockets",
        ignore=shutil.ignore_patterns("*.so", "*.pyc"),
    )
    subprocess.run(["docker", "build", "-q", "-t", IMAGE, str(folder)], check=True, timeout=120)
    return IMAGE


@pytest.fixture
def options(image: str, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv(BROKER_VARIABLE, str(broker.folder))
    limits = {"memory_mib": 256, "processes": 64, "disk_mib": 32}
    return {"image": image, "provider_options": {"pull": "never"}, "limits": limits}


def made(options: dict[str, Any]) -> Any:
    return Containers().converse("openenv", options)


def said(environment: Any, text: str) -> tuple[Any, float, bool]:
    messages, reward, done = environment.step({"role": "assistant", "content": text})
    return [each["content"] for each in messages], reward, done


def pids_of(broker: BrokerProcess) -> list[str]:
    """Process ids, on this host, of the servers in a broker's containers."""
    found = []
    for each in broker.containers():
        top = subprocess.run(
            ["docker", "top", each, "-eo", "pid,args"], capture_output=True, text=True, timeout=60
        )
        found += [
            line.split()[0]
            for line in top.stdout.splitlines()
            if "python3 openenv_server.py" in line and "/bin/sh" not in line
        ]
    return found


def test_each_environment_has_a_server_of_the_image_over_its_episodes(options, broker):
    environments = [made(options), made(options)]
    servers = pids_of(broker)
    assert len(servers) == 2
    for each, right in zip(environments, "12", strict=True):
        each._options = each._options.model_copy(update={"reset": {"right": right}})
        messages, tools = each.reset(3, {})
        assert ([message["content"] for message in messages], tools) == (["?"], [])
    assert said(environments[0], "who") == (["1000 /app"], 0.0, False), "as the user, where the image says"
    ((long,), _, _) = said(environments[0], "long")
    assert len(long) == 400_002, "a stream has no limit of an exec's output"
    assert said(environments[1], "1") == (["no"], 0.0, False)
    assert said(environments[0], "1") == ([], 1.0, True)
    assert said(environments[1], "2") == ([], 1.0, True)
    environments[0].reset(4, {})
    assert sorted(pids_of(broker)) == sorted(servers), "the next episode is in the same container"
    del environments, each
    wait_for(lambda: not broker.containers(), "containers to end with their environments")


def test_a_server_or_a_container_that_is_lost_costs_its_episode_and_the_next_one_has_another(options, broker):
    environment = made(options)
    environment.reset(0, {})
    with pytest.raises(ServerLost, match=f"{IMAGE} is gone"):
        said(environment, "exit")
    environment.reset(1, {})
    assert said(environment, "who")[0] == ["1000 /app"]
    (before,) = pids_of(broker)
    subprocess.run(["docker", "kill", *broker.containers()], check=True, capture_output=True, timeout=60)
    with pytest.raises(ServerLost, match=f"{IMAGE} is gone"):
        said(environment, "who")
    environment.reset(2, {})
    assert said(environment, "who")[0] == ["1000 /app"] and pids_of(broker) != [before]


def test_a_container_whose_time_is_half_over_is_replaced_as_an_episode_begins(options, broker):
    environment = made({**options, "limits": {**options["limits"], "wall_s": 40.0}})
    (before,) = pids_of(broker)
    environment._own._started -= 21.0
    environment.reset(0, {})
    (after,) = pids_of(broker)
    assert after != before and said(environment, "who")[0] == ["1000 /app"]


def test_a_killed_broker_leaves_no_container(options, broker):
    environment = made(options)
    environment.reset(0, {})
    assert len(broker.containers()) >= 2, "the server's and its relay"
    broker.kill()
    with pytest.raises(ServerLost):
        said(environment, "who")
    wait_for(lambda: not broker.containers(), "containers to be removed")


def test_a_run_in_servers_of_an_image(image, fleet, one_simulator, tiny_model):
    options = {
        "image": image,
        "provider_options": {"pull": "never"},
        "limits": {"memory_mib": 256, "disk_mib": 32},
        "reset": {"right": "a"},
    }
    spec = example(tiny_model)
    spec["environment"] |= {"tasks": ["openenv"], "options": options, "max_episode_steps": 2}
    spec["environment"] |= {"count": 2, "processes": 2}
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert len(found.trained) + len(found.dropped) == 2 * 2 * 4
    talks = fleet.client.trajectories(run.id, limit=100)
    wrong = [talk for talk in talks if talk.reward == 0]
    assert wrong and all("no" in talk.completion for talk in wrong), "each read what its server answered"
    with pytest.raises(HeadraceError) as caught:
        fleet.submit(
            {**spec, "environment": {**spec["environment"], "options": {**options, "image": "none:7"}}}
        )
    (problem,) = caught.value.problems
    assert problem.key == "environment.options.image" and "none:7" in problem.problem


FAILS = ["python3", "-c", "raise SystemExit('no game')"]
PAGES = ["python3", "-m", "http.server", "8000"]
NO_PYTHON = {"command": ["/bin/true"], "env": {"PATH": "/nowhere"}}


@pytest.mark.parametrize(
    ("changed", "key", "words"),
    [
        ({"image": "no-such-image:7"}, "image", ["has no image no-such-image:7"]),
        ({"image": ""}, "image", ["give an image of OpenEnv"]),
        ({"start_s": 2.0, "port": 8001}, "image", ["its port 8001 within 2 s", "`start_s`", "serving"]),
        ({"command": FAILS}, "image", ["its server has ended", "no game", "exit code 1"]),
        ({"command": PAGES}, "image", ["is no server of OpenEnv", "HTML", "name an image of OpenEnv"]),
        (NO_PYTHON, "image", ["has no python3"]),
        ({"prot": 1}, "prot", ["port"]),
        ({"network": {"allow": ["http://x/"]}}, "network.allow", ["HOST:PORT"]),
    ],
)
def test_what_is_wrong_is_named_by_its_key(options, broker, changed, key, words):
    with pytest.raises(BackendError) as caught:
        made(options | changed)
    assert caught.value.field == f"options_json.{key}"
    assert all(each in caught.value.message for each in words), caught.value.message
    wait_for(lambda: not broker.containers(), "its container to end")
