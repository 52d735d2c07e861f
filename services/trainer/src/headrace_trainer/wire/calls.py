"""What every call of the trainer needs: its authority, the open run, and its turn on the compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.instance import Instance
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import MAX_ATTEMPT, check_number, invalid

from headrace_trainer.errors import Kind, Refusal
from headrace_trainer.session.session import Session
from headrace_trainer.trainer import Trainer

Context = Any
Result = TypeVar("Result")
MAX_PATH, MAX_PATH_PART = 1024, 255

_CODES: dict[Kind, grpc.StatusCode] = {
    "precondition": grpc.StatusCode.FAILED_PRECONDITION,
    "conflict": grpc.StatusCode.ALREADY_EXISTS,
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "exhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": grpc.StatusCode.ABORTED,
}


@contextmanager
def refusals() -> Iterator[None]:
    """Turns a Refusal into the ServiceError that the interceptor sends."""
    try:
        yield
    except Refusal as refusal:
        code = _CODES[refusal.kind]
        raise ServiceError(code, refusal.reason, refusal.message, **refusal.metadata) from refusal


class ComputeThread:
    """Runs one function at a time, in order: torch's threads are the lease's, and rounds must not overlap."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="compute")

    async def __call__(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The function's result, after what was asked for before. Raises ServiceError for a Refusal."""
        with refusals():
            return await asyncio.get_running_loop().run_in_executor(self.pool, function, *arguments)

    def close(self) -> None:
        """Ends the thread after what was asked for."""
        self.pool.shutdown()


async def elsewhere(function: Callable[..., Result], *arguments: Any) -> Result:
    """Runs on another thread: for waits and disk reads, which must not delay the compute thread."""
    with refusals():
        return await asyncio.to_thread(function, *arguments)


class Calls:
    """Groups of calls are subclasses; `TrainerServicer` joins them."""

    def __init__(self, instance: Instance, trainer: Trainer, compute: ComputeThread) -> None:
        self._instance = instance
        self._trainer = trainer
        self._compute = compute

    def _check(self, header: common_pb2.CommandHeader, *, lease: bool, run: bool = True) -> None:
        self._instance.fence.check(header, lease=lease)
        if run:
            with refusals():
                self._trainer.check_run(header.run)

    async def _obey(self, header: common_pb2.CommandHeader, act: Callable[[Session], Result]) -> Result:
        """Runs `act` on the compute thread, if the command's lease still allows it when its turn has come."""

        def obey() -> Result:
            self._authorise(header)
            return act(self._trainer.awake_session())

        return await self._compute(obey)

    def _authorise(self, header: common_pb2.CommandHeader) -> None:
        """Raises Refusal EPOCH_STALE or LEASE_QUIESCED; on the compute thread, right before an effect."""
        try:
            self._instance.fence.check_lease(header.lease_epoch)
        except ServiceError as error:
            raise Refusal(error.reason, error.message, "precondition", **error.metadata) from error

    def _session(self) -> Session:
        with refusals():
            return self._trainer.session()

    def _awake(self) -> Session:
        with refusals():
            return self._trainer.awake_session()


_StepRequest = (
    trainer_pb2.BeginStepRequest
    | trainer_pb2.LearnRequest
    | trainer_pb2.ComputeLossRequest
    | trainer_pb2.CommitStepRequest
    | trainer_pb2.RecordStepRequest
    | trainer_pb2.AbortStepRequest
)


def check_step(request: _StepRequest) -> None:
    """Refuses step, attempt and version numbers that no run reaches; after them all lower ones would be refused."""
    check_number("attempt", request.attempt, 1, MAX_ATTEMPT)
    for name, least in (("step", 0), ("base_number", 1), ("next_number", 1), ("number", 1)):
        if name in request.DESCRIPTOR.fields_by_name:
            check_number(name, getattr(request, name), least)


def check_path(field: str, text: str) -> Path:
    """A directory's absolute path. Raises INVALID, also for one that no file system takes."""
    path = Path(text)
    short = len(text) <= MAX_PATH and all(len(part.encode()) <= MAX_PATH_PART for part in path.parts)
    if not path.is_absolute() or "\0" in text or not short:
        raise invalid(field, f"{text[:300]!r}; give an absolute path")
    return path
