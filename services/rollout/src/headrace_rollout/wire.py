"""Between messages and an engine's own nouns. Checks what came from outside; decides nothing else."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from google.protobuf.duration_pb2 import Duration
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import check_number, json_object
from headrace_servicekit.rpc.tensors import NUMPY_TYPES
from headrace_servicekit.rpc.trajectories import pack_routes, unpack_routes

from headrace_rollout.engines.base import Lent, Refused, WeightEntry, Weights
from headrace_rollout.engines.samples import (
    Distribution,
    Given,
    Group,
    Prefix,
    Sample,
    SlotKey,
    Stream,
    TrajectoryUpdate,
)
from headrace_rollout.moving import MovedCaches

if TYPE_CHECKING:
    from headrace_modelkit.tokenizer import TextCodec

MOST_ROUTES = 1 << 30
"""Most bytes that the routes of one sample unpack to."""


def invalid(message: str) -> ServiceError:
    """The refusal of a request; `message` names the field."""
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message)


@contextmanager
def refusals() -> Iterator[None]:
    """FAILED_PRECONDITION with the engine's reason; INVALID_ARGUMENT for INVALID."""
    try:
        yield
    except Refused as error:
        code = grpc.StatusCode.FAILED_PRECONDITION
        if error.reason == "INVALID":
            code = grpc.StatusCode.INVALID_ARGUMENT
        raise ServiceError(code, error.reason, str(error)) from error


def distribution_of(message: common_pb2.SamplingDistribution) -> Distribution:
    """The distribution of a message; absent top_p and repetition_penalty (0) mean 1. Raises INVALID."""
    found = Distribution(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty or 1.0,
    )
    checks = {
        "temperature: 0 or more": math.isfinite(found.temperature) and found.temperature >= 0,
        "top_p: in (0, 1]": 0 < found.top_p <= 1,
        "top_k: 0 or more": found.top_k >= 0,
        "min_p: in [0, 1)": 0 <= found.min_p < 1,
        "repetition_penalty: above 0": math.isfinite(found.repetition_penalty)
        and found.repetition_penalty > 0,
    }
    for rule, holds in checks.items():
        if not holds:
            raise invalid(f"distribution.{rule}")
    return found


def stream_of(
    message: rollout_pb2.GenerateOpen,
    sink: Callable[[list[TrajectoryUpdate]], None],
    failed: Callable[[str], None],
    holds: Callable[[], bool],
) -> Stream:
    """The stream that a GenerateOpen describes. Raises INVALID."""
    if message.distribution.log_prob_kind == common_pb2.LOG_PROB_KIND_RAW:
        raise invalid("distribution.log_prob_kind: generated tokens carry PROCESSED log-probs")
    if message.max_new_tokens < 1 or message.chunk_tokens < 0:
        raise invalid("max_new_tokens must be 1 or more, chunk_tokens 0 or more")
    return Stream(
        policy_number=message.policy_number,
        distribution=distribution_of(message.distribution),
        max_new_tokens=message.max_new_tokens,
        seed=message.seed,
        sink=sink,
        failed=failed,
        stop=tuple(stop for stop in message.stop if stop),
        chunk_tokens=message.chunk_tokens,
        holds=holds,
    )


async def groups_of(
    messages: Sequence[rollout_pb2.GroupAssignment], codec: TextCodec, caches: MovedCaches | None
) -> list[Group]:
    """Groups with their prompts as ids, and with what `caches` can get of those that moved. Raises INVALID."""
    read = [await _read_prompt(message.prompt, codec) for message in messages]
    return [
        Group(
            _ordinal("prompt_ordinal", message.prompt_ordinal),
            prompt.ids,
            [
                Sample(
                    _ordinal("samples.sample_index", sample.sample_index),
                    sample.attempt,
                    _prefix(sample) if sample.HasField("resume") else None,
                    sample.greedy,
                    await caches.take(sample.resume) if caches else None,
                )
                for sample in message.samples
            ],
            prompt.images,
        )
        for message, prompt in zip(messages, read, strict=True)
    ]


async def _read_prompt(prompt: rollout_pb2.Prompt, codec: TextCodec) -> Given:
    """As `prompt_ids`, with where its images stand; in a thread where a chat template or images take time."""
    if prompt.WhichOneof("form") != "chat" and not prompt.images:
        return Given(prompt_ids(prompt, codec))
    ids = await asyncio.to_thread(prompt_ids, prompt, codec)
    if not prompt.images:
        return Given(ids)
    assert codec.images is not None, "checked by prompt_ids"
    return Given.of(codec.images, ids, [image.data for image in prompt.images])


def prompt_ids(prompt: rollout_pb2.Prompt, codec: TextCodec) -> list[int]:
    """Ids of a prompt in any of its forms. Raises INVALID."""
    form = prompt.WhichOneof("form")
    if prompt.images and (form != "chat" or codec.images is None):
        raise invalid("prompt.images: give a chat, and a model that reads images")
    if any(digest_bytes(image.data) != image.digest for image in prompt.images):
        raise invalid("prompt.images: an image has not its digest")
    if form == "token_ids":
        return _ids("prompt.token_ids", prompt.token_ids.values)
    if form == "text":
        return codec.encode_prompt(text=prompt.text)
    if form is None:
        raise invalid("prompt: give chat, text or token_ids")
    chat = [
        {"role": each.role, "content": each.content}
        | json_object("prompt.chat.messages.keys_json", each.keys_json)
        for each in prompt.chat.messages
    ]
    arguments = json_object("prompt.chat.template_arguments_json", prompt.chat.template_arguments_json)
    try:
        return codec.encode_prompt(
            chat=chat,
            prefill=prompt.chat.prefill,
            arguments=arguments,
            images=[image.data for image in prompt.images],
        )
    except ValueError as error:
        raise invalid(str(error)) from error


