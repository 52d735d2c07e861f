"""A run that learns from answers of a language model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_modelkit.classifier import body_weights, empty_judge, head_weights
from headrace_modelkit.critic import check_critic, critic_section
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.exporting import export_model, save_adapter
from headrace_modelkit.families.draft_files import add_draft, save_draft
from headrace_modelkit.families.drafts import DRAFT
from headrace_modelkit.families.mixtures import ExpertShape, expert_shape, no_shape
from headrace_modelkit.families.mtp_files import layers_beside, shared_names
from headrace_modelkit.families.routing import router_biases
from headrace_modelkit.loading import load_architecture, load_model, reads_images
from headrace_modelkit.lora import is_adapter, targets_problem
from headrace_modelkit.model_files import empty_model
from headrace_modelkit.pictures import ImageReader
from headrace_modelkit.processors import copy_processor, load_images
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.weights import CheckpointNames, state_tensors
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.episodes import NO_BODIES, Bodies
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file
from typing_extensions import override

from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import (
    REFERENCE_LOG_PROBS,
    Algorithm,
    Barrier,
    balance_loss_of,
    bias_rate_of,
    judge_of,
    replays_routing,
    teacher_top_of,
    turn_credit_of,
)
from headrace_trainer.backends import build_backend, choose_backend
from headrace_trainer.backends._base import Backend
from headrace_trainer.backends.shared.fit import CRITIC
from headrace_trainer.errors import invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.kinds._base import AnyLearner, PolicyKind
from headrace_trainer.learning.given import GivenReader, positions_of
from headrace_trainer.learning.learner import BatchLearner, Learner
from headrace_trainer.learning.passes import StepRounds
from headrace_trainer.learning.reading import is_given, read_given_group, read_group, read_sequence
from headrace_trainer.learning.samples import Group, Sample

HEAD = f"{CRITIC}head."


class AnswersRun(PolicyKind):
    """A run that learns from answers of a language model."""

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config

    @override
    def check(self) -> Algorithm:
        config = self.config
        backend = choose_backend(config.trainer)
        algorithm = build_algorithm(config.algorithm)
        try:
            vocabulary = self.vocabulary
            backend.check(config, algorithm)
            if (critic := algorithm.critic) is not None and critic.path is not None:
                section = critic_section(config.model, critic.path)
                check_critic(config.model, section, "algorithm.options.critic_path")
            if form := judge_of(algorithm):
                empty_judge(config.model, form)
            self._check_parts()
            self._check_lora()
            if config.trainer.draft is not None:
                add_draft(empty_model(config.model), config.trainer.draft, config.model)
            self._check_experts(algorithm)
        except ModelNotReadable as error:
            raise invalid(str(error), "MODEL_NOT_READABLE") from error
        self._check_reference(algorithm, vocabulary)
        return algorithm

    @cached_property
    def vocabulary(self) -> int:
        """How many tokens the model knows. Raises ModelNotReadable."""
        return _vocabulary(self.config.model)

    @cached_property
    def positions(self) -> int | None:
        """The longest line of tokens that the model reads, where there is a limit. Raises ModelNotReadable."""
        return positions_of(self.config.model)

    @override
    def algorithm(self) -> Algorithm:
        return build_algorithm(self.config.algorithm)

    @override
    def backend(self, algorithm: Algorithm, ranks: TrainerGroup) -> Backend:
        return build_backend(self.config, algorithm, ranks)

    @override
    def learner(self, algorithm: Algorithm, rounds: StepRounds) -> AnyLearner:
        learner = BatchLearner if algorithm.barrier is Barrier.BATCH else Learner
        return learner(self.config, algorithm, rounds)

    @override
    def checkpoint_names(self) -> CheckpointNames:
        with torch.device("meta"):
            empty = load_model(self.config.model, weights=False)
            add_draft(empty, self.config.trainer.draft, self.config.model)
        return CheckpointNames.of(empty)

    @override
    def read_group(self, message: trainer_pb2.SettledGroup, bodies: Bodies = NO_BODIES) -> Group:
        if message.members and all(is_given(each.trajectory) for each in message.members):
            return read_given_group(message, self._given)
        return read_group(
            message,
            self.config.sampling,
            self.vocabulary,
            self._route_width,
            teacher_top_of(self.algorithm()),
            by_turn=self._by_turn,
            reader=self._images,
        )

    @cached_property
    def _images(self) -> ImageReader | None:
        """What reads the images of prompts. Raises ModelNotReadable."""
        return load_images(self.config.model)

    @cached_property
    def _given(self) -> GivenReader:
        """What reads answers that the data gives. Raises ModelNotReadable."""
        algorithm = self.algorithm()
        options = getattr(algorithm, "options", None)
        return GivenReader(
            self.config.model,
            all_turns=getattr(options, "turns", "last") == "all",
            judged=bool(judge_of(algorithm)),
            separator=getattr(options, "separator", ""),
        )

    @cached_property
    def _by_turn(self) -> bool:
        """Whether groups come with rewards by turn."""
        return turn_credit_of(self.algorithm()) is not None

    @cached_property
    def _route_width(self) -> int:
        """Bytes of a token's routes; 0 where they are not replayed."""
        if not replays_routing(self.algorithm()):
            return 0
        shape = expert_shape(load_architecture(self.config.model))
        assert shape is not None, "checked as the run opened"
        return shape.layers * shape.chosen * (1 if shape.experts <= 256 else 2)

    @override
    def read_sequences(self, messages: list[common_pb2.Trajectory]) -> list[Sample]:
        return [
            self._given.read(each.branches[0].given_json, {}, "a held-out row")[-1]
            if is_given(each)
            else read_sequence(each, self.config.sampling, self.vocabulary)
            for each in messages
        ]

    @override
    def weight_names(self) -> list[str]:
        empty = empty_model(self.config.model)
        add_draft(empty, self.config.trainer.draft, self.config.model)
        return [name for name, _ in state_tensors(empty)]

    @override
    def export(self, tensors: Iterator[tuple[str, torch.Tensor]], target: Path) -> None:
        """A Hugging Face directory in model.dtype, of a reward model a classifier. Adapters, which are merged into
        the weights, go by themselves into `adapter/`, in peft's format; an EAGLE-3 head goes into `draft/`, in vLLM's.
        Layers that predict several tokens stay beside the others, under the checkpoint's names.
        """
        config, lora, section = self.config, self.config.trainer.lora, self.config.trainer.draft
        learned: dict[str, torch.Tensor] = {}
        adapters: dict[str, torch.Tensor] = {}
        head: dict[str, torch.Tensor] = {}
        form = judge_of(self.algorithm())
        judge = empty_judge(config.model, form) if form else None
        model = empty_model(config.model)
        mtp = section if section is not None and section.form == "mtp" else None
        add_draft(model, mtp, config.model)
        shared = shared_names(model) if mtp else ()

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                if is_adapter(name):
                    adapters[name] = tensor.clone()
                elif name.startswith(HEAD):
                    head[name.removeprefix(HEAD)] = tensor.clone()
                elif name.startswith(DRAFT):
                    learned[name] = tensor.clone()
                else:
                    if name in shared:
                        learned[name] = tensor.clone()
                    yield name, tensor

        def judged() -> Iterator[tuple[str, torch.Tensor]]:
            assert judge is not None
            yield from body_weights(judge, weights())
            yield from head_weights(judge, head)

        def save_beside(directory: Path) -> None:
            if lora is not None:
                save_adapter(directory / "adapter", lora, adapters, config.model.path)
            if section is not None and not mtp:
                save_draft(directory / "draft", section, config.model, learned)
            _keep_generation_config(config.model, directory)
            if codec.images is not None:
                copy_processor(self.config.model, directory)

        codec = load_tokenizer(config.model)
        more = {} if judge else layers_beside(config.model, model, learned)
        given, own = judged() if judge else weights(), judge
        export_model(config.model, given, codec, target, beside=save_beside, model=own, more=more)

    def _check_parts(self) -> None:
        """Raises Refusal INVALID for a part to be frozen that the model has not; and ModelNotReadable."""
        frozen = self.config.trainer.freeze or []
        if not frozen:
            return
        parts = ["vision"] if reads_images(load_architecture(self.config.model)) else []
        if strange := [part for part in frozen if part not in parts]:
            known = f"its parts are {', '.join(parts)}" if parts else "it has none that freeze; leave it out"
            raise invalid(
                f"trainer.freeze: {self.config.model.path!r} has no part {strange[0]!r}, {known}",
                key="trainer.freeze",
            )

    def _check_lora(self) -> None:
        """Raises Refusal INVALID for layers that the model has not or that get no adapter; and ModelNotReadable."""
        trainer = self.config.trainer
        if trainer.lora is None:
            return
        with torch.device("meta"):
            model = load_model(self.config.model, weights=False)
        if problem := targets_problem(model, trainer.lora, vision=not trainer.freezes_vision):
            raise invalid(f"trainer.lora.targets: {problem}", key="trainer.lora.targets")

    def _check_experts(self, algorithm: Algorithm) -> None:
        """Raises Refusal INVALID, naming the key, for what only a model with experts can do; and ModelNotReadable."""
        wanted = {
            "balance_loss_coef": bool(balance_loss_of(algorithm)),
            "routing_replay": replays_routing(algorithm),
            "expert_bias_rate": bool(bias_rate_of(algorithm)),
        }
        chosen = [name for name, given in wanted.items() if given]
        if not chosen:
            return
        key = f"algorithm.options.{chosen[0]}"
        architecture = load_architecture(self.config.model)
        shape = expert_shape(architecture)
        if shape is None:
            raise invalid(
                f"{key}: {self.config.model.path!r} {no_shape(architecture)}; leave it out", key=key
            )
        if not shape.routed:
            raise invalid(
                f"{key}: {self.config.model.path!r} is a {architecture.model_type} model, whose routers weigh experts "
                "in a way that Headrace does not know; leave it out",
                key=key,
            )
        if wanted["expert_bias_rate"]:
            self._check_biases(shape)

    def _check_biases(self, shape: ExpertShape) -> None:
        """Raises Refusal INVALID where no biases can follow the experts' load."""
        key, path = "algorithm.options.expert_bias_rate", self.config.model.path
        found = router_biases(dict(state_tensors(empty_model(self.config.model))))
        if len(found) != shape.layers:
            count = f"{len(found)} of its {shape.layers} layers of experts" if found else "none of its layers"
            raise invalid(
                f"{key}: {path!r} has a bias to choose experts by in {count}; leave it out", key=key
            )
        if self.config.trainer.lora is not None:
            raise invalid(f"{key}: trainer.lora publishes adapters alone; leave one of the two out", key=key)

    def _check_reference(self, algorithm: Algorithm, vocabulary: int) -> None:
        """Raises Refusal INVALID or MODEL_NOT_READABLE for a reference that is not used, or that does not fit."""
        section, key, name = self.config.trainer.reference, "trainer.reference", self.config.algorithm.name
        if section is None:
            if algorithm.needs_teacher:
                raise invalid(f"{key}: {name} learns from a teacher; give its path", key=key)
            return
        top = teacher_top_of(algorithm)
        if top > vocabulary:
            key, fix = "algorithm.options.top_k", f"the nearest valid value is {vocabulary}"
            raise invalid(
                f"{key}: the model knows {vocabulary} tokens, and {top} are asked for; {fix}", key=key
            )
        if REFERENCE_LOG_PROBS not in algorithm.columns and not top:
            raise invalid(
                f"{key}: no option of {name} uses it; set kl_loss_coef above 0, or leave it out", key=key
            )
        try:
            own = _vocabulary(section)
        except ModelNotReadable as error:
            text = str(error).replace("model.path", f"{key}.path", 1)
            raise invalid(text, "MODEL_NOT_READABLE", key=f"{key}.path") from error
        if own < vocabulary:
            raise invalid(
                f"{key}.path: its vocabulary of {own} tokens is smaller than the policy's of {vocabulary}; give a "
                "model with the same tokenizer",
                key=f"{key}.path",
            )
        self._check_tokenizer(section, key)

    def _check_tokenizer(self, section: ModelSection, key: str) -> None:
        """Raises Refusal INVALID for a reference with another tokenizer: its log-probs would be of other texts."""
        try:
            known = load_tokenizer(section).tokenizer.get_vocab()
        except ModelNotReadable:
            return  # a directory of weights alone is read by the policy's
        own = load_tokenizer(self.config.model).tokenizer.get_vocab()
        other = next(
            (
                token
                for token in sorted(own, key=own.__getitem__)
                if known.get(token, own[token]) != own[token]
            ),
            None,
        )
        if other is not None:
            raise invalid(
                f"{key}.path: its tokenizer is another one: {other!r} is token {own[other]} of the policy's and "
                f"{known[other]} of its own; give a model with the policy's tokenizer, or imitate its answers with "
                "workflow: supervised",
                key=f"{key}.path",
            )


def _keep_generation_config(section: ModelSection, directory: Path) -> None:
    """Training does not change it: stop ids and sampling of the base come through byte for byte."""
    if section.gguf_file is not None:
        return
    missing: Any = {"_raise_exceptions_for_missing_entries": False}
    found = cached_file(section.path, GENERATION_CONFIG_NAME, revision=section.revision, **missing)
    if found is not None:
        shutil.copyfile(found, directory / GENERATION_CONFIG_NAME)


def _vocabulary(section: ModelSection) -> int:
    return int(load_architecture(section).get_text_config().vocab_size)
