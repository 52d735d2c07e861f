"""Bytes of a rank in each layout, from the models' shapes alone, and the first layout that fits. Loads no weight.

Activations are measured, not guessed: one layer and two of the model compute on torch's fake tensors, which have
shapes and no elements, and what autograd keeps of them is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from headrace_modelkit.critic import critic_section, load_critic
from headrace_modelkit.experts import expert_blocks, take_routers
from headrace_modelkit.loading import DTYPES, load_model
from headrace_modelkit.logprobs import GPU_CHUNK_ELEMENTS
from headrace_modelkit.lora import adapted_layers, adapter_of, add_adapters, is_adapter, targets_problem
from headrace_schema.openings import TrainerConfig
from headrace_schema.rules.learning import model_ranks
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import LoraSection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from headrace_trainer.algorithms._base import REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.backends.fsdp.layout import GPUS_PER_HOST, Layout, candidates
from headrace_trainer.backends.fsdp.sharding import layers_of
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.memory import COPY, MemoryPlan, Rooms, Tried, host_bytes, kept_bytes

FP32 = 4
MOMENTS_BYTES = 2 * FP32
MARGIN = 1.1
"""A layout is taken where so many times its bytes fit into a GPU: plans are true within a tenth, and a CUDA context,
communicators and what the allocator cannot use come to it."""


def choose_layout(
    config: TrainerConfig,
    algorithm: Algorithm,
    options: FsdpOptions,
    ranks: int,
    ranks_per_host: int,
    rooms: Rooms,
) -> tuple[Layout, MemoryPlan]:
    """The first layout that fits, or the smallest where none does, and why. Raises ModelNotReadable."""
    layout, plan = _chosen(config, algorithm, options, ranks, ranks_per_host, rooms)
    if plan.tried[-1].fits:
        return layout, plan
    for more in (2 * ranks, 4 * ranks, 8 * ranks, 16 * ranks):
        per_host = max(ranks_per_host, min(more, GPUS_PER_HOST))
        other, found = _chosen(config, algorithm, options, more, per_host, rooms)
        if found.tried[-1].fits:
            return layout, replace(plan, would_fit=f"trainer.ranks: {more} fits, with {other}")
    return layout, replace(plan, would_fit=None)


def _chosen(
    config: TrainerConfig,
    algorithm: Algorithm,
    options: FsdpOptions,
    ranks: int,
    ranks_per_host: int,
    rooms: Rooms,
) -> tuple[Layout, MemoryPlan]:
    sizes = _sizes(config, algorithm)
    tried: list[Tried] = []
    plans: list[tuple[int, Layout, MemoryPlan]] = []
    for layout in candidates(config, options, ranks, ranks_per_host, on_gpu=rooms.device is not None):
        plan = plan_memory(
            config,
            algorithm,
            sizes,
            layout,
            ranks,
            on_gpu=rooms.device is not None,
            expert_parallel=options.expert_parallel,
        )
        plan = with_room_to_save(config, plan, rooms, min(ranks, ranks_per_host))
        fits = _fits(plan, rooms, min(ranks, ranks_per_host))
        tried.append(Tried(str(layout), sum(plan.device.values()), sum(plan.host.values()), fits))
        plans.append((tried[-1].device or tried[-1].host, layout, plan))
        if fits:
            break
    _, layout, plan = plans[-1] if tried[-1].fits else min(plans, key=lambda each: each[0])
    return layout, replace(plan, layout=str(layout), tried=tuple(tried))


def with_room_to_save(config: TrainerConfig, plan: MemoryPlan, rooms: Rooms, ranks_here: int) -> MemoryPlan:
    """The plan, without the copy that checkpoints are written from where the host has no room for it now.

    Adapters' copy stays: what is saved of their model is made of both, and is nowhere in memory.
    """
    without = {part: size for part, size in plan.host.items() if part != COPY}
    if config.trainer.lora is not None or host_bytes(plan, ranks_here) <= rooms.host.free:
        return plan
    return replace(plan, host=without, saves_in_place=COPY in plan.host)


def _fits(plan: MemoryPlan, rooms: Rooms, ranks_here: int) -> bool:
    host = host_bytes(plan, ranks_here)
    if rooms.device is None:  # Of the whole memory, so that a run lies alike whatever else the host does.
        return host <= rooms.host.total
    return host <= rooms.host.free and MARGIN * sum(plan.device.values()) <= rooms.device.free


def _sizes(config: TrainerConfig, algorithm: Algorithm) -> Sizes:
    """Kept for the run that is opened: the leader plans before ranks choose, and chooses again with them."""
    key = config.model_dump_json()
    if key not in _known:
        _known.clear()
        _known[key] = Sizes.of(config, algorithm)
    return _known[key]


@dataclass(frozen=True)
class Unit:
    """Weights that are gathered together: of a layer, or of all that is in no layer."""

    learned: int
    frozen: int
    experts: int
    """How many of either are of experts, without their adapters."""
    expert_adapters: int
    """How many of those that learn are adapters of experts."""

    def of_rank(self, expert_parallel: int) -> Unit:
        """With the experts of one rank of those that divide them."""
        if expert_parallel == 1 or not self.experts:
            return self
        experts, adapters = self.experts // expert_parallel, self.expert_adapters // expert_parallel
        away = self.experts - experts
        # Experts learn or are frozen as a whole: an adapter's weights are few.
        whole = self.learned >= self.experts
        learned = self.learned - (away if whole else self.expert_adapters - adapters)
        return Unit(learned, self.frozen - (0 if whole else away), experts, adapters)


@dataclass(frozen=True)
class Sizes:
    """What a plan needs to know of the models: weights by unit, and bytes of the activations of one micro-batch."""

    units: tuple[Unit, ...]
    """The last one is the root's."""
    head: int
    """Weights of the head, whether they learn or not."""
    tile: int
    """Logits that are there at once."""
    kept: int
    """Activations that autograd keeps, without recomputation."""
    layer: int
    """Of one layer."""
    hidden: int
    """Of a layer's input: what recomputation keeps of it."""
    reference: int
    """Weights of the reference model that the run has beside the policy."""
    tensors: int
    """Elements of the two largest weights that follow each other."""
    merged: int
    """Elements of the largest tensor of experts that an adapter is merged into for a product."""

    @classmethod
    def of(cls, config: TrainerConfig, algorithm: Algorithm) -> Sizes:
        """Raises ModelNotReadable."""
        with torch.device("meta"):
            policy = load_model(config.model, weights=False)
            if config.trainer.lora is not None:
                add_adapters(policy, config.trainer.lora, config.seed)
            bodies: list[nn.Module] = [policy]
            layers = layers_of(policy)
            plan = algorithm.critic
            if plan is not None and plan.own_model:
                critic = load_critic(critic_section(config.model, plan.path), weights=False)
                bodies.append(critic)
                layers += layers_of(critic.body)
            reference = _reference_weights(config, algorithm)
        units = [_unit(layer) for layer in layers]
        whole = [_unit(body) for body in bodies]
        root = Unit(
            sum(unit.learned for unit in whole) - sum(unit.learned for unit in units),
            sum(unit.frozen for unit in whole) - sum(unit.frozen for unit in units),
            0,
            0,
        )
        base, layer = _activations(config)
        tokens = _tokens(config)
        text = policy.config.get_text_config()
        width = DTYPES[config.model.dtype].itemsize
        return cls(
            (*units, root),
            text.vocab_size * text.hidden_size,
            min(GPU_CHUNK_ELEMENTS, tokens * text.vocab_size),
            base + layer * len(layers),
            layer,
            tokens * text.hidden_size * width,
            reference,
            max(map(sum, pairwise([0, *(weight.numel() for weight in policy.parameters())]))),
            _largest_merged(policy),
        )

    @property
    def learned(self) -> int:
        """Weights that learn."""
        return sum(unit.learned for unit in self.units)

    @property
    def frozen(self) -> int:
        """Weights that do not."""
        return sum(unit.frozen for unit in self.units)


