"""The provider `e2b` over its package's calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from headrace_containers.provider import BadSpec, ContainerLost, EngineLost, File, Limits, Spec
from headrace_containers.providers import provider_of
from remote_local import Local
from remote_stubs import Service, Thing, check_recorded

UNHELD = {"unheld": ["limits.processes", "limits.disk_mib"]}
RUN = "e2b.sandbox_sync.commands.command:Commands.run"


@pytest.fixture
def e2b(service_of: Callable[[str], Service], machine: Local) -> Service:
    """The service, which has no template yet."""
    service = service_of("e2b")
    templates: set[str] = set()

    def run(cmd: str, **given: Any) -> Thing:
        code, said = machine.run(cmd, 60)
        if code:
            raise service.fails("e2b:CommandExitException", exit_code=code, stdout=said, stderr="")
        return Thing(exit_code=0, stdout=said)

    def create(template: str, **given: Any) -> Thing:
        if template not in templates:
            raise service.fails("e2b:NotFoundException", f"no template {template}")
        commands = Thing(run=service.stub(RUN, run))
        return Thing(
            sandbox_id="sandbox-1",
            commands=commands,
            kill=service.stub("e2b:Sandbox.kill", lambda: True),
        )

    service.templates = templates  # type: ignore[attr-defined]
    service.replace("e2b:Template.exists", lambda name: name in templates)
    service.replace("e2b:Template.build", lambda template, name, **given: templates.add(name))
    service.replace("e2b:Sandbox.create", create)
    if not service.is_real:
        service.replace("e2b:Template.from_image", lambda image: Thing(image=image))
    return service


def test_recorded_calls_are_the_packages() -> None:
    check_recorded("e2b")


def test_a_container_of_a_template_made_once(e2b: Service, spec: Spec) -> None:
    provider = provider_of("e2b", UNHELD)
    provider.prepare(spec)
    container = provider.start(spec)
    assert (
        container.exec(("/bin/sh", "-c", "cat; id -u; exit 7"), stdin=b"\xff in").stdout == b"\xff in1000\n"
    )
    container.write([File("a", b"\0data")])
    assert container.read("a") == b"\0data"
    (built,) = e2b.calls.of("Template.build")
    assert (built["cpu_count"], built["memory_mb"]) == (2, 1024)
    (created,) = e2b.calls.of("Sandbox.create")
    assert created["template"] == built["name"] and created["allow_internet_access"] is False
    assert created["timeout"] >= 600 and all(each["user"] == "root" for each in e2b.calls.of("Commands.run"))
    container.close()
    assert len(e2b.calls.of("Sandbox.kill")) == 1
    provider.start(replace(spec, limits=Limits(cpus=1, memory_mib=1024))).close()
    assert len(e2b.calls.of("Template.build")) == 2, "other limits are another template"


def test_a_template_that_is_removed_is_made_anew(e2b: Service, spec: Spec) -> None:
    provider = provider_of("e2b", UNHELD)
    provider.prepare(spec)
    e2b.templates.clear()  # type: ignore[attr-defined]
    with pytest.raises(ContainerLost, match="no template"):
        provider.start(spec)
    provider.start(spec).close()


@pytest.mark.parametrize(
    ("limits", "key"),
    [({"cpus": 0.5}, "limits.cpus"), ({"memory_mib": 1023}, "limits.memory_mib")],
)
def test_what_it_cannot_hold_is_refused(e2b: Service, spec: Spec, limits: Any, key: str) -> None:
    with pytest.raises(BadSpec) as caught:
        provider_of("e2b", UNHELD).start(replace(spec, limits=Limits(**limits)))
    assert caught.value.key == key
    with pytest.raises(BadSpec, match=r"provider_options\.unheld") as caught:
        provider_of("e2b", {}).start(spec)
    assert caught.value.key == "limits.processes" and not e2b.calls


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("BuildException", BadSpec),
        ("AuthenticationException", EngineLost),
        ("ServiceBusyException", EngineLost),
    ],
)
def test_an_image_it_cannot_use_and_a_service_that_does_not(
    e2b: Service, spec: Spec, error: str, kind: type[Exception]
) -> None:
    def fail(*args: Any, **given: Any) -> None:
        raise e2b.fails(f"e2b:{error}", "of the service")

    e2b.replace("e2b:Template.build", fail)
    with pytest.raises(kind, match="of the service") as caught:
        provider_of("e2b", UNHELD).prepare(spec)
    assert getattr(caught.value, "key", "image") == "image"


def test_a_sandbox_that_is_gone_is_lost(e2b: Service, spec: Spec) -> None:
    container = provider_of("e2b", UNHELD).start(spec)

    def fail(*args: Any, **given: Any) -> None:
        raise e2b.fails("e2b:SandboxNotFoundException", "it timed out")

    container._machine._sandbox.commands.run = fail  # type: ignore[attr-defined]
    with pytest.raises(ContainerLost, match="it timed out"):
        container.exec(("true",))
    assert len(e2b.calls.of("Sandbox.kill")) == 1
