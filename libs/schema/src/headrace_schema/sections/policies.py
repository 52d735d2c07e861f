"""The section of a policy that learns beside the run's own one, in the same conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from headrace_schema.sections.base import Section
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import LoraSection, OptimizerSection, TrainerSection

PolicyName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,40}$")]
OWN = "policy"
"""What the run's own policy is called where policies are told apart."""


class PolicyAlgorithmSection(Section):
    """By which algorithm a policy learns; groups are those of the run."""

    name: str = Field(description="name in the trainer's registry")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the algorithm")


class PolicyTrainerSection(Section):
    """What of a policy's model is trained, and what it is compared with."""

    reference: ModelSection | None = Field(
        default=None, description="the model that the KL loss holds the policy to; as trainer.reference"
    )
    lora: LoraSection | None = Field(default=None, description="as trainer.lora")


class PolicySection(Section):
    """A policy that learns beside the run's own one. A section that is left out is the run's."""

    model: ModelSection | None = Field(default=None, description="default: model, as it begins")
    algorithm: PolicyAlgorithmSection | None = Field(default=None, description="default: algorithm")
    optimizer: OptimizerSection | None = Field(default=None, description="default: optimizer")
    trainer: PolicyTrainerSection | None = Field(default=None, description="default: trainer")
    own_devices: bool = Field(
        default=False,
        description="whether its engine has its own devices in each rollout instance (the same number as the run's own "
        "policy's), or shares that one's",
    )


def adapters_of(
    model: ModelSection, trainer: TrainerSection, policies: Mapping[str, PolicySection]
) -> dict[str, LoraSection]:
    """Of each policy by its name ("" is the run's own), where all train adapters of one base model; else none.

    >>> adapters_of(ModelSection(path="m"), TrainerSection(lora=LoraSection(rank=4)), {"b": PolicySection()}).keys()
    dict_keys(['', 'b'])
    """
    found = {"": trainer.lora}
    for name, policy in policies.items():
        if policy.model not in (None, model):
            return {}
        found[name] = trainer.lora if policy.trainer is None else policy.trainer.lora
    return {name: lora for name, lora in found.items() if lora is not None} if all(found.values()) else {}
