"""Calls of the backend as calls of SGLang's engine, in the process that holds it. Imports SGLang.

Whatever SGLang refuses is answered as a sentence; a scheduler's death ends this process, which is answer enough.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from headrace_servicekit.process.worker_pipes import LENGTH, checked_size, frame
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer

from headrace_rollout.engines.sglang.arguments import LOADER
from headrace_rollout.engines.sglang.loader import request_tensor
from headrace_rollout.engines.sglang.messages import Message, decode, encode

IDLE_S = 30.0
_POLL_S = 0.02


class Failed(Exception):
    """SGLang refused a call; the message says why."""


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
        self._model_eos = set(self._manager.model_config.hf_eos_token_id or ())
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[str, Callable[[Message], Awaitable[Any]]] = {
            "abort": self._abort,
            "score": self._score,
            "freeze": self._freeze,
            "thaw": self._thaw,
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
        with suppress(asyncio.IncompleteReadError):
            while True:
                size = checked_size(await reader.readexactly(LENGTH.size))
                task = asyncio.create_task(self._answer(decode(await reader.readexactly(size))))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: Message) -> None:
        try:
            if call["call"] == "generate":
                async for tokens in self._generate(call):
                    self._send({"id": call["id"], "tokens": tokens})
                result = None
            else:
                result = await self._calls[call["call"]](call)
        except (Failed, ValueError, RuntimeError, OSError, LookupError, AssertionError, TypeError) as error:
            self._send({"id": call["id"], "failed": f"{call['call']}: {error}"})
        else:
            self._send({"id": call["id"], "result": result})

    def _send(self, message: Message) -> None:
        self._writer.write(frame(encode(message)))
        self._writer.flush()

    async def _generate(self, call: Message) -> AsyncIterator[list[Any]]:
        sampling = call["sampling"]
        # SGLang ends at the ends that the model's directory names, too. Where the run has fewer, it looks for none: the
        # adapter aborts behind the run's own.
        sampling["ignore_eos"] = not self._model_eos <= set(sampling["stop_token_ids"])
        truncated = sampling["top_p"] < 1 or sampling["top_k"] > 0 or sampling["min_p"] > 0
        if truncated and sampling["temperature"] > 0 and sampling["top_k"] < 1:
            # A mask is refused without a finite top-k; this one keeps every token.
            sampling["top_k"] = self._engine.server_args.sampling_mask_max_tokens
        request = GenerateReqInput(
            input_ids=call["token_ids"],
            sampling_params=sampling,
            rid=call["rid"],
            stream=True,
            return_logprob=True,
            # SGLang's log-probs are of the logits over the temperature, before top-p, top-k and min-p; those of what
            # is really drawn from come with the kept set.
            return_sampling_mask=truncated and sampling["temperature"] > 0,
            cache_salt=call["cache_salt"],
        )
        made = 0
        async for output in self._manager.generate_request(request, None):
            meta = output["meta_info"]
            _check_finish(meta.get("finish_reason"))
            ids = output.get("output_ids") or []
            if not ids:  # aborted before its first token
                continue
            if request.return_sampling_mask:
                log_probs = meta["output_token_sampling_logprobs"]
            else:
                log_probs = [row[0] for row in meta["output_token_logprobs"]]
            if len(log_probs) != len(ids):
                raise Failed(f"{len(ids)} tokens came with {len(log_probs)} log-probs")
            yield [ids, log_probs, _versions(meta.get("weight_versions"), made, made + len(ids))]
            made += len(ids)

    async def _abort(self, call: Message) -> None:
        for rid in call["rids"]:
            self._manager.abort_request(rid=rid)

    async def _score(self, call: Message) -> list[float]:
        request = GenerateReqInput(
            input_ids=call["token_ids"],
            sampling_params={"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False},
            return_logprob=True,
            logprob_start_len=call["start"] - 1,
            cache_salt=call["rid"],  # nobody else's prefix
            rid=call["rid"],
        )
        async for output in self._manager.generate_request(request, None):
            _check_finish(output["meta_info"].get("finish_reason"))
            rows = output["meta_info"]["input_token_logprobs"]
        wanted = len(call["token_ids"]) - call["start"]
        return [row[0] for row in rows[len(rows) - wanted :]]

    async def _freeze(self, call: Message) -> None:
        # Not "in_place": that keeps keys and values of the old weights, and the cache cannot be flushed under it.
        await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))

    async def _thaw(self, call: Message) -> None:
        await self._manager.continue_generation(ContinueGenerationReqInput())

    async def _begin_install(self, call: Message) -> None:
        _check(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))

    async def _update(self, call: Message) -> dict[str, str]:
        try:
            return await self._load(Path(call["path"]), call["entries"])
        except Failed:
            # A session that stays open would refuse the next one, which is to repair this.
            await self._manager.end_weight_update(EndWeightUpdateReqInput(), None)
            raise

    async def _load(self, path: Path, entries: list[Any]) -> dict[str, str]:
        ranks = self._engine.server_args.tp_size
        with tempfile.TemporaryDirectory(prefix="headrace-sglang-") as answers:
            tensor = request_tensor(path, entries, Path(answers))
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
        if len(found) != ranks or any(each["digests"] != found[0]["digests"] for each in found):
            raise Failed(
                f"{len(found)} of {ranks} processes answered, or they read different bytes from one file"
            )
        digests: dict[str, str] = found[0]["digests"]
        return digests

    async def _finish_install(self, call: Message) -> None:
        _check(await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))
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
        give_up_at = asyncio.get_running_loop().time() + IDLE_S
        while not (found := await self._manager.flush_cache()).success:
            if asyncio.get_running_loop().time() > give_up_at:
                raise Failed(f"the prefix cache was not flushed within {IDLE_S:g} s: {found.message}")
            await asyncio.sleep(_POLL_S)


def _answers(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in directory.iterdir()]


def _check(answer: tuple[bool, str]) -> None:
    """SGLang returns (False, reason) where others raise."""
    success, message = answer[:2]
    if not success:
        raise Failed(message)


def _check_finish(reason: Any) -> None:
    if isinstance(reason, dict) and reason.get("type") == "abort" and reason.get("status_code"):
        raise Failed(str(reason.get("message")))


def _versions(spans: Any, start: int, end: int) -> list[int]:
    """The version of each token from `start` to `end`; empty where SGLang says nothing: the installed one."""
    numbers = [int(span["version"]) for span in spans or () for _ in range(span["end"] - span["start"])]
    return numbers[start:end] if len(numbers) >= end else []
