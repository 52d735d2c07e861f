"""One service's process on its own, `python -m headrace_KIND`, and channels to it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace_servicekit.rpc.errors import reason_of

from harness.processes import clean_environment, free_port
from harness.waiting import wait_for

KINDS = ("rollout", "trainer", "reward", "simulator")
SERVICES = {kind: f"headrace.{kind}.v1.{kind.capitalize()}Service" for kind in KINDS}
CALL_S = 120.0
MESSAGE_BYTES = 64 * 1024 * 1024


class Service:
    """A process in a directory of its own; as a context manager it is stopped by SIGTERM at the end."""

    def __init__(
        self,
        kind: str,
        directory: Path,
        *flags: str,
        python: Path | str = sys.executable,
        **environment: str,
    ) -> None:
        self.kind = kind
        self.directory = directory
        self.shared_memory = directory / "shm"
        self.address = f"127.0.0.1:{free_port()}"
        directory.mkdir(parents=True, exist_ok=True)
        folders = ["--data-dir", str(directory / "data")]
        folders += ["--shm-dir", str(self.shared_memory)] if kind in KINDS else []
        self._log = directory / f"{kind}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(python), "-m", f"headrace_{kind}", "--listen", self.address, *folders, *flags],
                env=clean_environment(**environment),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        return self.wait_until_serving()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = self.stop()
        if error is None:
            assert status == 0, f"{self.kind} ended with status {status}:\n{self.log}"

    def wait_until_serving(self) -> Self:
        """Returns when the health service says SERVING."""

        def look() -> bool:
            assert self.process.poll() is None, f"{self.kind} ended:\n{self.log}"
            return bool(self.health() == health_pb2.HealthCheckResponse.SERVING)

        wait_for(look, f"{self.kind} to serve", 180)
        return self

    def health(self, service: str = "") -> int:
        """What the health service says; UNKNOWN while nobody answers."""
        try:
            with channel_to(self.address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status)
        except grpc.RpcError:
            return int(health_pb2.HealthCheckResponse.UNKNOWN)

    def stop(self) -> int:
        """SIGTERM, and once more for who waits for a coordinator to close its runs; returns the exit status."""
        try:
            with suppress(subprocess.TimeoutExpired):
                return self._ask_to_end(3)
            return self._ask_to_end(60)
        finally:
            self.process.kill()

    def _ask_to_end(self, timeout_s: float) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    @property
    def log(self) -> str:
        """What it said."""
        return self._log.read_text(errors="replace")


class Coordinator(Service):
    """The coordinator's process over a store; `address` is its gRPC side, `http` its API."""

    def __init__(self, directory: Path, store_url: str) -> None:
        self.http = f"127.0.0.1:{free_port()}"
        token_file = directory / "http-token"
        directory.mkdir(parents=True, exist_ok=True)
        token_file.write_text("token-of-the-tests")
        token_file.chmod(0o600)
        self.headers = {"Authorization": f"Bearer {token_file.read_text()}"}
        flags = ("--http", self.http, "--redis", store_url, "--http-token-file", str(token_file))
        super().__init__("coordinator", directory, *flags)


@contextmanager
def channel_to(address: str) -> Iterator[grpc.Channel]:
    """A plain channel without retries."""
    limits = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
    options: list[tuple[str, Any]] = [(name, MESSAGE_BYTES) for name in limits]
    # Every try is a fresh one: a service that was not there is not asked later for having been away.
    options += [
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with grpc.insecure_channel(address, options=options) as channel:
        yield channel


@contextmanager
def refused(code: grpc.StatusCode | None, reason: str = "") -> Iterator[list[str]]:
    """Fails the test unless the block's call is refused so; yields a list that gets the sentence.

    Without a code the reason alone decides: it is what callers act on.
    """
    sentences: list[str] = []
    try:
        yield sentences
    except grpc.RpcError as error:
        found: Any = error
        said = f"{found.code()} {reason_of(error)}: {found.details()}"
        assert code in (None, found.code()) and reason in ("", reason_of(error)), said
        sentences.append(found.details())
        assert sentences[0], "a refusal has a sentence"
        return
    raise AssertionError(f"the call was not refused with {code} {reason}")
