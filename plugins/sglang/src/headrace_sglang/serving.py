"""Calls of the backend as calls of SGLang's engine, in the process that holds it. Imports SGLang.

Whatever SGLang refuses is answered as a sentence; a scheduler's death ends this process, which is answer enough.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from headrace_servicekit.process.worker_pipes import LENGTH, checked_size, decode_json, encode_json, frame
from headrace_servicekit.process.worker_pipes import JsonMessage as Message
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer

from headrace_sglang.arguments import LOADER
from headrace_sglang.generating import Failed, Generating
from headrace_sglang.loader import request_tensor

IDLE_S = 30.0
_POLL_S = 0.02


def make_engine(arguments: dict[str, Any]) -> tuple[Engine, int]:
    """The engine, and how many tokens its KV cache holds. What SGLang raises goes through."""
    engine = Engine(**arguments)
    infos = engine._scheduler_init_result.scheduler_infos
    return engine, int(infos[0]["max_total_num_tokens"])


def serve(engine: Engine, reader: BinaryIO, writer: BinaryIO) -> None:
    """Answers calls, each in a task of its own, until the backend goes away."""
    engine.loop.run_until_complete(_Server(engine, writer).run(reader))


class _Server:
    def __init__(self, engine: Engine, writer: BinaryIO) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._writer = writer
        self._generating = Generating(self._manager, engine.server_args.sampling_mask_max_tokens)
        self._in_session = False
        self._tokens: list[list[Any]] = []
        """[call, ids, log-probs] of what is new in this turn of the loop: one message has it all."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[str, Callable[[Message], Awaitable[Any]]] = {
            "abort": self._generating.abort,
            "score": self._generating.score,
            "freeze": self._generating.freeze,
            "thaw": self._generating.thaw,
            "begin_install": self._begin_install,
            "update": self._update,
            "finish_install": self._finish_install,
            "reset_cache": self._reset_cache,
            "sleep": self._sleep,
            "wake": self._wake,
        }

    async def run(self, pipe: BinaryIO) -> None:
        reader = asyncio.StreamReader(limit=2**24)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        # On a CPU each flush of the cache collects garbage: without this it walks through all that SGLang imported.
        await self._manager.freeze_gc()
        with suppress(asyncio.IncompleteReadError):
            while True:
                size = checked_size(await reader.readexactly(LENGTH.size))
                task = asyncio.create_task(self._answer(decode_json(await reader.readexactly(size))))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: Message) -> None:
        try:
            if call["call"] == "generate":
                async for tokens in self._generating.generate(call):
                    self._send_tokens([call["id"], *tokens])
                result = None
            else:
                result = await self._calls[call["call"]](call)
        except (Failed, ValueError, RuntimeError, OSError, LookupError, AssertionError, TypeError) as error:
            self._send({"id": call["id"], "failed": f"{call['call']}: {error}"})
        else:
            self._send({"id": call["id"], "result": result})

    def _send_tokens(self, tokens: list[Any]) -> None:
        if not self._tokens:
            asyncio.get_running_loop().call_soon(self._flush_tokens)
        self._tokens.append(tokens)

    def _flush_tokens(self) -> None:
        if self._tokens:
            tokens, self._tokens = self._tokens, []
            self._send({"tokens": tokens})

    def _send(self, message: Message) -> None:
        self._flush_tokens()  # A request's tokens come before its end.
        self._writer.write(frame(encode_json(message)))
        self._writer.flush()

    async def _begin_install(self, call: Message) -> None:
        # A session that an install left open behind it would refuse this one, which is to repair that.
        await self._end_session()
        _check(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
        self._in_session = True

    async def _end_session(self) -> None:
        if self._in_session:
            self._in_session = False
            _check(await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))

    async def _update(self, call: Message) -> None:
        path, entries = Path(call["path"]), call["entries"]
        ranks = self._engine.server_args.tp_size
        with tempfile.TemporaryDirectory(prefix="headrace-sglang-") as answers:
            tensor = request_tensor(path, entries, Path(answers), call.get("adapter"))
            payload = MultiprocessingSerializer.serialize([("version", tensor)])
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[payload] * ranks,
                load_format=LOADER,
                # `reset_cache` follows: this flush fails while a request waits, and with it the update.
                flush_cache=False,
            )
            _check(await self._manager.update_weights_from_tensor(request, None))
            found = await asyncio.to_thread(_answers, Path(answers))
        if problem := next((each["problem"] for each in found if each["problem"]), ""):
            raise Failed(problem)
        if len(found) != ranks:
            raise Failed(f"{len(found)} of {ranks} processes answered")

    async def _finish_install(self, call: Message) -> None:
        await self._end_session()
        version = UpdateWeightVersionReqInput(new_version=str(call["number"]), abort_all_requests=False)
        await self._manager.update_weight_version(version)

    async def _reset_cache(self, call: Message) -> None:
        await self._until_flushed()

    async def _sleep(self, call: Message) -> None:
        # SGLang asserts that it is idle, and an abort is over only some steps later: the assertion ends the engine.
        await self._until_flushed()
        if not self._engine.server_args.enable_memory_saver:
            return  # on a CPU there is nothing that SGLang could give back
        tags = ReleaseMemoryOccupationReqInput(tags=["kv_cache", "weights"])
        await self._manager.release_memory_occupation(tags, None)

    async def _wake(self, call: Message) -> None:
        if not self._engine.server_args.enable_memory_saver:
            return
        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[call["tag"]]), None)

    async def _until_flushed(self) -> None:
        deadline = asyncio.get_running_loop().time() + IDLE_S
        while not (found := await self._manager.flush_cache()).success:
            if asyncio.get_running_loop().time() > deadline:
                raise Failed(f"the prefix cache was not flushed within {IDLE_S:g} s: {found.message}")
            await asyncio.sleep(_POLL_S)


def _answers(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in directory.iterdir()]


def _check(answer: tuple[bool, str]) -> None:
    """SGLang returns (False, reason) where others raise."""
    success, message = answer[:2]
    if not success:
        raise Failed(message)
