"""Settled groups from messages to the trainer's own records. Checks that they are well formed; decides nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import msgspec
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_schema.sections.generating import SamplingSection
from headrace_servicekit.rpc.digests import digest_bytes, set_digest, trajectory_digest
from headrace_servicekit.rpc.requests import check_enum
from headrace_servicekit.rpc.trajectories import turn_roles, unpack_routes, unpack_top

from headrace_trainer.errors import invalid
from headrace_trainer.learning.pictures import place_images
from headrace_trainer.learning.samples import Group, Image, Sample, Trajectory, Turn

if TYPE_CHECKING:
    from headrace_modelkit.pictures import ImageReader


class RowReader(Protocol):
    """Reads rows that the data gives."""

    def read(self, given_json: str, files: Mapping[str, Image], where: str) -> tuple[Sample, ...]:
        """The samples of a `GivenAnswer`. Raises Refusal INVALID, which says where it is."""


_SETTLED = frozenset(
    {
        common_pb2.FINISH_REASON_EOS,
        common_pb2.FINISH_REASON_STOP,
        common_pb2.FINISH_REASON_LENGTH,
        # Of conversations with an environment:
        common_pb2.FINISH_REASON_TERMINATED,
        common_pb2.FINISH_REASON_TRUNCATED,
        common_pb2.FINISH_REASON_TIMED_OUT,
    }
)


def read_group(
    message: trainer_pb2.SettledGroup,
    sampling: SamplingSection,
    vocabulary: int,
    route_width: int = 0,
    teacher_top: int = 0,
    *,
    by_turn: bool = False,
    reader: ImageReader | None = None,
) -> Group:
    """A settled group. `route_width` are the bytes of a token's routes, 0 where they are not replayed.

    `teacher_top`: so many words that a teacher finds likeliest come with each sampled token. `by_turn`: its members
    come with rewards by turn. `reader` reads images.

    Raises Refusal INVALID or DIGEST_MISMATCH.
    """
    if not message.members:
        raise invalid(f"prompt {message.prompt_ordinal}: a group without members")
    members = tuple(
        _read_member(
            message.prompt_ordinal, member, sampling, vocabulary, route_width, teacher_top, by_turn=by_turn
        )
        for member in sorted(message.members, key=lambda member: member.trajectory.sample.sample_index)
    )
    told = {
        each.digest for m in message.members for branch in m.trajectory.branches for each in branch.images
    }
    if message.images or told:
        members = _with_images(message, members, told, reader)
    if len({member.sample_index for member in members}) != len(members):
        raise invalid(f"prompt {message.prompt_ordinal}: a sample is in the group twice")
    keys = [(message.prompt_ordinal, m.sample_index, m.attempt, m.body_digest) for m in members]
    return Group(message.prompt_ordinal, members, set_digest(keys), message.rated)


def read_given_group(message: trainer_pb2.SettledGroup, reader: RowReader) -> Group:
    """A group of answers that the data gives. Raises Refusal INVALID or DIGEST_MISMATCH."""
    prompt = message.prompt_ordinal
    files = _files(message, f"prompt {prompt}")
    members = tuple(
        Trajectory(
            sample_index=each.trajectory.sample.sample_index,
            attempt=each.trajectory.attempt,
            body_digest=each.trajectory.body_digest,
            reward=each.reward,
            samples=reader.read(each.trajectory.branches[0].given_json, files, where),
            masked=each.masked,
        )
        for each in sorted(message.members, key=lambda member: member.trajectory.sample.sample_index)
        for where in [check_settled(prompt, each.trajectory, _SETTLED, "given answers")]
    )
    keys = [(prompt, m.sample_index, m.attempt, m.body_digest) for m in members]
    return Group(prompt, members, set_digest(keys))


def is_given(trajectory: common_pb2.Trajectory) -> bool:
    """Whether the data gives it."""
    return len(trajectory.branches) == 1 and bool(trajectory.branches[0].given_json)


def _files(message: trainer_pb2.SettledGroup, where: str) -> dict[str, Image]:
    if any(image.digest != digest_bytes(image.data) for image in message.images):
        raise invalid(f"{where}: an image has not its digest", "DIGEST_MISMATCH")
    return {image.digest: Image(image.digest, image.data) for image in message.images}


def _with_images(
    message: trainer_pb2.SettledGroup,
    members: tuple[Trajectory, ...],
    told: set[str],
    reader: ImageReader | None,
) -> tuple[Trajectory, ...]:
    """The members with the images that they were made with, and numbers of their own for these images' tokens."""
    where = f"prompt {message.prompt_ordinal}"
    if reader is None:
        raise invalid(f"{where} has images, and the run's model reads none")
    files = _files(message, where)
    if told != files.keys():
        raise invalid(f"{where}: its samples were made with other images", "DIGEST_MISMATCH")
    sent = {each.trajectory.sample.sample_index: each.trajectory for each in message.members}
    found = []
    for member in members:
        try:
            samples = [
                _pictured(sample, [(files[each.digest], each.start) for each in own.images], reader)
                for sample, own in zip(member.samples, sent[member.sample_index].branches, strict=True)
            ]
        except ValueError as error:
            raise invalid(f"{where}: sample {member.sample_index}: {error}") from error
        found.append(replace(member, samples=tuple(samples)))
    return tuple(found)


