"""The adapter of remote containers: the whole contract over processes of this machine, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from headrace_containers.contract import ProviderContract
from headrace_containers.provider import BadSpec, ContainerError, ContainerLost, Limits, Network, Spec
from headrace_containers.remote.adapter import Machine, RemoteContainer
from headrace_containers.remote.options import RemoteOptions
from headrace_containers.remote.provider import LIMITS, RemoteProvider
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).resolve().parent))
from remote_local import Local, missing

SPEC = Spec(image="here:1", env={"OF": "spec"})


class LocalProvider(RemoteProvider):
    """Of such machines."""

    NAME, HOLDS = "local", LIMITS

    @override
    def open(self, spec: Spec) -> Machine:
        if spec.image != SPEC.image:
            raise BadSpec("image", f"there is no image {spec.image}")
        return Local(spec)

    @override
    def wrong(self, error: Exception, what: str) -> ContainerError | None:
        return None


@pytest.fixture(scope="module")
def provider() -> Iterator[LocalProvider]:
    """Of machines here."""
    if why := missing():
        pytest.skip(f"containers of namespaces: {why}")
    made = LocalProvider(RemoteOptions.model_validate({}))
    yield made
    made.close()


@pytest.fixture
def spec() -> Spec:
    """Of no image in particular."""
    return SPEC


class TestContract(ProviderContract):
    """All that a provider must do."""


def test_calls_stay_small_and_a_short_command_needs_two(provider: LocalProvider) -> None:
    container = provider.start(SPEC)
    machine = container._machine
    assert isinstance(machine, Local)
    before = machine.calls
    assert container.exec(("true",)).exit_code == 0
    assert machine.calls - before <= 3
    ran = container.exec(("wc", "-c"), stdin=b"x" * 400_000)
    assert ran.stdout.strip() == b"400000" and machine.longest < 60_000
    container.close()


def test_the_user_gets_the_specs_variables_and_no_capability(provider: LocalProvider) -> None:
    container = provider.start(SPEC)
    ran = container.exec(("/bin/sh", "-c", "echo $OF; grep -E 'Cap(Prm|Bnd)|NoNewPrivs' /proc/self/status"))
    assert ran.stdout.split() == [
        *(b"spec", b"CapPrm:", b"0000000000000000", b"CapBnd:", b"0000000000000000", b"NoNewPrivs:", b"1")
    ]
    as_root = container.exec(("grep", "CapPrm", "/proc/self/status"), user="root").stdout.split()[1]
    assert int(as_root, 16) == 0b11101011, "CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID"
    container.close()


def test_another_commands_input_and_output_are_out_of_the_users_reach(provider: LocalProvider) -> None:
    container = provider.start(SPEC)
    container.exec(("cat",), stdin=b"secret", user="root")
    ran = container.exec(("/bin/sh", "-c", "ls /.headrace; cat /.headrace/*/in"))
    assert ran.exit_code and not ran.stdout
    container.close()


def test_output_without_end_is_killed(provider: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_containers.remote.adapter.MOST_DROPPED", 1 << 20)
    container = provider.start(SPEC)
    ran = container.exec(("yes",), most_bytes=10)
    assert (ran.ended, ran.exit_code, ran.stdout) == (
        "output",
        137,
        b"y\ny\ny\ny\ny\n",
    ) and ran.left_out > 1 << 20
    container.close()


def test_a_full_disk_ends_it_by_name(provider: LocalProvider) -> None:
    container = provider.start(replace(SPEC, limits=Limits(disk_mib=8)))
    ran = container.exec(("/bin/sh", "-c", "head -c 99999999 /dev/zero > full; exit 4"))
    assert ran.exit_code == 4
    with pytest.raises(ContainerLost, match="disk may be full"):
        container.exec(("cat",), stdin=b"x" * 100_000)
    with pytest.raises(ContainerLost):
        container.exec(("true",))


def test_an_owned_folder_is_the_users(provider: LocalProvider) -> None:
    container = provider.start(replace(SPEC, owned=("/etc/skel",), workdir="/etc/skel"))
    assert container.exec(("touch", "new")).exit_code == 0
    container.close()


class Scripted(Machine):
    """Answers what it is told."""

    id = "scripted"

    def __init__(self, *answers: str) -> None:
        self.answers, self.ended = list(answers), 0

    @override
    def run(self, script: str, timeout_s: float) -> tuple[int, str]:
        return 0, self.answers.pop(0)

    @override
    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize(
    ("said", "key", "names"),
    [("tool setpriv\n", "image", "setpriv"), ("root\n", "image", "root"), ("user\n", "user", "1000:1000")],
)
def test_what_an_image_lacks_is_named_and_the_machine_ended(said: str, key: str, names: str) -> None:
    machine = Scripted(said)
    with pytest.raises(BadSpec, match=names) as caught:
        RemoteContainer(machine, SPEC)
    assert caught.value.key == key and machine.ended == 1


@pytest.mark.parametrize("said", ["", "motd of the image\n", "0 3 0\n!!!\n\n"])
def test_a_shell_that_says_something_else_ends_the_container(said: str) -> None:
    machine = Scripted("ready\n", "", said)
    container = RemoteContainer(machine, SPEC)
    with pytest.raises(ContainerLost, match="shell says no output"):
        container.exec(("true",))
    assert machine.ended == 1


def test_what_a_service_cannot_hold_is_refused_by_key(tmp_path: Path) -> None:
    class Little(LocalProvider):
        HOLDS = ("cpus",)

    little = Little(RemoteOptions.model_validate({"unheld": ["limits.processes", "limits.disk_mib"]}))
    for spec, key in (
        (SPEC, "limits.memory_mib"),
        (replace(SPEC, network=Network(allow=("a.example",))), "network.allow"),
        (replace(SPEC, network=Network(endpoint="a:1")), "network.endpoint"),
        (replace(SPEC, build=tmp_path, image=""), "build"),
        (replace(SPEC, image=""), "image"),
    ):
        for ask in (little.prepare, little.start):
            with pytest.raises(BadSpec) as caught:
                ask(spec)
            assert caught.value.key == key
    with pytest.raises(BadSpec, match=r"limits\.wall"):
        Little(RemoteOptions.model_validate({"unheld": ["limits.wall_s"]}))
