"""What somebody submits, with all that its rules look at: read once, before they are asked.

What can be foreseen of a run that would teach little or the wrong thing is said then, and never refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.gpu_defaults import Default, told, with_defaults
from headrace_schema.images import MANY, READS
from headrace_schema.model_size import model_config, model_size, text_config, unread_config
from headrace_schema.problems import Impossible, nearest, problem
from headrace_schema.resources.views import CheckpointView, KeyProblemView, RunView
from headrace_schema.rules.features import Resolved
from headrace_schema.spec import RunSpec
from headrace_servicekit.contained.settings import FACET

from headrace_coordinator.api.submission.fleet_view import (
    FleetView,
    choose_engine,
    correction,
    hardware_defaults,
)
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.domain.devices.leases import is_gpu
from headrace_coordinator.suites import Suite

ENGINE_FEATURES = (
    *("deterministic", "lora", "inflight_update", "routed_experts", "images", "likeliest"),
    *("drafts_truncated", "learned_drafts", "top_p_after_others", "penalty_counts_prompt"),
)
"""What rows of the table ask of an engine."""
BACKEND_FEATURES = (
    *("adapters", "changing_ranks", "critic", "drafts", "helpers", "images", "policies", "shared_prefix"),
)
"""What rows of the table ask of a training backend."""
LOOKED_AT = 512
"""Training items, spread over all of them."""
CHARACTERS = 8
"""Most characters of text that a token stands for, on average, in any common tokenizer."""
ROUNDS = 100
"""Times that a run asks each item: far more than a data set is worth."""


def foreseen(spec: RunSpec, data: Dataset) -> Iterator[str]:
    """Sentences for people; none of environments, which make their own tasks."""
    if spec.environment is not None or not spec.has_scorers:
        return
    items, most = data.spread(LOOKED_AT), spec.sampling.max_new_tokens
    context = spec.model.max_context or text_config(spec.model).get("max_position_embeddings")
    if type(context) is int and context > 0:
        if most >= context:
            yield (
                f"sampling.max_new_tokens is {most}, and the model's context is {context} tokens: answers end where "
                "that does"
            )
        lengths = (
            sum(len(turn["content"] or "") for turn in each.messages) or len(each.question) for each in items
        )
        if (shortest := min(lengths, default=0)) > CHARACTERS * context:
            yield (
                f"every prompt has {shortest} characters or more, and the context {context} tokens: all would be "
                "dropped; raise model.max_context"
            )
    answers = [item.answer.strip() for item in items if item.answer.strip()]
    if len(answers) >= 16 and len(set(answers)) == 1:
        yield (
            f"every reference is {answers[0][:40]!r}: one constant answer would be right for all; "
            "see data.options.answer"
        )
    if 2 * (long := sum(len(answer) > CHARACTERS * most for answer in answers)) > len(answers):
        yield (
            f"{long} of {len(answers)} references are longer than {most} tokens can be: an answer that gives one whole "
            "is cut; raise sampling.max_new_tokens"
        )
    asked, there = spec.algorithm.prompts_per_step, data.train_size
    if asked > there:
        yield f"a step asks {asked} prompts of {there} items: it asks some of them more than once"
    if spec.steps * asked > ROUNDS * there:
        yield f"{spec.steps} steps ask each of {there} items {spec.steps * asked // there} times"


@dataclass(frozen=True)
class Origin:
    """Another run that a spec names, and its checkpoints, newest first."""

    name: str
    run: RunView | None
    """None: there is no run of this name."""
    known: Sequence[str] = ()
    """Runs that there are."""
    checkpoints: Sequence[CheckpointView] = ()
    saving: bool = False
    """It has saved checkpoints and goes on. With `checkpoint.keep: 1` the one that is known is deleted before the next
    one is: a fork that names no step begins with whichever is there when it starts."""

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints, newest first."""
        return [checkpoint.step for checkpoint in self.checkpoints]

    def unknown(self, key: str) -> KeyProblemView:
        """The problem of a run that does not exist."""
        close = nearest(self.name, self.known)
        fix = f"did you mean {close}?" if close else "name a run that `headrace run list` shows"
        return problem(key, f"there is no run {self.name}", fix)

    def no_checkpoint_of(self, key: str, step: int) -> KeyProblemView:
        """The problem of a step that no checkpoint is of."""
        steps = sorted(set(self.steps))
        close = min(steps, key=lambda each: abs(each - step))
        fix = f"the nearest is {close}; it has checkpoints of steps {', '.join(map(str, steps))}"
        return problem(key, f"run {self.name} has no checkpoint of step {step}", fix)


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation asks, and of which weights."""

    asked: EvaluationSpec
    suite: Suite
    model: str
    """The model as people name it."""
    checkpoint: CheckpointView | None = None
    """The checkpoint that the submission begins with; None: the model's own weights."""
    digest: str = ""
    """Digest of the weights, if known before they are read."""


