"""What a robot policy imitates: moments of demonstrations, which a data set on disk holds.

Numbers of all moments are in memory; pictures are decoded as moments are taken. Knows no optimizer.
Shapes: N moments, M moments that a policy reads at once, H actions of its horizon, A numbers of an action.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from headrace_schema.openings import TrainerConfig
from headrace_trainer.errors import Refusal, invalid
from torch import Tensor
from typing_extensions import override

from headrace_robots import LOG
from headrace_robots.policies.directory import policy_of
from headrace_robots.policies.language import instruction_encoder, rendered
from headrace_robots.policies.policy import ACTIONS, Observation
from headrace_robots.trainer.backend.episodes import Chunks

if TYPE_CHECKING:
    from headrace_robots.demonstrations import Demonstrations
    from headrace_robots.films import Films
    from headrace_robots.policies.policy import PolicyConfig, RobotPolicy

KEY, SOURCE_KEY = "trainer.warmup.demonstrations", "data.options.path"
"""Of a warm-up, and of a run that imitates alone."""
IMITATION = "sft"
"""The algorithm of a run that imitates alone."""
MIB = 1 << 20


@dataclass(frozen=True)
class Moments(Chunks):
    """What was seen at each moment, and under ACTIONS the (N, H, A) actions that came next.

    `valid_NC` says which of the H there are. `firsts` is the first moment of each episode, and N.
    """

    data: Demonstrations
    films: Films
    cameras: Sequence[str]
    firsts: Sequence[int]
    stacked: int
    key: str
    """Which names the data set in the spec."""

    def number(self, episode: int, step: int) -> int:
        """Of the moment at a step of an episode. Raises Refusal INVALID where there is none."""
        known = 0 <= episode < len(self.firsts) - 1
        if not known or not 0 <= step < self.firsts[episode + 1] - self.firsts[episode]:
            reason = f"has no moment {step} of episode {episode}, which a row names: it has changed"
            raise refused(reason, self.key)
        return self.firsts[episode] + step

    @override
    def take(self, index: Tensor, device: torch.device) -> Chunks:
        from headrace_robots.demonstrations import DemonstrationsNotReadable

        firsts_N = torch.tensor(self.firsts)
        episodes_B = torch.searchsorted(firsts_N, index, right=True) - 1
        steps_BM = (index - firsts_N[episodes_B])[:, None] + torch.arange(1 - self.stacked, 1)
        places = episodes_B[:, None].expand_as(steps_BM).flatten().tolist()
        wanted = list(zip(places, steps_BM.clamp(min=0).flatten().tolist(), strict=True))
        images = {}
        try:
            for camera in self.cameras:
                taken = self.data.take(self.films, camera, wanted)
                taken = taken.view(-1, self.stacked, *taken.shape[1:])
                images[camera] = taken.permute(0, 2, 3, 1, 4).flatten(3)
        except DemonstrationsNotReadable as error:
            raise refused(str(error), self.key) from error
        return self._taken(index, replace(self.observation.take(index), images=images), device)


def check_demonstrations(config: TrainerConfig) -> None:
    """Raises Refusal INVALID where the demonstrations of a run cannot be read, or are of another robot."""
    policy, warmup = policy_of(config.model), config.trainer.warmup
    imitates = config.algorithm.name == IMITATION
    if policy is None or not (warmup.steps or warmup.demonstrations or imitates):
        return
    if imitates and not warmup.demonstrations:
        raise invalid("data.source: a robot policy imitates demonstrations; set lerobot", key="data.source")
    data, key = open_demonstrations(config, policy), key_of(config)
    sizes = {
        "numbers of an action": (data.action_size, policy.bounds.size),
        "numbers of a state": (data.state_size * policy.moments, policy.state_numbers),
    }
    for what, (given, wanted) in sizes.items():
        if wanted and given != wanted:
            raise refused(
                f"has {given} {what}, and the policy {wanted}; give demonstrations of this robot", key
            )
    if warmup.fps and data.fps != warmup.fps:
        reason = f"has {data.fps:g} steps a second, and {warmup.fps:g} are wanted"
        raise refused(f"{reason}; give demonstrations at that rate", key)
    read = (getattr(policy, "height", None), getattr(policy, "width", None))
    for camera, size in data.picture_sizes.items():
        if all(read) and size != read:
            shown, own = (" x ".join(map(str, each)) for each in (size, read))
            reason = f"has pictures of {shown} from camera {camera!r}, and the policy reads {own}"
            raise refused(f"{reason}; give height and width of the demonstrations to the policy", key)


def read_demonstrations(config: TrainerConfig, policy: RobotPolicy) -> Moments:
    """Every moment of the demonstrations. Raises Refusal INVALID."""
    from headrace_robots.demonstrations import DemonstrationsNotReadable

    data, warmup = open_demonstrations(config, policy.config), config.trainer.warmup
    encode = instruction_encoder(policy.config, config.model.path)
    count, stacked = min(len(data), warmup.episodes or len(data)), policy.config.moments
    try:
        shown = [data.numbers(place) for place in range(count)]
    except DemonstrationsNotReadable as error:
        raise refused(str(error), key_of(config)) from error
    horizons = [each.horizons(policy.horizon) for each in shown]
    seen = [each.stacked(stacked) if stacked > 1 else each for each in shown]
    states = [each.state_TS for each in seen if each.state_TS is not None]
    prompts = [encode(rendered(config.instruction, each.task)) for each in shown]
    lengths = [len(each.action_TA) for each in shown]
    films = data.films(warmup.cache_mib * MIB)
    if data.picture_bytes > films.kept.most_bytes:
        whole, kept = data.picture_bytes / MIB, warmup.cache_mib
        LOG.info("pictures of demonstrations are %.0f MiB: at most %d MiB are kept in memory", whole, kept)
    return Moments(
        Observation(
            torch.cat(states) if states else None,
            prompts=tuple(
                prompt
                for prompt, length in zip(prompts, lengths, strict=True)
                if prompt
                for _ in range(length)
            ),
        ),
        {ACTIONS: torch.cat([actions for actions, _ in horizons])},
        torch.cat([valid for _, valid in horizons]),
        data=data,
        films=films,
        cameras=policy.config.cameras,
        firsts=[0, *accumulate(lengths)],
        stacked=stacked,
        key=key_of(config),
    )


def drawn_moments(seed: int, step: int, batch: int, count: int) -> list[int]:
    """The moments of a supervised step, none of them twice; the same on every rank."""
    return random.Random(f"{seed}/warmup/{step}").sample(range(count), min(batch, count))


def noise_seed(seed: int, *place: int) -> int:
    """What the noise of a moment's loss is drawn from, for policies whose loss is drawn."""
    told = "/".join(map(str, (seed, "warmup", *place))).encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=7).digest(), "big")


