"""What a robot policy imitates before its first episode: moments of demonstrations, which a data set on disk holds.

Knows no optimizer. Shapes: N moments, H actions of a policy's horizon, A numbers of an action.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING

from headrace_schema.openings import TrainerConfig
from headrace_trainer.errors import Refusal, invalid

from headrace_robots.policies.directory import policy_of
from headrace_robots.policies.language import Encode, instruction_encoder
from headrace_robots.policies.policy import ACTIONS, Observation
from headrace_robots.trainer.backend.episodes import Chunks, StepChunks

if TYPE_CHECKING:
    from headrace_robots.demonstrations import Demonstration, Demonstrations
    from headrace_robots.policies.policy import PolicyConfig, RobotPolicy

KEY = "trainer.warmup.demonstrations"


def check_demonstrations(config: TrainerConfig) -> None:
    """Raises Refusal INVALID where the demonstrations of a warm-up cannot be read, or are of another robot."""
    policy = policy_of(config.model)
    warmup = config.trainer.warmup
    if policy is None or not (warmup.steps or warmup.demonstrations):
        return
    data = open_demonstrations(config, policy)
    sizes = {
        "numbers of an action": (data.action_size, policy.bounds.size),
        "numbers of a state": (data.state_size * policy.moments, policy.state_numbers),
    }
    for what, (given, wanted) in sizes.items():
        if wanted and given != wanted:
            raise refused(f"has {given} {what}, and the policy {wanted}; give demonstrations of this robot")


def read_demonstrations(config: TrainerConfig, policy: RobotPolicy) -> Chunks:
    """Every moment of the demonstrations: what was seen, and under ACTIONS the (N, H, A) actions that came next.

    `valid_NC` says which of the H there are. All of them are held in memory. Raises Refusal INVALID.
    """
    from headrace_robots.demonstrations import DemonstrationsNotReadable

    data = open_demonstrations(config, policy.config)
    encode = instruction_encoder(policy.config, config.model.path)
    count = min(len(data), config.trainer.warmup.episodes or len(data))
    try:
        return StepChunks.of(
            [_moments(data[place], policy, encode, config.instruction) for place in range(count)]
        )
    except DemonstrationsNotReadable as error:
        raise refused(str(error)) from error


def drawn_moments(seed: int, step: int, batch: int, count: int) -> list[int]:
    """The moments of a supervised step, none of them twice; the same on every rank."""
    return random.Random(f"{seed}/warmup/{step}").sample(range(count), min(batch, count))


def noise_seed(seed: int, step: int, moment: int) -> int:
    """What the noise of a moment's loss is drawn from, for policies whose loss is drawn."""
    place = f"{seed}/warmup/{step}/{moment}".encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=7).digest(), "big")


def _moments(shown: Demonstration, policy: RobotPolicy, encode: Encode, template: str) -> Chunks:
    actions_THA, valid_TH = shown.horizons(policy.horizon)
    if (moments := policy.config.moments) > 1:
        shown = shown.stacked(moments)
    prompt = encode(_rendered(template, shown.task))
    prompts = (prompt,) * len(valid_TH) if prompt else ()
    return Chunks(Observation(shown.state_TS, shown.images, prompts), {ACTIONS: actions_THA}, valid_TH)


def _rendered(template: str, task: str) -> str:
    """`data.prompt.template` of a task: the coordinator has checked its places, and all of them tell the task."""
    return "".join(
        literal + ("" if name is None else task) for literal, name, _, _ in Formatter().parse(template)
    )


def open_demonstrations(config: TrainerConfig, policy: PolicyConfig) -> Demonstrations:
    """The data set of a run. Raises Refusal INVALID."""
    try:
        from headrace_robots.demonstrations import Demonstrations, DemonstrationsNotReadable
    except ImportError as error:
        raise refused(
            f"reading them needs pip install 'headrace-robots[demonstrations]' ({error})"
        ) from error
    directory = Path(config.trainer.warmup.demonstrations)
    if not directory.is_dir():
        raise refused(
            f"there is no {str(directory)!r} where the trainer runs; `headrace demonstrations collect` writes one, and "
            "a path in a spec is relative to the spec or to where the command runs"
        )
    try:
        return Demonstrations(directory, policy.cameras)
    except DemonstrationsNotReadable as error:
        raise refused(str(error)) from error


def refused(reason: str) -> Refusal:
    """What is said of a data set that cannot be taken."""
    return invalid(f"{KEY}: {reason}", key=KEY)