@dataclass(frozen=True)
class Submission:
    """A run that somebody wants, or the run that carries out an evaluation."""

    spec: RunSpec
    fleet: FleetView
    data: Dataset | Impossible | None = None
    """The opened data, or why it cannot be opened; None where only numbers are asked about."""
    origin: Origin | None = None
    """The run that the spec forks, or whose checkpoint is evaluated."""
    evaluated: Evaluated | None = None
    follows: list[str] = field(default_factory=list)
    """The runs before it, each of which begins with the export of the one before."""

    @cached_property
    def _defaults(self) -> list[Default]:
        corrected = correction(self.spec, self.fleet) if self.evaluated is None else []
        return [*hardware_defaults(self.spec, self.engine, self.fleet), *corrected]

    @cached_property
    def engine(self) -> str:
        """The engine that the run takes."""
        return choose_engine(self.spec, self.fleet)[0]

    @property
    def registry(self) -> str:
        """Which of a trainer's registries the algorithm is in."""
        return "episode_algorithm" if self.spec.trains_robots else "algorithm"

    @cached_property
    def resolved(self) -> Resolved:
        """The spec with what the fleet, its data and a local model say of it."""
        seen = self.data.images if isinstance(self.data, Dataset) else ()
        wanted = set(seen or ("image",))
        size = model_size(text_config(self.spec.model))
        models = {"model.path": self.spec.model, "trainer.reference.path": self.spec.trainer.reference}
        kinds = {key: model_config(each).get("model_type") for key, each in models.items() if each}
        return Resolved(
            self.spec,
            engine=self.engine,
            instead=dict(self._instead()),
            images=f"the data has {' and '.join(MANY[kind] for kind in seen)}" if seen else "",
            in_data=bool(seen),
            blind={key: kind for key, kind in kinds.items() if kind and wanted - {*READS.get(kind, ())}},
            readers=" or ".join(family for family, reads in READS.items() if wanted <= {*reads}),
            plain=size is not None and not size.expert_parameters,
            gpus=any(map(is_gpu, self.fleet.devices)),
            asked=self.evaluated.asked.sampling if self.evaluated else None,
        )

    def _instead(self) -> Iterator[tuple[str, list[str]]]:
        plug_ins: list[tuple[str, str, str, str, Sequence[str]]] = [
            ("rollout.engine", "rollout", "engine", self.engine, ENGINE_FEATURES),
            ("trainer.backend", "trainer", "backend", self.spec.trainer.backend, BACKEND_FEATURES),
        ]
        if self.evaluated is None:
            for key, algorithm in self.spec.algorithms.items():
                plug_ins.append((key, "trainer", self.registry, algorithm.name, ("off_policy",)))
        for key, kind, sort, name, features in plug_ins:
            for needs in features:
                if (others := self.fleet.instead(kind, sort, name, needs)) is not None:
                    yield f"{key}:{needs}", others

    @cached_property
    def note(self) -> str:
        """What was decided for the spec (an engine that is left to the fleet, defaults), and is foreseen."""
        data = None if self.evaluated or not isinstance(self.data, Dataset) else self.data
        seen = foreseen(self.spec, data) if data is not None else ()
        chosen = choose_engine(self.spec, self.fleet)[1]
        walls = (
            f"users' code of {kind} has {each}"
            for kind in ("reward", "simulator")
            for each in sorted(self.fleet.names(kind, FACET))
        )
        return "; ".join(filter(None, (chosen, told(self._defaults), self._unread(), *seen, *walls)))

    def _unread(self) -> str:
        """That defaults know nothing of a hub's model, where its configuration is not to be had."""
        path = self.spec.model.path
        if not self._defaults or not (why := unread_config(self.spec.model)):
            return ""
        return (
            f"model.path: config.json of {path} is not in the coordinator's Hugging Face cache, and {why}: these are "
            f"defaults of a model of unknown size, on one GPU an engine; run `hf download {path} config.json` there, "
            "or name a directory"
        )

    @cached_property
    def settled(self) -> RunSpec:
        """The spec with the engine in place of `auto`, the defaults that its hardware has, and TIS where due."""
        rollout = self.spec.rollout.model_copy(update={"engine": self.engine})
        return with_defaults(self.spec.model_copy(update={"rollout": rollout}), self._defaults)