def open_demonstrations(config: TrainerConfig, policy: PolicyConfig) -> Demonstrations:
    """The data set of a run. Raises Refusal INVALID."""
    key, warmup = key_of(config), config.trainer.warmup
    try:
        from headrace_robots.demonstrations import Demonstrations, DemonstrationsNotReadable
    except ImportError as error:
        raise refused(
            f"reading them needs pip install 'headrace-robots[demonstrations]' ({error})", key
        ) from error
    directory = Path(warmup.demonstrations)
    if not directory.is_dir():
        raise refused(
            f"there is no {str(directory)!r} where the trainer runs; `headrace demonstrations collect` writes one, and "
            "a path in a spec is relative to the spec or to where the command runs",
            key,
        )
    if strange := sorted({*warmup.cameras} - {*policy.cameras}):
        cameras = key.rpartition(".")[0] + ".cameras"
        reason = f"the policy has no camera {strange[0]!r}, only {list(policy.cameras)}"
        raise invalid(f"{cameras}: {reason}", key=cameras)
    try:
        return Demonstrations(directory, policy.cameras, warmup.cameras)
    except DemonstrationsNotReadable as error:
        raise refused(str(error), key) from error


def key_of(config: TrainerConfig) -> str:
    """The key that names a run's demonstrations."""
    return SOURCE_KEY if config.algorithm.name == IMITATION else KEY


def refused(reason: str, key: str = KEY) -> Refusal:
    """What is said of a data set that cannot be taken."""
    return invalid(f"{key}: {reason}", key=key)
