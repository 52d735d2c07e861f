"""The scaler's adapter for Docker against a real engine, on a small compose project of its own."""

import subprocess

import pytest
from harness.processes import clean_environment
from harness.waiting import wait_for
from headrace_servicekit.scaling.orchestrators import Docker

PROJECT = "headrace-scaled"
COMPOSE = """
name: headrace-scaled
services:
  rollout:
    image: python:3.11-slim
    pull_policy: never
    command: [sleep, "1000"]
    init: true
    read_only: true
    environment: {HEADRACE_COORDINATOR: "coordinator:8471"}
    networks: [fleet]
    volumes: ["weights:/weights"]
    deploy: {resources: {limits: {memory: 64m}}}
networks: {fleet: {internal: true}}
volumes: {weights: {}}
"""


@pytest.fixture
def compose(engine, tmp_path):
    """`compose(argument, …)`: output of `docker compose …` on the project, which is up."""
    file = tmp_path / "compose.yaml"
    file.write_text(COMPOSE)

    def call(*arguments):
        command = ["docker", "compose", "-f", str(file), *arguments]
        done = subprocess.run(
            command,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    call("up", "-d")
    yield call
    call("down", "--volumes", "--timeout", "1")


def test_containers_are_made_like_the_first_one_and_compose_knows_them(compose):
    docker = Docker(PROJECT, ("rollout", "reward"))
    assert docker.kinds == ("rollout", "reward")
    assert docker.scale("rollout", 3) == ""
    ids = compose("ps", "-q", "rollout").split()
    assert len(ids) == 3
    made = [docker._client.containers.get(each) for each in ids]
    assert {each.attrs["Config"]["Hostname"] for each in made} == {each.short_id for each in made}
    for each in made:
        host = each.attrs["HostConfig"]
        assert host["ReadonlyRootfs"] and host["Memory"] == 64 * 2**20 and host["Init"]
        assert "HEADRACE_COORDINATOR=coordinator:8471" in each.attrs["Config"]["Env"]
        assert list(each.attrs["NetworkSettings"]["Networks"]) == ["headrace-scaled_fleet"]
        assert each.status == "running"
    hosts = {each.short_id for each in made}
    assert docker.hosts() == hosts
    made[0].stop(timeout=1)
    assert docker.hosts() == hosts - {made[0].short_id}, "one that has ended runs no process"
    made[0].start()
    assert docker.scale("rollout", 1) == ""
    # `docker compose ps` itself fails where a container goes while it looks.
    wait_for(lambda: len(docker._containers("rollout")) == 1, "two containers to be removed")
    assert compose("ps", "--format", "{{.Name}}").strip() == "headrace-scaled-rollout-1"


def test_what_cannot_be_is_refused_in_words(compose):
    docker = Docker(PROJECT, ("rollout", "reward"))
    assert "docker compose up -d --scale reward=1" in docker.scale("reward", 2)
    assert "the last container stays" in docker.scale("rollout", 0)