def _pictured(sample: Sample, placed: Many[tuple[Image, int]], reader: ImageReader) -> Sample:
    """A sample with its images. Raises ValueError."""
    images, starts = [image for image, _ in placed], [start for _, start in placed]
    tokens = place_images(sample.tokens, images, reader, starts)
    return msgspec.structs.replace(sample, tokens=tokens, images=tuple(dict.fromkeys(images)))


def read_sequence(message: common_pb2.Trajectory, sampling: SamplingSection, vocabulary: int) -> Sample:
    """A trajectory to be scored. Raises Refusal INVALID."""
    if len(message.branches) != 1:
        raise invalid(f"{_name(message)} has {len(message.branches)} branches, and one is scored at a time")
    (branch,) = message.branches
    if branch.images:
        raise invalid(f"{_name(message)} has images, which are not sent to be scored")
    return _read_branch(branch, _name(message), sampling, vocabulary)


def check_settled(prompt: int, trajectory: common_pb2.Trajectory, reasons: frozenset[int], what: str) -> str:
    """How the trajectory is called. Raises Refusal INVALID or DIGEST_MISMATCH unless it ended with one of `reasons`."""
    where = _name(trajectory)
    if trajectory.sample.prompt_ordinal != prompt:
        raise invalid(f"{where} is in the group of prompt {prompt}")
    if trajectory.finish_reason not in reasons:
        check_enum(f"{where}: finish_reason", common_pb2.FinishReason, trajectory.finish_reason)
        reason = common_pb2.FinishReason.Name(trajectory.finish_reason)
        raise invalid(f"{where} ended with {reason}: only {what} may be learned from")
    if trajectory_digest(trajectory) != trajectory.body_digest:
        raise invalid(f"{where}: its content does not have its body_digest", "DIGEST_MISMATCH")
    return where


def _read_member(
    prompt: int,
    message: trainer_pb2.SettledTrajectory,
    sampling: SamplingSection,
    vocabulary: int,
    route_width: int,
    teacher_top: int,
    *,
    by_turn: bool,
) -> Trajectory:
    trajectory = message.trajectory
    where = check_settled(prompt, trajectory, _SETTLED, "finished answers")
    # What carries no loss, such as a greedy baseline, may be sampled in any way.
    sampled_from = None if message.masked else sampling
    if not trajectory.branches:
        raise invalid(f"{where} has no branches; an answer has one")
    samples = [
        _read_branch(branch, where, sampled_from, vocabulary, route_width, teacher_top)
        for branch in trajectory.branches
    ]
    return Trajectory(
        sample_index=trajectory.sample.sample_index,
        attempt=trajectory.attempt,
        body_digest=trajectory.body_digest,
        reward=message.reward,
        samples=_with_turns(samples, message, where, by_turn=by_turn),
        truncated=trajectory.finish_reason == common_pb2.FINISH_REASON_LENGTH,
        masked=message.masked,
    )


def _with_turns(
    samples: list[Sample], message: trainer_pb2.SettledTrajectory, where: str, *, by_turn: bool
) -> tuple[Sample, ...]:
    """The samples with their turns, where credit goes by turn or by role."""
    talk, rewards = message.trajectory.conversation, message.turn_rewards
    roles = turn_roles(talk) or [""] * len(talk.turns)
    if not (by_turn or any(roles)):
        return tuple(samples)
    if not talk.turns or len(talk.turns) != len(rewards) or len(roles) != len(rewards):
        raise invalid(f"{where}: {len(rewards)} rewards for {len(talk.turns)} turns; give one a turn")
    found: list[list[Turn]] = [[] for _ in samples]
    for place, (turn, role, reward) in enumerate(zip(talk.turns, roles, rewards, strict=True)):
        if not 0 <= turn.branch < len(samples):
            raise invalid(f"{where}: turn {place} is in branch {turn.branch}, and there are {len(samples)}")
        found[turn.branch].append(Turn(turn.tokens, reward, role, place))
    for number, (sample, turns) in enumerate(zip(samples, found, strict=True)):
        tokens = [turn.tokens for turn in turns]
        if min(tokens, default=0) < 0 or sum(tokens) != len(sample.trained):
            raise invalid(
                f"{where}: branch {number} has turns of {tokens} tokens, and {len(sample.trained)} were sampled"
            )
    by_branch = [[*dict.fromkeys(turn.role for turn in turns)] for turns in found]
    if any(roles) and sorted(by_branch) != [[role] for role in sorted({*roles})]:
        raise invalid(f"{where}: its branches have turns of the roles {by_branch}; give each role a branch")
    return tuple(
        msgspec.structs.replace(sample, turns=tuple(own)) for sample, own in zip(samples, found, strict=True)
    )


