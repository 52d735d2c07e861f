"""What a memory plan needs to know of a run's models, from their shapes alone. Loads no weight, knows no layout.

Activations are measured, not guessed: one layer and two of the model compute on torch's fake tensors, which have
shapes and no elements, and what autograd keeps of them is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from headrace_modelkit.critic import critic_section, load_critic
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.experts import take_routers
from headrace_modelkit.families.draft_files import add_draft
from headrace_modelkit.families.mixtures import expert_blocks
from headrace_modelkit.loading import DTYPES, body_of, load_architecture, load_model
from headrace_modelkit.logprobs import GPU_CHUNK_ELEMENTS
from headrace_modelkit.lora import (
    adapted_layers,
    adapter_of,
    add_adapters,
    compute_merged,
    is_adapter,
    targets_problem,
)
from headrace_modelkit.probing import BROKEN, breaks, in_words
from headrace_modelkit.quantized import quantized_bytes
from headrace_modelkit.vision import freeze_vision
from headrace_schema.openings import TrainerConfig
from headrace_schema.rules.learning import model_ranks
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import LoraSection, OptimizerSection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from typing_extensions import override

from headrace_trainer.algorithms._base import REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.backends.fsdp.float8 import copied_bytes
from headrace_trainer.backends.fsdp.layouts.towers import blocks_of, saved_bytes, towers_of
from headrace_trainer.backends.fsdp.loading import layers_of
from headrace_trainer.backends.shared.attention import of_one_width
from headrace_trainer.backends.shared.muon import hidden_matrices
from headrace_trainer.backends.shared.optimizer import moment_bytes

FP32 = 4


@dataclass(frozen=True)
class Unit:
    """Weights that are gathered together: of a layer, or of all that is in no layer."""

    learned: int
    frozen: int
    experts: int
    """How many of either are of experts, without their adapters."""
    expert_adapters: int
    """How many of those that learn are adapters of experts."""
    kept: int = 0
    """Bytes of what autograd keeps of one micro-batch here, without recomputation."""
    inputs: int = 0
    attended: int = 0
    """Bytes of what the flash kernel gives a micro-batch."""
    """Bytes of what recomputation keeps of that."""
    calls: int = 1
    """How often a micro-batch goes through."""
    coded: int = 0
    """How many of those that are frozen have codes in their place."""

    @property
    def again(self) -> int:
        """Bytes that come back where it is computed again, with gradients of about half as much at a time."""
        kept = self.kept // self.calls
        return kept + kept // 2

    def of_rank(self, expert_parallel: int) -> Unit:
        """With the experts of one rank of those that divide them."""
        if expert_parallel == 1 or not self.experts:
            return self
        experts, adapters = self.experts // expert_parallel, self.expert_adapters // expert_parallel
        away = self.experts - experts
        # Experts learn or are frozen as a whole: an adapter's weights are few.
        whole = self.learned >= self.experts
        learned = self.learned - (away if whole else self.expert_adapters - adapters)
        frozen = self.frozen - (0 if whole else away)
        return replace(self, learned=learned, frozen=frozen, experts=experts, expert_adapters=adapters)


@dataclass(frozen=True)
class Sizes:
    """What a plan needs to know of the models: weights by unit, and bytes of the activations of one micro-batch."""

    units: tuple[Unit, ...]
    """The last one is the root's."""
    head: int
    """Weights of the head, whether they learn or not."""
    tile: int
    """Logits that are there at once."""
    reference: int
    """Weights of the reference model that the run has beside the policy."""
    tensors: int
    """Elements of the two largest weights that follow each other."""
    merged: int
    """Elements of the largest tensor of experts that an adapter is merged into for a product, where it is."""
    widened: int
    """Elements of the input and the gradient at the output, together, of the widest linear layer with an adapter, where
    products are with merged weights: a backward has fp32 copies of them then. Or what fp8 copies take."""
    root_bytes: int = 4
    """Of an element of the root's gradient as it comes out of a backward."""
    answers: bool = True
    """Whether the leader keeps groups of answers."""
    moments: int = 0
    """Bytes of the optimizer's state; 0: of AdamW's, in fp32."""
    saved_moments: int = 0
    """As they are in a checkpoint."""
    coded_bytes: int = 0
    """Of codes and scales, on each rank, in place of the frozen weights that `Unit.coded` counts."""
    decoded: int = 0
    """Elements of the largest of these weights, which is decoded for a product."""

    @classmethod
    def of(cls, config: TrainerConfig, algorithm: Algorithm) -> Sizes:
        """Raises ModelNotReadable."""
        with torch.device("meta"):
            policy = load_model(config.model, weights=False)
            if config.trainer.freezes_vision:
                freeze_vision(policy, DTYPES[config.model.dtype])
            if config.trainer.lora is not None:
                vision = not config.trainer.freezes_vision
                add_adapters(policy, config.trainer.lora, config.seed, vision=vision)
            add_draft(policy, config.trainer.draft, config.model)
            bodies: list[nn.Module] = [policy]
            layers = layers_of(policy)
            plan = algorithm.critic
            if plan is not None and plan.own_model:
                critic = load_critic(critic_section(config.model, plan.path))
                bodies.append(critic)
                layers += layers_of(critic.body)
            reference = _reference_weights(config, algorithm)
        base, layer = _activations(config)
        base += _draft_activations(config)
        tokens = _tokens(config)
        text = policy.config.get_text_config()
        width = DTYPES[config.model.dtype].itemsize
        own = {"kept": layer, "inputs": tokens * text.hidden_size * width}
        if width < FP32 and not config.deterministic:  # others take no flash kernel
            heads = text.num_attention_heads
            size = getattr(text, "head_dim", None) or text.hidden_size // heads
            own["attended"] = tokens * heads * (size * width + FP32)
        units = [replace(unit_of(each), **own) for each in layers]
        units, base = _with_towers(config, policy, layers, units, base)
        in_fp8 = bool(config.trainer.backend_options.get("fp8"))
        copies = copied_bytes(layers, tokens) if in_fp8 else 0
        form = config.trainer.lora.quantization if config.trainer.lora is not None else None
        if form:
            units = [replace(unit, coded=sum(_coded(each))) for unit, each in zip(units, layers, strict=True)]
        coded = _coded(policy) if form else []
        moments, saved = _moments(config.optimizer, bodies)
        root = root_of(bodies, units, kept=base)
        return cls(
            (*units, root),
            text.vocab_size * text.hidden_size,
            min(GPU_CHUNK_ELEMENTS, tokens * text.vocab_size),
            reference,
            largest_two(policy),
            _largest_merged(policy) if config.deterministic else 0,
            tokens * widest_adapted(policy) if config.deterministic else copies // FP32,
            moments=moments,
            coded_bytes=sum(quantized_bytes(each, form) for each in coded) if form else 0,
            decoded=max(coded, default=0),
            saved_moments=saved,
        )

    @property
    def learned(self) -> int:
        """Weights that learn."""
        return sum(unit.learned for unit in self.units)

    @property
    def frozen(self) -> int:
        """Weights that do not."""
        return sum(unit.frozen for unit in self.units)


