"""What every provider of containers must do, as tests: subclass `ProviderContract` in a file of tests of your own.

It needs fixtures `provider` (a `Provider`, or anything with its `prepare` and `start`) and `spec` (of an image with
/bin/sh, tar and the tools of POSIX, whose user is not root).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace_containers.provider import (
    BadPath,
    BadSpec,
    Container,
    ContainerError,
    ContainerLost,
    File,
    Limits,
    Provider,
    Spec,
)


class ProviderContract:
    """See the module."""

    @pytest.fixture(scope="class")
    def shared(self, request: pytest.FixtureRequest) -> Iterator[dict[str, Container]]:
        """The container that tests share which leave it as it was."""
        kept: dict[str, Container] = {}
        yield kept
        for container in kept.values():
            container.close()

    @pytest.fixture
    def container(self, provider: Provider, spec: Spec, shared: dict[str, Container]) -> Container:
        """A running container."""
        if "it" not in shared:
            shared["it"] = provider.start(spec)
        return shared["it"]

    @pytest.fixture
    def own(self, provider: Provider, spec: Spec) -> Iterator[Container]:
        """A container of the test's own, which it may break."""
        container = provider.start(spec)
        yield container
        container.close()

    def test_a_command_has_its_input_output_exit_code_folder_and_variables(
        self, container: Container
    ) -> None:
        script = 'cat; pwd; printf "%s|%s" "$A" "$1" >&2; exit 3'
        ran = container.exec(
            ("/bin/sh", "-c", script, "it", "two words\n'and' \"a line\""),
            stdin=b"given\n\0\xff",
            cwd="/tmp",
            env={"A": "x=1\n$HOME"},
        )
        assert (ran.exit_code, ran.ended, ran.left_out) == (3, "exit", 0)
        assert ran.stdout == b"given\n\0\xff/tmp\n"
        assert ran.stderr == b"x=1\n$HOME|two words\n'and' \"a line\""

    def test_commands_share_what_they_write_and_nothing_else(self, container: Container) -> None:
        container.exec(("/bin/sh", "-c", "echo kept > kept; cd /tmp; export A=1"))
        assert container.exec(("/bin/sh", "-c", 'cat kept; pwd; echo "$A"')).stdout.endswith(b"\n\n")
        assert container.exec(("cat", "kept")).stdout == b"kept\n"

    def test_it_is_no_root_and_its_working_directory_is_its_own(
        self, container: Container, spec: Spec
    ) -> None:
        assert container.exec(("id", "-u")).stdout.strip() not in (b"", b"0")
        assert container.exec(("/bin/sh", "-c", "touch mine && [ -O mine ]")).exit_code == 0

    def test_output_is_bounded_and_comes_as_it_is_printed(self, container: Container) -> None:
        came: list[tuple[int, bytes]] = []
        script = "i=0; while [ $i -lt 2000 ]; do echo 0123456789; i=$((i+1)); done; echo late >&2"
        ran = container.exec(
            ("/bin/sh", "-c", script),
            most_bytes=1000,
            on_output=lambda number, piece: came.append((number, piece)),
        )
        assert len(ran.stdout) + len(ran.stderr) == 1000 and ran.left_out == 22_000 + 5 - 1000
        for number, kept in ((1, ran.stdout), (2, ran.stderr)):
            assert b"".join(piece for of, piece in came if of == number) == kept

        seen = threading.Event()
        started = time.monotonic()
        first: list[float] = []

        def noted(number: int, piece: bytes) -> None:
            first.append(time.monotonic() - started)
            seen.set()

        ran = container.exec(("/bin/sh", "-c", "echo first; sleep 3; echo second"), on_output=noted)
        assert ran.stdout == b"first\nsecond\n" and first[0] < time.monotonic() - started - 1.0

    def test_a_command_that_takes_too_long_is_killed_with_what_it_started(self, container: Container) -> None:
        script = "sleep 61.25 & (setsid sleep 61.25 &); echo begun; sleep 61.25"
        ran = container.exec(("/bin/sh", "-c", script), timeout_s=1.0)
        assert (ran.ended, ran.exit_code, ran.stdout) == ("time", 137, b"begun\n")
        look = 'for p in /proc/[0-9]*; do tr "\\0" " " < $p/cmdline; echo; done 2>/dev/null | grep -c "[s]leep 61"'
        assert container.exec(("/bin/sh", "-c", look)).stdout.strip() == b"0"
        assert container.exec(("echo", "goes on")).stdout == b"goes on\n"

    def test_what_runs_in_the_background_is_not_waited_for(self, container: Container) -> None:
        ran = container.exec(("/bin/sh", "-c", "sleep 30 & echo done"), timeout_s=20.0)
        assert (ran.ended, ran.exit_code, ran.stdout) == ("exit", 0, b"done\n") and ran.seconds < 15

    def test_what_cannot_be_run_is_named(self, container: Container) -> None:
        assert container.exec(("no-such-program",)).exit_code == 127
        with pytest.raises(BadSpec) as caught:
            container.exec(("ls",), cwd="/no/such/folder")
        assert caught.value.key == "cwd" and "/no/such/folder" in caught.value.message
        for command, env in (((), {}), (("a\0b",), {}), (("ls",), {"a=b": "1"}), (("x" * 200_000,), {})):
            with pytest.raises(BadSpec):
                container.exec(command, env=env)
        with pytest.raises(BadSpec) as caught:
            container.exec(("ls",), user="nobody-of-that-name")
        assert caught.value.key == "user"

    def test_files_go_in_and_come_out(self, container: Container) -> None:
        data = bytes(range(256)) * 5000
        container.write(
            [File("in/data.bin", data), File("in/deep/er/run.sh", b"#!/bin/sh\necho ran\n", 0o755)]
        )
        assert container.exec(("in/deep/er/run.sh",)).stdout == b"ran\n"
        assert container.read("in/data.bin") == data
        found = {file.path: (file.data, file.mode) for file in container.read_folder("in")}
        assert found == {"data.bin": (data, 0o644), "deep/er/run.sh": (b"#!/bin/sh\necho ran\n", 0o755)}
        container.write([File("in/data.bin", b"anew")])
        assert container.read("in/data.bin") == b"anew"

    def test_files_that_are_none_are_named(self, container: Container) -> None:
        container.exec(
            ("/bin/sh", "-c", "ln -s /etc/passwd link; mkdir folder; head -c 5000 /dev/zero > large")
        )
        for path, said in (
            ("nothing", "no"),
            ("link", "link"),
            ("folder", "folder"),
            ("/dev/zero", "device"),
            ("large", "4000"),
            ("../x", ".."),
        ):
            with pytest.raises(BadPath, match=said.replace(".", r"\.")):
                container.read(path, most_bytes=4000)
        for path in ("", "a/../../x", "folder/", "a\0b"):
            with pytest.raises(BadPath):
                container.write([File(path, b"")])
        with pytest.raises(BadPath):
            list(container.read_folder("nothing"))

    def test_a_link_leads_no_file_elsewhere(self, container: Container) -> None:
        """Neither in, as the user it is written for may do nothing there, nor out."""
        container.exec(
            ("/bin/sh", "-c", "ln -s /etc stolen; mkdir out; ln -s /etc/passwd out/passwd; echo 1 > out/a")
        )
        for user in ("", "root"):
            with pytest.raises(BadPath):
                container.write([File("stolen/new", b"x")], user=user)
        assert container.exec(("ls", "/etc/new")).exit_code != 0
        assert [(file.path, file.data) for file in container.read_folder("out")] == [("a", b"1\n")]

    def test_roots_files_are_out_of_the_users_reach(self, container: Container) -> None:
        container.write([File("/hidden/tests/check.sh", b"echo checked\n", 0o700)], user="root")
        assert container.exec(("cat", "/hidden/tests/check.sh")).exit_code != 0
        assert container.exec(("/bin/sh", "-c", "echo exit 0 > /hidden/tests/check.sh")).exit_code != 0
        assert container.exec(("/bin/sh", "/hidden/tests/check.sh"), user="root").stdout == b"checked\n"

    def test_a_container_that_is_closed_is_lost(self, own: Container) -> None:
        own.close()
        own.close()
        for ask in (lambda: own.exec(("ls",)), lambda: own.read("x"), lambda: own.write([File("x", b"")])):
            with pytest.raises(ContainerLost):
                ask()

    def test_one_that_runs_a_command_as_it_is_closed_raises(self, own: Container) -> None:
        begun = threading.Event()
        caught: list[Exception] = []

        def run() -> None:
            try:
                own.exec(
                    ("/bin/sh", "-c", "echo begun; sleep 60"), on_output=lambda number, piece: begun.set()
                )
            except ContainerError as error:
                caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert begun.wait(30)
        own.close()
        thread.join(30)
        assert [type(error) for error in caught] == [ContainerLost]

    def test_its_time_is_over_by_name(self, provider: Provider, spec: Spec) -> None:
        short = replace(spec, limits=Limits(**{**vars(spec.limits), "wall_s": 2.0}))
        container = provider.start(short)
        with pytest.raises(ContainerLost, match=r"limits\.wall_s"):
            container.exec(("sleep", "60"))
        container.close()

    def test_an_image_that_is_not_there_is_named(self, provider: Provider, spec: Spec) -> None:
        for ask in (provider.prepare, provider.start):
            with pytest.raises(BadSpec) as caught:
                ask(replace(spec, image="headrace-no-such-image:1"))
            assert caught.value.key == "image" and "headrace-no-such-image:1" in caught.value.message