def plan_memory(
    config: TrainerConfig,
    algorithm: Algorithm,
    sizes: Sizes,
    layout: Layout,
    ranks: int,
    *,
    on_gpu: bool,
    expert_parallel: int = 1,
) -> MemoryPlan:
    """The leader's, which alone keeps groups; the others need what is left."""
    width = DTYPES[config.model.dtype].itemsize
    adapters = config.trainer.lora is not None
    frozen_whole = ranks == 1 and layout.offload != "parameters"
    shard = -(-sizes.learned // layout.shard_ranks)

    def gathered(unit: Unit) -> int:
        """Bytes of a unit as it is computed with."""
        return unit.learned * (FP32 if adapters else width) + (0 if frozen_whole else unit.frozen * width)

    # Of experts that are divided over ranks, each gathers and reduces its own.
    *layers, root = [unit.of_rank(expert_parallel) for unit in sizes.units]
    largest = max(layers, key=gathered, default=root)
    whole = _Whole(gathered(root), gathered(largest), sum(map(gathered, [*layers, root])))
    device = {
        "masters": shard * FP32,
        "moments": shard * MOMENTS_BYTES,
        "gradients": (sizes.learned if layout.shard == "state" else shard) * FP32,
        "frozen weights": sizes.frozen * width
        if frozen_whole
        else -(-sizes.frozen // layout.shard_ranks) * width,
        **_work(sizes, layout, whole, largest, FP32 if adapters else width, width),
        "reference": _reference_bytes(config, algorithm, sizes, layout),
    }
    if sizes.merged:
        device["merged experts"] = sizes.merged * width // expert_parallel
    host = {
        # Of what rollouts install, the base and the current version, and one that a commit casts or whose memory is
        # used again for it: in shared memory of the leader's host.
        "published versions": 3 * (sizes.learned + sizes.frozen) * width,
        "hold": shard * (FP32 + MOMENTS_BYTES) if algorithm.passes.several else 0,
        "kept groups": kept_bytes(config, algorithm),
    }
    if config.checkpoint.enabled:
        host[COPY] = shard * (FP32 + MOMENTS_BYTES) + device["frozen weights"]
    if not on_gpu:
        return MemoryPlan(device | host, {})
    # Between the infer rounds that use it, a reference lies in host memory.
    host["reference"] = device["reference"]
    # Weights come from files and go to rollouts one by one; one is dropped as the next one is there.
    host["weights in transit"] = sizes.tensors * FP32
    for part in _OFFLOADED[layout.offload]:
        host[part] = device.pop(part)
    if config.placement.mode != "disaggregated" and config.placement.memory != "resident":
        # While rollouts have the GPU. A step may be open then, whose gradients wait.
        host["asleep"] = sum(device.get(part, 0) for part in _OFFLOADED["parameters"])
    return MemoryPlan(host, device)


_known: dict[str, Sizes] = {}
_OFFLOADED = {
    "none": (),
    "optimizer": ("moments",),
    "parameters": ("moments", "masters", "gradients", "frozen weights"),
}


@dataclass(frozen=True)
class _Whole:
    """Bytes of gathered weights: the root's, the largest layer's, and all."""

    root: int
    layer: int
    all: int


def _work(
    sizes: Sizes, layout: Layout, whole: _Whole, largest: Unit, gradient: int, width: int
) -> dict[str, int]:
    """What a micro-batch needs beside all that stays, at the moment when it is most: as the loss's gradient reaches the
    head, in the first layer of a backward, or as the root's gradients are reduced, last of all.

    `gradient`: bytes of an element of a layer's gradient before it is reduced.
    """
    divided, summed = layout.shard == "weights", layout.shard == "state"
    outside = sizes.kept - (len(sizes.units) - 1) * sizes.layer
    inputs = (len(sizes.units) - 1) * sizes.hidden if layout.checkpointing else 0
    kept = outside + inputs if layout.checkpointing else sizes.kept
    # Logits of a chunk, what they become, and their gradients; of fp32 factors a copy more than of bf16 ones.
    tiles = (5 if width == FP32 else 4) * sizes.tile * FP32
    *_, root = sizes.units
    # The head's gradient before it is added to others: its weights are multiplied as they are.
    head = sizes.head * FP32 if root.learned >= sizes.head else 0
    waiting = 0 if summed else root.learned * FP32
    # What the layer before has given to its reduction, in fp32, and this one's gradients.
    reduced = 0 if summed else largest.learned * (FP32 + gradient)
    # What a layer that is computed again keeps, and gradients of about as much at a time.
    again = sizes.layer + sizes.layer // 2 if layout.checkpointing else 0
    moments = [
        # The layer that was gathered last leaves its place when the next one is.
        {"gathered weights": whole.root + whole.layer, "activations": kept, "head": head + tiles},
        # A layer while the next one comes, and the root's, which stay for the whole of a backward.
        {
            "gathered weights": whole.root + 2 * whole.layer,
            "activations": kept + again,
            "head": min(waiting, head),
            "reductions": reduced,
        },
        {"gathered weights": 0, "activations": outside, "head": waiting, "reductions": waiting},
    ]
    if not divided:
        moments = [moment | {"gathered weights": whole.all} for moment in moments]
    return max(moments, key=lambda moment: sum(moment.values()))


def _unit(module: nn.Module) -> Unit:
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


def _reference_weights(config: TrainerConfig, algorithm: Algorithm) -> int:
    """Of a model beside the policy. With adapters the policy is its own reference."""
    adapters = config.trainer.lora is not None and config.trainer.reference is None
    if REFERENCE_LOG_PROBS not in algorithm.columns or adapters:
        return 0
    section: ModelSection = config.trainer.reference or config.model
    return sum(parameter.numel() for parameter in load_model(section, weights=False).parameters())


def _reference_bytes(config: TrainerConfig, algorithm: Algorithm, sizes: Sizes, layout: Layout) -> int:
    """Of a rank's shards of the reference, in its own type; of adapters that stand in for it: those of the warm-up."""
    if sizes.reference:
        section: ModelSection = config.trainer.reference or config.model
        return -(-sizes.reference // layout.shard_ranks) * DTYPES[section.dtype].itemsize
    needed = config.trainer.lora is not None and REFERENCE_LOG_PROBS in algorithm.columns
    return sizes.learned * FP32 if needed and config.trainer.warmup.steps else 0


def _activations(config: TrainerConfig) -> tuple[int, int]:
    """Bytes that autograd keeps of one micro-batch: outside of layers, and of each layer."""
    with FakeTensorMode():
        one, two = (_kept_bytes(config, layers) for layers in (1, 2))
    return one - (two - one), two - one


def _tokens(config: TrainerConfig) -> int:
    """Of a micro-batch on one rank: those that divide rows have a share each."""
    return -(-config.trainer.micro_batch_tokens // model_ranks(config.trainer))


def _kept_bytes(config: TrainerConfig, layers: int) -> int:
    model: Any = load_model(config.model, weights=False, layers=layers)
    if (lora := config.trainer.lora) is not None:
        add_adapters(model, _in_any_layer(lora, model), config.seed)
    take_routers(
        model
    )  # as the trainer computes experts; transformers' products take no fake tensors in fp32
    _attend_as_on_a_gpu(model)
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage())._cdata not in own:
            kept[storage._cdata] = tensor  # it must live, so that no other storage gets its address
        return tensor

    tokens = torch.zeros((1, _tokens(config)), dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=tokens, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _in_any_layer(lora: LoraSection, model: PreTrainedModel) -> LoraSection:
    """Targets that a model with fewer layers has: of a layer that it has not, those of the same name in all layers."""
    if isinstance(lora.targets, str):
        return lora
    alone = {target: lora.model_copy(update={"targets": [target]}) for target in lora.targets}
    found = [
        target.rpartition(".")[2] if targets_problem(model, own) else target for target, own in alone.items()
    ]
    return lora.model_copy(update={"targets": found})


def _attend_as_on_a_gpu(model: PreTrainedModel) -> None:
    """Its kernels keep queries, keys and values as they are, of as many heads as there are."""
    if not model._supports_attention_backend:
        return
    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)
    model.config._attn_implementation = _ATTENTION


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    operations: Any = torch.ops.aten
    found = operations._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    return found.transpose(1, 2).contiguous(), None


_ATTENTION = "headrace_planned"