def _with_towers(
    config: TrainerConfig, policy: PreTrainedModel, layers: list[nn.Module], units: list[Unit], base: int
) -> tuple[list[Unit], int]:
    """Units whose towers' blocks keep what those do, and `base` with what is kept in towers outside of units."""
    towers, blocks = towers_of(config, _tokens(config)), blocks_of(policy)
    found = list(units)
    for kind, own in blocks.items():
        tower = towers.get(kind)
        places = [at for at, each in enumerate(layers) if any(each is block for block in own)]
        for at in places:
            sizes = (tower.block, tower.inputs) if tower is not None else (0, 0)
            found[at] = replace(found[at], kept=sizes[0], inputs=sizes[1], attended=0)
        if tower is not None:
            base += tower.outside + tower.block * (len(own) - len(places))
    return found, base


def _coded(module: nn.Module) -> list[int]:
    """Elements of each weight that has codes in its place."""
    return [each.weight.numel() for _, each in adapted_layers(module) if isinstance(each, nn.Linear)]


def _moments(optimizer: OptimizerSection, bodies: list[nn.Module]) -> tuple[int, int]:
    """Bytes of the state of what learns, of all ranks together, in memory and in a checkpoint."""
    hidden = hidden_matrices(bodies[0])
    learned = [
        (each, body is bodies[0] and name in hidden)
        for body in bodies
        for name, each in body.named_parameters()
        if each.requires_grad
    ]
    found = [moment_bytes(optimizer, each, is_hidden_matrix=matrix) for each, matrix in learned]
    return sum(own for own, _ in found), sum(saved for _, saved in found)


def root_of(bodies: Iterable[nn.Module], units: Iterable[Unit], kept: int) -> Unit:
    """What is in no layer."""
    whole = [unit_of(body) for body in bodies]
    of_layers = list(units)
    return Unit(
        sum(unit.learned for unit in whole) - sum(unit.learned for unit in of_layers),
        sum(unit.frozen for unit in whole) - sum(unit.frozen for unit in of_layers),
        0,
        0,
        kept,
    )


def largest_two(policy: nn.Module) -> int:
    """Elements of the two largest weights that follow each other."""
    return max(map(sum, pairwise([0, *(weight.numel() for weight in policy.parameters())])))


def unit_of(module: nn.Module) -> Unit:
    """The weights of a module."""
    weights = list(module.parameters())
    learned = sum(weight.numel() for weight in weights if weight.requires_grad)
    untyped: Any = module
    experts = [block.experts for block in expert_blocks(untyped)]
    named = [each for block in experts for each in block.named_parameters()]
    adapters = sum(weight.numel() for name, weight in named if is_adapter(name))
    own = sum(weight.numel() for _, weight in named) - adapters
    return Unit(learned, sum(weight.numel() for weight in weights) - learned, own, adapters)


def _largest_merged(policy: PreTrainedModel) -> int:
    adapted = {name for name, _ in adapted_layers(policy)}
    named = policy.named_parameters()
    return max(
        (own.numel() for name, own in named if own.dim() == 3 and adapter_of(name) in adapted), default=0
    )


