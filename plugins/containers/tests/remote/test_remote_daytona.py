"""The provider `daytona` over its package's calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from headrace_containers.provider import BadSpec, ContainerLost, EngineLost, File, Limits, Spec
from headrace_containers.providers import provider_of
from remote_local import Local
from remote_stubs import Service, Thing, check_recorded

UNHELD = {"unheld": ["limits.processes"]}


@pytest.fixture
def daytona(service_of: Callable[[str], Service], machine: Local, monkeypatch: pytest.MonkeyPatch) -> Service:
    """The service."""
    service = service_of("daytona")
    monkeypatch.setenv("DAYTONA_API_KEY", "none")

    def run(command: str, **given: Any) -> Thing:
        code, said = machine.run(command, 60)
        return Thing(exit_code=code, result=said)

    def create(params: Any, **given: Any) -> Thing:
        return Thing(
            id="sandbox-1",
            process=Thing(exec=service.stub("daytona._sync.process:Process.exec", run)),
            delete=service.stub("daytona:Sandbox.delete", lambda: None),
        )

    service.replace("daytona:Daytona.create", create)
    if not service.is_real:
        made = service.stub("daytona:Image.entrypoint", lambda words: "made")
        service.replace("daytona:Image.base", lambda image: Thing(entrypoint=made))
    return service


def test_recorded_calls_are_the_packages() -> None:
    check_recorded("daytona")


def test_a_container_of_its_own(daytona: Service, spec: Spec) -> None:
    container = provider_of("daytona", UNHELD).start(spec)
    script = "cat; id -u; echo 'it''s' >&2; exit 7"
    ran = container.exec(("/bin/sh", "-c", script), stdin=b"\xff in")
    assert (ran.exit_code, ran.stdout, ran.stderr) == (7, b"\xff in1000\n", b"its\n")
    container.write([File("a", b"\0data")])
    assert container.read("a") == b"\0data"
    (created,) = daytona.calls.of("Daytona.create")
    params = created["params"]
    assert (params.resources.cpu, params.resources.memory, params.resources.disk) == (2, 1, 2)
    assert params.network_block_all is True and params.os_user == "root" and params.ttl_minutes >= 10
    assert (params.auto_stop_interval, params.auto_delete_interval) == (0, 0)
    if daytona.is_real:
        assert params.image.dockerfile().splitlines()[0] == f"FROM {spec.image}"
    container.close()
    assert len(daytona.calls.of("Sandbox.delete")) == 1


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        ({"cpus": 0.5}, "limits.cpus"),
        ({"memory_mib": 1000}, "limits.memory_mib"),
        ({"disk_mib": 1000}, "limits.disk_mib"),
    ],
)
def test_what_it_cannot_hold_is_refused(daytona: Service, spec: Spec, limits: Any, key: str) -> None:
    with pytest.raises(BadSpec) as caught:
        provider_of("daytona", UNHELD).start(replace(spec, limits=Limits(**limits)))
    assert caught.value.key == key
    with pytest.raises(BadSpec, match=r"provider_options\.unheld") as caught:
        provider_of("daytona", {}).start(spec)
    assert caught.value.key == "limits.processes" and not daytona.calls


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("ValidationError", BadSpec),
        ("Error", BadSpec),
        ("AuthenticationError", EngineLost),
        ("TimeoutError", EngineLost),
    ],
)
def test_an_image_it_cannot_use_and_a_service_that_does_not_answer(
    daytona: Service, spec: Spec, error: str, kind: type[Exception]
) -> None:
    def fail(*args: Any, **given: Any) -> None:
        raise daytona.fails(f"daytona:Daytona{error}", "of the service", message="of the service")

    daytona.replace("daytona:Daytona.create", fail)
    provider = provider_of("daytona", UNHELD)
    for ask in (provider.prepare, provider.start):
        with pytest.raises(kind, match="of the service") as caught:
            ask(spec)
        assert getattr(caught.value, "key", "image") == "image"


@pytest.mark.parametrize("error", ["NotFoundError", "GoneError"])
def test_a_sandbox_that_is_gone_is_lost(daytona: Service, spec: Spec, error: str) -> None:
    container = provider_of("daytona", UNHELD).start(spec)

    def fail(*args: Any, **given: Any) -> None:
        raise daytona.fails(f"daytona:Daytona{error}", "it is gone", message="it is gone")

    container._machine._sandbox.process.exec = fail  # type: ignore[attr-defined]
    with pytest.raises(ContainerLost, match="it is gone") as caught:
        container.exec(("true",))
    assert type(caught.value) is ContainerLost and len(daytona.calls.of("Sandbox.delete")) == 1
