"""The evaluation spec: a model, or a checkpoint of a run, on the items of a suite.

Validates shapes and combinations. What only the coordinator knows (suites, runs, checkpoints, the fleet) is checked
at submission.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, model_validator

from headrace_schema.problems import Impossible, problem
from headrace_schema.references import refuse_literals
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.base import (
    FEW,
    MANY,
    Count,
    CountOrZero,
    Section,
    Seed,
    Share,
    Thousands,
    Tokens,
)
from headrace_schema.sections.generating import (
    MAX_UNANSWERED,
    ModelSection,
    PromptSection,
    RolloutSection,
)
from headrace_schema.sections.running import LimitsSection, SchedulingSection
from headrace_schema.sections.scoring import RewardSection

MODE = re.compile(r"greedy|(avg|pass|maj)@([1-9][0-9]{0,5})")


class SuiteSection(Section):
    """What is asked, and how answers are judged."""

    name: str = Field(
        description="name of a suite: reasoning_gym, gsm8k, math500, aime24, aime25, gpqa_diamond, items, episodes"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="options of the suite")
    limit: Count | None = Field(
        default=None, description="ask only so many items, always the same ones; default: all"
    )


class EvaluatedCheckpoint(Section):
    """A checkpoint of a run, in place of the model's own weights."""

    run: Annotated[str, Field(min_length=1)] = Field(description="id of the run that made the checkpoint")
    step: CountOrZero | None = Field(
        default=None, description="step of the checkpoint; default: the newest one when it is submitted"
    )
    policy: str = Field(
        default="", description="one of the policies of the run (policies.NAME); default: the run's own one"
    )


class AnswerSection(Section):
    """How answers are sampled. Unlike a run's, the distribution may be truncated: nothing is trained on it."""

    temperature: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="0 takes the likeliest token each time"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="sample from the likeliest tokens of so much mass"
    )
    top_k: CountOrZero = Field(default=0, description="sample from so many tokens; 0: from all")
    min_p: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="leave out tokens less likely than this share of the likeliest"
    )
    repetition_penalty: PositiveFloat = Field(default=1.0, description="1: none")
    max_new_tokens: Tokens = Field(default=64, description="longest answer in tokens")
    stop: list[str] = Field(
        default_factory=list, max_length=FEW, description="texts that end an answer and are cut off"
    )


class EvaluationSpec(Section):
    """One evaluation."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")] = Field(
        default="eval", description="begins the evaluation's id"
    )
    seed: Seed = Field(default=0, description="of all sampling")
    deterministic: bool = Field(
        default=False, description="same seed, same answers, whatever else is decoded beside them; slower"
    )
    model: ModelSection | None = Field(
        default=None, description="the model; default: that of the checkpoint's run"
    )
    checkpoint: EvaluatedCheckpoint | None = Field(
        default=None, description="a run's checkpoint; default: the model's own weights"
    )
    suite: SuiteSection
    prompt: PromptSection | None = Field(default=None, description="default: the suite's")
    sampling: AnswerSection = AnswerSection()
    samples: Thousands = Field(default=1, description="answers to each item")
    modes: list[str] = Field(
        default_factory=list,
        max_length=FEW,
        description="figures to report: greedy, avg@K, pass@K, maj@K; default: greedy, or all three with K = samples",
    )
    pass_reward: float = Field(default=1.0, description="reward from which an answer counts as passed")
    max_unanswered: Share = Field(default=0.25, description=MAX_UNANSWERED)
    reward: RewardSection | None = Field(default=None, description="default: the suite's scorers")
    rollout: RolloutSection = RolloutSection()
    devices: list[str] = Field(
        default_factory=list,
        max_length=MANY,
        description="devices that generate; default: those of its rollout instances",
    )
    scheduling: SchedulingSection = SchedulingSection()
    limits: LimitsSection = LimitsSection()

    @property
    def wanted_modes(self) -> list[str]:
        """The modes, the default filled in."""
        if self.modes:
            return self.modes
        if self.samples == 1:
            return ["avg@1" if self.sampling.temperature else "greedy"]
        return [f"{mode}@{self.samples}" for mode in ("avg", "pass", "maj")]

    @model_validator(mode="before")
    @classmethod
    def _without_secrets(cls, given: Any) -> Any:
        refuse_literals(given)
        return given

    @model_validator(mode="after")
    def _combinations(self) -> EvaluationSpec:
        problems = [*_source(self), *_samples(self), *_modes(self), *_rollout(self)]
        if problems:
            raise Impossible(problems)
        return self


def _source(spec: EvaluationSpec) -> list[KeyProblemView]:
    if spec.model is None and spec.checkpoint is None:
        return [problem("model", "there is nothing to evaluate", "give model.path, or checkpoint.run")]
    return []


def _samples(spec: EvaluationSpec) -> list[KeyProblemView]:
    if spec.samples > 1 and not spec.sampling.temperature:
        reason = f"at sampling.temperature: 0 all {spec.samples} answers to an item would be the same"
        return [problem("samples", reason, "set samples: 1, or sampling.temperature above 0")]
    return []


def _rollout(spec: EvaluationSpec) -> list[KeyProblemView]:
    if spec.rollout.helpers:
        reason = "an evaluation has no trainer on whose devices they could decode"
        return [problem("rollout.helpers", reason, "set rollout.helpers: 0, and rollout.instances higher")]
    return []


def _modes(spec: EvaluationSpec) -> list[KeyProblemView]:
    found = []
    for index, mode in enumerate(spec.modes):
        key, match = f"modes[{index}]", MODE.fullmatch(mode)
        if match is None:
            found.append(
                problem(key, f"{mode!r} is no mode", "use greedy, avg@K, pass@K or maj@K, as pass@4")
            )
        elif mode == "greedy" and spec.sampling.temperature:
            reason = f"answers are sampled at sampling.temperature: {spec.sampling.temperature:g}"
            found.append(problem(key, reason, "set it to 0, or use avg@1"))
        elif match[2] and int(match[2]) > spec.samples:
            reason = f"{mode} needs {match[2]} answers to each item and there are {spec.samples}"
            fix = f"set samples: {match[2]}, or use {match[1]}@{spec.samples}"
            found.append(problem(key, reason, fix))
    return found