def widest_adapted(policy: nn.Module) -> int:
    """Inputs and outputs, together, of the widest linear layer with an adapter."""
    linear = [layer for _, layer in adapted_layers(policy) if isinstance(layer, nn.Linear)]
    return max((layer.in_features + layer.out_features for layer in linear), default=0)


def _reference_weights(config: TrainerConfig, algorithm: Algorithm) -> int:
    """Of a model beside the policy. With adapters the policy is its own reference."""
    adapters = config.trainer.lora is not None and config.trainer.reference is None
    if REFERENCE_LOG_PROBS not in algorithm.columns or adapters:
        return 0
    section: ModelSection = config.trainer.reference or config.model
    return sum(parameter.numel() for parameter in load_model(section, weights=False).parameters())


def _activations(config: TrainerConfig) -> tuple[int, int]:
    """Bytes that autograd keeps of one micro-batch: outside of layers, and of each layer."""
    section = config.model
    try:
        with FakeTensorMode():
            one, two = (_kept_bytes(config, layers) for layers in (1, 2))
    except ModelNotReadable:
        raise
    except BROKEN as error:
        kind = load_architecture(section).model_type
        raise ModelNotReadable(breaks(section.path, kind, in_words(error), by="the trainer")) from error
    return one - (two - one), two - one


def _tokens(config: TrainerConfig) -> int:
    """Of a micro-batch on one rank: those that divide rows have a share each."""
    return -(-config.trainer.micro_batch_tokens // model_ranks(config.trainer))


def _kept_bytes(config: TrainerConfig, layers: int) -> int:
    model: Any = load_model(config.model, weights=False, layers=layers)
    if (lora := config.trainer.lora) is not None:
        vision = not config.trainer.freezes_vision
        add_adapters(model, _in_any_layer(lora, model, vision=vision), config.seed, vision=vision)
        if config.deterministic:
            compute_merged(model)
    take_routers(
        model
    )  # as the trainer computes experts; transformers' products take no fake tensors in fp32
    _attend_as_on_a_gpu(model)
    tokens = torch.zeros((1, _tokens(config)), dtype=torch.long, device="cpu")

    def compute() -> None:
        with _ExpertsOfAnyType():
            body_of(model)(input_ids=tokens, use_cache=False)

    return saved_bytes(model, compute)


def _draft_activations(config: TrainerConfig) -> int:
    """Bytes of what a head reads of one micro-batch, and of what autograd keeps where it is unrolled."""
    draft, tokens = config.trainer.draft, _tokens(config)
    if draft is None:
        return 0
    with FakeTensorMode():
        head = add_draft(load_model(config.model, weights=False, layers=1), draft, config.model)
        assert head is not None
        width = load_architecture(config.model).get_text_config().hidden_size
        embeds = torch.zeros(1, tokens, width, dtype=DTYPES[config.model.dtype], device="cpu")
        read = embeds.repeat(1, 1, len(head.layers))
        with _ExpertsOfAnyType():
            kept = saved_bytes(head, lambda: list(head.unrolled(read, embeds, draft.unrolled)))
    return kept + read.nbytes + embeds.nbytes


def _in_any_layer(lora: LoraSection, model: PreTrainedModel, *, vision: bool) -> LoraSection:
    """Targets that a model with fewer layers has: of a layer that it has not, those of the same name in all layers."""
    if isinstance(lora.targets, str):
        return lora
    alone = {target: lora.model_copy(update={"targets": [target]}) for target in lora.targets}
    found = [
        target.rpartition(".")[2] if targets_problem(model, own, vision=vision) else target
        for target, own in alone.items()
    ]
    # A first layer that is dense has no experts, which layers behind it have.
    there = [
        name
        for name in found
        if not targets_problem(model, lora.model_copy(update={"targets": [name]}), vision=vision)
    ]
    return lora.model_copy(update={"targets": there or "all-linear"})


def _attend_as_on_a_gpu(model: PreTrainedModel) -> None:
    """Its kernels keep queries, keys and values as they are, of as many heads as there are."""
    if not model._supports_attention_backend:
        return
    AttentionInterface.register(_ATTENTION, attend_by_flash)
    # Read by indexers alone: attention is causal.
    AttentionMaskInterface.register(_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.config._attn_implementation = _ATTENTION


def attend_by_flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for attention, by the flash kernel, whatever device the tensors name."""
    operations: Any = torch.ops.aten
    width = value.shape[-1]
    own = of_one_width(query, key, value)
    found = operations._scaled_dot_product_flash_attention(*own, 0.0, True)[0]
    return found[..., :width].transpose(1, 2).contiguous(), None


class _ExpertsOfAnyType(TorchFunctionMode):
    """torch's products of experts take bf16 alone where tensors are fake."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch._grouped_mm and args[0].dtype is not torch.bfloat16:
            operators: Any = torch.ops.transformers
            return operators.grouped_mm_fallback(*args[:2], given["offs"])
        return func(*args, **given)


_ATTENTION = "headrace_planned"