def _read_branch(
    message: common_pb2.Branch,
    where: str,
    sampling: SamplingSection | None,
    vocabulary: int,
    route_width: int = 0,
    teacher_top: int = 0,
) -> Sample:
    """A branch's sample; with `sampling`, the run's, what was drawn in another way is refused."""
    tokens: list[int] = []
    trained: list[int] = []
    log_probs: list[float] = []
    versions: list[int] = []
    drawn: list[tuple[float, int]] = []
    for segment in message.segments:
        if segment.WhichOneof("body") != "tokens":
            raise invalid(f"{where}: segments of actions need a policy that acts; this run trains on tokens")
        ids = [*segment.tokens.token_ids]
        if segment.policy_number:
            if sampling is not None:
                drawn.append((_drawn_at(segment.tokens, where, sampling), len(ids)))
            trained += range(len(tokens), len(tokens) + len(ids))
            log_probs += segment.tokens.log_probs
            versions += [segment.policy_number] * len(ids)
        tokens += ids
    if any(map(math.isnan, log_probs)):
        raise invalid(
            f"{where}: the engine told a log-prob that is NaN; leave log_probs out where there are none"
        )
    if len(log_probs) not in (0, len(trained)):
        raise invalid(f"{where}: {len(log_probs)} log-probs for {len(trained)} sampled ids")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise invalid(f"{where}: ids from {min(tokens)} to {max(tokens)}; the model's lie below {vocabulary}")
    if trained and trained[0] == 0:
        raise invalid(f"{where}: the first id is sampled; a prompt of at least one id must come before")
    alike = sampling is None or all(temperature == sampling.temperature for temperature, _ in drawn)
    temperatures = [] if alike else [at for at, count in drawn for _ in range(count)]
    try:
        routes = (
            unpack_routes(message.routed_experts, (len(tokens) - 1) * route_width) if route_width else b""
        )
    except ValueError as error:
        raise invalid(f"{where}: routed_experts: {error}") from error
    return Sample(
        tokens,
        trained,
        log_probs or [math.nan] * len(trained),
        teacher=_teacher(message, len(trained), where, vocabulary, teacher_top) if teacher_top else b"",
        teacher_top=teacher_top,
        routes=routes,
        temperatures=temperatures,
        versions=versions,
        cut=message.cut,
    )


def _teacher(message: common_pb2.Branch, sampled: int, where: str, vocabulary: int, top: int) -> bytes:
    try:
        ids, log_probs = unpack_top(message.teacher_top, sampled, top)
    except ValueError as error:
        raise invalid(f"{where}: teacher_top: {error}") from error
    if not (ids >= 0).all() or not (ids < vocabulary).all() or not (log_probs <= 0).all():
        raise invalid(f"{where}: teacher_top has ids that the model does not know, or log-probs above 0")
    return message.teacher_top


def _drawn_at(tokens: common_pb2.TokenSegment, where: str, sampling: SamplingSection) -> float:
    """The temperature of a segment. Raises Refusal INVALID where no log-prob of a trainer could be its own."""
    if not tokens.HasField("distribution"):
        return sampling.temperature
    found = tokens.distribution
    if not (math.isfinite(found.temperature) and found.temperature > 0):
        raise invalid(
            f"{where} was drawn at temperature {found.temperature:g}: what was not drawn by chance is not learned from"
        )
    # 0 is not told where 1 is the neutral value.
    for name, differs in (
        ("top_p", found.top_p not in (0.0, 1.0)),
        ("top_k", found.top_k > 0),
        ("min_p", found.min_p > 0),
        ("repetition_penalty", found.repetition_penalty not in (0.0, 1.0)),
    ):
        if differs:
            raise invalid(
                f"{where} was sampled with {name} {getattr(found, name):g}; the kept set does not travel, so this run "
                f"trains on the whole distribution: sample with top_p 1, top_k 0, min_p 0, repetition_penalty 1"
            )
    if found.log_prob_kind == common_pb2.LOG_PROB_KIND_RAW:
        raise invalid(f"{where}: log-probs are of the raw distribution; set the engine to processed ones")
    runs = math.isclose(found.temperature, sampling.temperature, rel_tol=1e-5)
    return sampling.temperature if runs else found.temperature


def _name(trajectory: common_pb2.Trajectory) -> str:
    return f"sample {trajectory.sample.sample_index} of prompt {trajectory.sample.prompt_ordinal}"