def fill_chunk(chunk: common_pb2.TrajectoryChunk, output: TrajectoryUpdate, stream: Stream) -> None:
    """Fills a chunk from an update; with tokens only on streams that asked for chunks."""
    fill_key(chunk.sample, output.key)
    chunk.attempt = output.attempt
    chunk.token_offset = output.offset
    chunk.policy_number = output.policy_number
    if stream.chunk_tokens > 0:
        chunk.token_ids.extend(output.token_ids)
        chunk.log_probs.extend(output.log_probs)


def partial_of(
    output: TrajectoryUpdate, cache: common_pb2.CachedContext | None = None
) -> rollout_pb2.PartialSample:
    """A stopped update as what another engine needs to go on, with a reference to its cache."""
    assert output.whole is not None
    spans = [
        common_pb2.VersionSpan(policy_number=number, token_count=count)
        for number, count in output.whole.spans
    ]
    state = common_pb2.ResumeState(
        token_ids=output.whole.token_ids,
        log_probs=output.whole.log_probs,
        version_spans=spans,
        rng_position=len(output.whole.token_ids),
        cache=cache,
        routed_experts=pack_routes(output.whole.routes),
    )
    return rollout_pb2.PartialSample(sample=sample_message(output.key), attempt=output.attempt, state=state)


def fill_key(message: common_pb2.SlotKey, key: SlotKey) -> None:
    """A slot as a message, in place."""
    message.prompt_ordinal = key.prompt_ordinal
    message.sample_index = key.sample_index


def duration_of(seconds: float) -> Duration:
    """Seconds as a message."""
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def sample_message(key: SlotKey) -> common_pb2.SlotKey:
    """A slot as a message."""
    return common_pb2.SlotKey(prompt_ordinal=key.prompt_ordinal, sample_index=key.sample_index)


def keys_of(messages: Iterable[common_pb2.SlotKey]) -> list[SlotKey]:
    """Slots of messages."""
    return [SlotKey(message.prompt_ordinal, message.sample_index) for message in messages]


def weights_of(
    manifest: common_pb2.WeightManifest, body: memoryview, path: Path | None = None, lent: Lent | None = None
) -> Weights:
    """A verified body with what its manifest says; `path` is its file, for other processes."""
    entries = [
        WeightEntry(
            entry.name,
            NUMPY_TYPES[entry.data_type].name,
            tuple(entry.shape),
            entry.offset_bytes,
            entry.size_bytes,
            entry.digest,
        )
        for entry in manifest.entries
    ]
    return Weights(tuple(entries), body, path, lent=lent, digest=manifest.digest)


def distribution_message(distribution: Distribution) -> common_pb2.SamplingDistribution:
    """A distribution as a message."""
    return common_pb2.SamplingDistribution(
        temperature=distribution.temperature,
        top_p=distribution.top_p,
        top_k=distribution.top_k,
        min_p=distribution.min_p,
        repetition_penalty=distribution.repetition_penalty,
        log_prob_kind=common_pb2.LOG_PROB_KIND_PROCESSED,
    )


def _prefix(sample: rollout_pb2.SampleAssignment) -> Prefix | None:
    state = sample.resume
    count = len(state.token_ids)
    spans = [(span.policy_number, span.token_count) for span in state.version_spans]
    lengths = [tokens for _, tokens in spans]
    if len(state.log_probs) != count or sum(lengths) != count or any(length < 1 for length in lengths):
        raise invalid("resume: token_ids, log_probs and version_spans must cover the same tokens")
    ids = _ids("resume.token_ids", state.token_ids)
    if not all(map(math.isfinite, state.log_probs)):
        raise invalid("resume.log_probs: give finite ones")
    # State that this engine cannot restore: the sample begins again at token 0.
    if state.rng_position != count or state.extra_json:
        return None
    try:
        routes = unpack_routes(state.routed_experts, MOST_ROUTES)
    except ValueError as error:
        raise invalid(f"resume.routed_experts: {error}") from error
    return Prefix(ids, list(state.log_probs), spans, routes)


def _ids(field: str, values: Sequence[int]) -> list[int]:
    if values and min(values) < 0:
        raise invalid(f"{field}: {min(values)} is no id; give ids of the model's vocabulary")
    return list(values)


def _ordinal(field: str, value: int) -> int:
    check_number(field, value)
    return value


def check_pools(pools: Sequence[rollout_pb2.EnvironmentPool]) -> None:
    """Raises INVALID for an opening that gives no environment, or one that is not whole."""
    if not pools:
        raise invalid("pools: give at least one pool of environments")
    for pool in pools:
        if pool.count < 1 or not (pool.address and pool.pool and pool.pool_incarnation and pool.task):
            raise invalid(
                f"pools: {pool.pool!r} needs address, pool, pool_incarnation, task and a count from 1"
            )
    names = [(pool.address, pool.pool) for pool in pools]
    if len(set(names)) < len(names):
        raise invalid("pools: a pool is named twice")
