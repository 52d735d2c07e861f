"""Between messages and an engine's own nouns. Checks what came from outside; decides nothing else."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
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
    GIVEN,
    Branch,
    Conversation,
    Distribution,
    Finish,
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

FINISH_REASONS = {
    Finish.EOS: common_pb2.FINISH_REASON_EOS,
    Finish.STOP: common_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    Finish.PROMPT_TOO_LONG: common_pb2.FINISH_REASON_PROMPT_TOO_LONG,
    Finish.ERROR: common_pb2.FINISH_REASON_ERROR,
    Finish.TERMINATED: common_pb2.FINISH_REASON_TERMINATED,
    Finish.TRUNCATED: common_pb2.FINISH_REASON_TRUNCATED,
    Finish.TIMED_OUT: common_pb2.FINISH_REASON_TIMED_OUT,
}
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


def fill_trajectory(
    trajectory: common_pb2.Trajectory,
    output: TrajectoryUpdate,
    stream: Stream,
    codec: TextCodec,
    producer: str,
    *,
    raw_texts: bool = False,
) -> None:
    """Fills a trajectory from a finished update.

    `raw_texts`: with its texts and their special tokens.
    """
    assert output.finish is not None and output.whole is not None
    fill_key(trajectory.sample, output.key)
    trajectory.attempt = output.attempt
    distribution = stream.distribution.greedy if output.greedy else stream.distribution
    if (talk := output.talk) is not None:
        lengths = _turn_lengths(talk, codec)
        text = _fill_talk(trajectory.conversation, talk)
        for branch in talk.branches:
            filled = trajectory.branches.add(cut=branch is talk.cut and output.finish is Finish.LENGTH)
            _fill_branch(filled, branch, distribution, lengths.get(id(branch), []))
    else:
        text, own = codec.decode_with_lengths(output.whole.token_ids)
        _fill_branch(trajectory.branches.add(), _answered(output), distribution, own)
        trajectory.branches[0].cut = output.finish is Finish.LENGTH
    trajectory.branches[0].routed_experts = pack_routes(output.whole.routes)
    trajectory.branches[0].teacher_top = output.teacher_top
    trajectory.finish_reason = FINISH_REASONS[output.finish]
    trajectory.producer = producer
    # Before the texts and the images' files, which no digest covers.
    trajectory.body_digest = digest_bytes(trajectory.SerializeToString(deterministic=True))
    if talk is not None:  # of a prompt the coordinator has them
        for digest, data in {digest_bytes(image.data): image.data for image in output.images}.items():
            trajectory.images.add(digest=digest, data=data)
    trajectory.completion_text = text
    if raw_texts:
        trajectory.raw_prompt_text = codec.decode(output.prompt_ids, skip_special_tokens=False)
        trajectory.raw_completion_text = codec.decode(output.whole.token_ids, skip_special_tokens=False)


SHOWN_CHARACTERS = 1 << 16
"""Of all parts of a trajectory's `branch_texts`."""


def fill_branch_texts(trajectory: common_pb2.Trajectory, codec: TextCodec) -> None:
    """Adds what the model read; of an answer its prompt alone, as its text is there."""
    talk = trajectory.HasField("conversation")
    most = SHOWN_CHARACTERS // max(1, sum(len(branch.segments) for branch in trajectory.branches))
    for branch in trajectory.branches:
        parts = trajectory.branch_texts.add().parts
        runs = groupby(branch.segments if talk else branch.segments[:1], lambda each: each.policy_number > 0)
        for own, segments in runs:
            if own and not parts:
                parts.append("")
            ids = [token for each in segments for token in each.tokens.token_ids]
            parts.append(_middle_cut(codec.decode(ids, skip_special_tokens=False), most))


def _middle_cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    left_out = len(text) - most
    return f"{text[: most // 2]}\n[… {left_out} characters …]\n{text[len(text) - most // 2 :]}"


def _answered(output: TrajectoryUpdate) -> Branch:
    """The branch of an answer."""
    assert output.whole is not None
    whole = output.whole
    spans = [*whole.spans]
    drawn: list[Distribution | None] = [None] * len(spans)
    images = [*output.images]
    return Branch(output.prompt_ids, [*whole.token_ids], [*whole.log_probs], spans, drawn, images)


def _fill_branch(
    message: common_pb2.Branch, branch: Branch, distribution: Distribution, lengths: Sequence[int]
) -> None:
    """Fills in the prompt's segment, then one for each span. `lengths`: bytes of text that each of its tokens is."""
    message.segments.add().tokens.token_ids.extend(branch.prompt_ids)
    start = 0
    for (number, count), drawn in zip(branch.spans, branch.drawn, strict=True):
        segment, end = message.segments.add(policy_number=number), start + count
        segment.tokens.token_ids.extend(branch.tokens[start:end])
        if number > GIVEN:
            segment.tokens.log_probs.extend(branch.log_probs[start:end])
            segment.tokens.distribution.CopyFrom(distribution_message(drawn or distribution))
            segment.tokens.text_bytes.extend(lengths[start:end])
        start = end
    for image in branch.images:
        message.images.add(digest=digest_bytes(image.data), start=image.start)


def _turn_lengths(talk: Conversation, codec: TextCodec) -> dict[int, list[int]]:
    """By branch, bytes of its own turn's text that each id is, 0 for given ids; none where a turn's are unknown."""
    found = {id(branch): [0] * len(branch.tokens) for branch in talk.branches}
    places = {id(branch): iter(_sampled(branch)) for branch in talk.branches}
    for turn in talk.turns:
        own = [*islice(places[id(turn.branch)], turn.tokens)]
        _, lengths = codec.decode_with_lengths([turn.branch.tokens[place] for place in own])
        if len(lengths) != turn.tokens:
            return {}
        for place, length in zip(own, lengths, strict=True):
            found[id(turn.branch)][place] = length
    return found


def _sampled(branch: Branch) -> Iterator[int]:
    """Places of sampled tokens among those behind the prompt."""
    start = 0
    for number, count in branch.spans:
        if number > GIVEN:
            yield from range(start, start + count)
        start += count


def _fill_talk(message: common_pb2.Conversation, talk: Conversation) -> str:
    """Fills in what was said; returns it as text for people."""
    for role, content, files, keys, party, _ in talk.messages:
        images = [common_pb2.Image(digest=digest_bytes(file)) for file in files]
        message.messages.add(role=role, content=content, party=party, images=images, keys_json=keys)
    places = {
        id(each): place for listed in (talk.messages, talk.branches) for place, each in enumerate(listed)
    }
    for turn in talk.turns:
        message.turns.add(
            message=places[id(turn.message)],
            branch=places[id(turn.branch)],
            tokens=turn.tokens,
            reward=turn.reward,
        )
    message.success, message.failure = talk.success, talk.failure
    message.figures.update(talk.figures)
    return "\n".join(
        f"{f'{each.party} ({each.role})' if each.party else each.role}: {each.content}"
        for each in message.messages
    )


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
