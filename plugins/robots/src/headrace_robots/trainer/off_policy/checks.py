"""What is wrong with a run that learns off policy, by key, before anything is loaded."""

from __future__ import annotations

from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from headrace_schema.openings import TrainerConfig
from headrace_trainer.errors import invalid

from headrace_robots.policies.directory import load_policy
from headrace_robots.policies.policy import PolicyConfig
from headrace_robots.trainer.off_policy.algorithm import OffPolicyAlgorithm
from headrace_robots.trainer.off_policy.plugins import PERSON

HEADS = {"sac": "squashed", "rlpd": "squashed", "crossq": "squashed", "td3_bc": "deterministic"}
"""What the policy's head must be, where its actions are numbers; the others take any."""
CATEGORICAL = frozenset({"sac", "rlpd"})
"""Those of them that take categories too."""


def check_off_policy(config: TrainerConfig, policy: PolicyConfig, algorithm: OffPolicyAlgorithm) -> None:
    """Raises Refusal INVALID, naming the key."""
    name, options = algorithm.name, algorithm.options
    if policy.large:
        raise invalid(
            f"algorithm.name: {name} learns from the replay store, for policies of kind mlp and cnn; a policy of kind "
            f"{policy.kind} learns by ppo or grpo",
            key="algorithm.name",
        )
    _check_head(name, policy)
    if name == "recap" and not policy.conditioned:  # type: ignore[attr-defined]
        raise invalid(
            "model.policy.conditioned: recap tells the policy which actions were better than most; set "
            "model.policy.conditioned: true",
            key="model.policy.conditioned",
        )
    made = config.algorithm.prompts_per_step * config.algorithm.group_size
    if made < config.trainer.ranks:
        raise invalid(
            f"algorithm.prompts_per_step: {made} episodes a step for {config.trainer.ranks} ranks, which store "
            "some each; give at least trainer.ranks",
            key="algorithm.prompts_per_step",
        )
    if options.batch_size < config.trainer.ranks:
        raise invalid(
            f"algorithm.options.batch_size: {options.batch_size} transitions for {config.trainer.ranks} ranks; give "
            "each some",
            key="algorithm.options.batch_size",
        )
    if options.demonstrations_share and not config.trainer.warmup.demonstrations:
        raise invalid(
            f"trainer.warmup.demonstrations: {name} draws {options.demonstrations_share:g} of each batch from "
            "demonstrations; name a LeRobot data set, or set algorithm.options.demonstrations_share: 0",
            key="trainer.warmup.demonstrations",
        )
    if (expert := getattr(options, "expert", None)) is not None:
        _check_expert(expert, policy)


def _check_head(name: str, policy: Any) -> None:
    wanted = HEADS.get(name)
    if wanted is None or policy.head == wanted:
        return
    if policy.categories:
        whole = name in CATEGORICAL and len(policy.categories) == 1 and policy.chunk_length == 1
        if whole and policy.categories[0]:
            return
        raise invalid(
            f"algorithm.name: {name} takes actions of numbers"
            + (", or of one category drawn one at a time" if name in CATEGORICAL else "")
            + f"; this policy's categories are {list(policy.categories)}; take ppo, or iql",
            key="algorithm.name",
        )
    raise invalid(
        f"model.policy.head: {name} needs {wanted}, and it is {policy.head}; set model.policy.head: {wanted}",
        key="model.policy.head",
    )


def _check_expert(path: str, policy: PolicyConfig) -> None:
    key = "algorithm.options.expert"
    if not path:
        raise invalid(
            f"{key}: dagger imitates an expert; name a policy's directory, or {PERSON} for a real robot's operator",
            key=key,
        )
    if path == PERSON:
        return
    try:
        expert = load_policy(path)
    except ModelNotReadable as error:
        raise invalid(f"{key}: {error}", key=key) from error
    own = policy.bounds.size, policy.state_numbers, policy.chunk_length, policy.cameras
    other = expert.config
    found = other.bounds.size, other.state_numbers, other.chunk_length, other.cameras
    if own != found:
        raise invalid(
            f"{key}: {path!r} has {_spaces(found)}, and the policy {_spaces(own)}; give an expert of this robot",
            key=key,
        )


def _spaces(found: tuple[int, int, int, tuple[str, ...]]) -> str:
    actions, state, chunk, cameras = found
    return (
        f"{actions} numbers of an action, {state} of a state, chunks of {chunk} and cameras {list(cameras)}"
    )
