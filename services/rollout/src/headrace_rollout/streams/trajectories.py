"""Finished answers and conversations as trajectories, with the texts that people read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING

from headrace.common.v1 import common_pb2
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.trajectories import pack_routes

from headrace_rollout.engines.samples import (
    GIVEN,
    Branch,
    Conversation,
    Distribution,
    Finish,
    Stream,
    TrajectoryUpdate,
)
from headrace_rollout.wire import distribution_message, fill_key

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
