"""The provider `modal` over its package's calls."""

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


@pytest.fixture
def modal(service_of: Callable[[str], Service], machine: Local) -> Service:
    """The service."""
    service = service_of("modal")

    def run(*words: str, **given: Any) -> Thing:
        assert words[:2] == ("/bin/sh", "-c") and len(words) == 3
        code, said = machine.run(words[2], 60)
        return Thing(stdout=Thing(read=lambda: said), wait=lambda: code)

    def create(*words: str, **given: Any) -> Thing:
        return Thing(
            object_id="sb-1",
            exec=service.stub("modal:Sandbox.exec", run),
            terminate=service.stub("modal:Sandbox.terminate", lambda: None),
        )

    def from_registry(tag: str) -> Thing:
        def build(app: object) -> str:
            if tag.startswith("no-such"):
                raise service.fails("modal.exception:RemoteError", "the build of the image has failed")
            return f"built {tag}"

        return Thing(build=service.stub("modal:Image.build", build))

    service.replace("modal:App.lookup", lambda name, **given: Thing(name=name))
    service.replace("modal:Image.from_registry", from_registry)
    service.replace("modal:Sandbox.create", create)
    return service


def test_recorded_calls_are_the_packages() -> None:
    check_recorded("modal")


def test_a_container_of_an_app(modal: Service, spec: Spec) -> None:
    provider = provider_of("modal", {**UNHELD, "app": "ours"})
    half = replace(spec, limits=Limits(cpus=0.5, memory_mib=512, wall_s=99.5))
    container = provider.start(half)
    assert (
        container.exec(("/bin/sh", "-c", "cat; id -u; exit 7"), stdin=b"\xff in").stdout == b"\xff in1000\n"
    )
    container.write([File("a", b"\0data")])
    assert container.read("a") == b"\0data"
    assert modal.calls.of("App.lookup") == [{"name": "ours", "create_if_missing": True}]
    (created,) = modal.calls.of("Sandbox.create")
    assert (created["cpu"], created["memory"], created["block_network"]) == ((0.5, 0.5), (512, 512), True)
    assert created["image"] == f"built {spec.image}" and created["timeout"] >= 100
    assert len(created["args"]) == 2 and sum(map(len, modal.calls.of("Sandbox.exec")[0]["args"])) < 1 << 16
    container.close()
    assert len(modal.calls.of("Sandbox.terminate")) == 1


def test_what_it_cannot_hold_is_refused(modal: Service, spec: Spec) -> None:
    for options, key in (({}, "limits.processes"), ({"unheld": ["limits.processes"]}, "limits.disk_mib")):
        with pytest.raises(BadSpec, match=r"provider_options\.unheld") as caught:
            provider_of("modal", options).prepare(spec)
        assert caught.value.key == key
    assert not modal.calls.of("Image.build")


def test_an_image_it_cannot_use_is_named(modal: Service, spec: Spec) -> None:
    provider = provider_of("modal", UNHELD)
    for ask in (provider.prepare, provider.start):
        with pytest.raises(BadSpec, match=r"no-such:1.*has failed") as caught:
            ask(replace(spec, image="no-such:1"))
        assert caught.value.key == "image"


def test_without_a_key_the_service_does_not_answer(modal: Service) -> None:
    def fail(*args: Any, **given: Any) -> None:
        raise modal.fails("modal.exception:AuthError", "token missing")

    modal.replace("modal:App.lookup", fail)
    with pytest.raises(EngineLost, match="token missing"):
        provider_of("modal", UNHELD)


@pytest.mark.parametrize(
    "error", ["NotFoundError", "SandboxTimeoutError", "SandboxTerminatedError", "ConflictError"]
)
def test_a_sandbox_that_is_gone_is_lost(modal: Service, spec: Spec, error: str) -> None:
    container = provider_of("modal", UNHELD).start(spec)

    def fail(*args: Any, **given: Any) -> None:
        raise modal.fails(f"modal.exception:{error}", "it is gone")

    container._machine._sandbox.exec = fail  # type: ignore[attr-defined]
    with pytest.raises(ContainerLost, match="it is gone") as caught:
        container.exec(("true",))
    assert type(caught.value) is ContainerLost and len(modal.calls.of("Sandbox.terminate")) == 1


def test_a_call_that_does_not_end_is_lost(modal: Service, spec: Spec) -> None:
    container = provider_of("modal", UNHELD).start(spec)
    late = Thing(stdout=Thing(read=lambda: ""), wait=lambda: -1)
    container._machine._sandbox.exec = lambda *words, **given: late  # type: ignore[attr-defined]
    with pytest.raises(ContainerLost, match="did not end in time"):
        container.exec(("true",))
