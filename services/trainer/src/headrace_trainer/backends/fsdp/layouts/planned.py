"""Bytes of a rank in each layout, and the first layout that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace_modelkit.loading import DTYPES
from headrace_schema.learner_size import VERSIONS
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import ModelSection

from headrace_trainer.algorithms._base import REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.backends.fsdp.layouts.layout import GPUS_PER_HOST, Layout, candidates
from headrace_trainer.backends.fsdp.layouts.sizes import Sizes, Unit
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.memory import (
    COPY,
    LENT,
    MemoryPlan,
    Rooms,
    Tried,
    host_bytes,
    kept_bytes,
    lent_bytes,
    with_room_to_lend,
)

INPUTS = "inputs of layers"
"""A part of the host's plan: what a backward pass computes layers again from, where it waits there."""
Measure = Callable[[TrainerConfig, Algorithm], Sizes]
FP32 = 4
MOMENTS_BYTES = 2 * FP32
MARGIN = 1.1
"""A layout is taken where so many times its bytes fit into a GPU: plans are true within a tenth, and a CUDA context,
communicators and what the allocator cannot use come to it."""


ATTENTION = "attention"
"""A part of the plan: what attention gave a micro-batch in all layers, kept for the backward pass."""


def choose_layout(
    config: TrainerConfig,
    algorithm: Algorithm,
    options: FsdpOptions,
    ranks: int,
    ranks_per_host: int,
    rooms: Rooms,
    measure: Measure = Sizes.of,
) -> tuple[Layout, MemoryPlan]:
    """The first layout that fits, or the smallest where none does, and why. Raises ModelNotReadable, and what `measure`
    raises.
    """
    run = _Run(config, algorithm, options, rooms, measure)
    layout, plan = run.first_fit(ranks, ranks_per_host)
    if plan.tried[-1].fits:
        return layout, plan
    for more in (2 * ranks, 4 * ranks, 8 * ranks, 16 * ranks):
        other, found = run.first_fit(more, max(ranks_per_host, min(more, GPUS_PER_HOST)))
        if found.tried[-1].fits:
            return layout, replace(plan, would_fit=f"trainer.ranks: {more} fits, with {other}")
    return layout, replace(plan, would_fit=None)


def known_sizes(config: TrainerConfig, algorithm: Algorithm, measure: Measure) -> Sizes:
    """Kept for the run that is opened: the leader plans before ranks choose, and chooses again with them."""
    own = config.trainer.model_copy(update={"ranks": 1})  # how many there are changes none of these sizes
    key = config.model_copy(update={"trainer": own}).model_dump_json()
    if key not in _known:
        _known.clear()
        _known[key] = measure(config, algorithm)
    return _known[key]


_known: dict[str, Sizes] = {}


@dataclass(frozen=True)
class _Run:
    """A run whose ranks have `rooms` each."""

    config: TrainerConfig
    algorithm: Algorithm
    options: FsdpOptions
    rooms: Rooms
    measure: Measure

    def first_fit(self, ranks: int, ranks_per_host: int) -> tuple[Layout, MemoryPlan]:
        """The first layout that fits this number of ranks, or the smallest; the plan says what was tried."""
        sizes = known_sizes(self.config, self.algorithm, self.measure)
        on_gpu, ranks_here = self.rooms.device is not None, min(ranks, ranks_per_host)
        tried: list[Tried] = []
        plans: list[tuple[int, Layout, MemoryPlan]] = []
        for layout in candidates(self.config, self.options, ranks, ranks_per_host, on_gpu=on_gpu):
            plan = plan_memory(
                self.config,
                self.algorithm,
                sizes,
                layout,
                ranks,
                on_gpu=on_gpu,
                expert_parallel=self.options.expert_parallel,
                base=self.rooms.base,
            )
            plan = with_room_to_save(self.config, plan, self.rooms, ranks_here)
            plan = with_room_to_lend(plan, self.rooms, MARGIN)
            fits = _fits(plan, self.rooms, ranks_here)
            tried.append(Tried(str(layout), sum(plan.device.values()), sum(plan.host.values()), fits))
            plans.append((tried[-1].device or tried[-1].host, layout, plan))
            if fits:
                break
        _, layout, plan = plans[-1] if tried[-1].fits else min(plans, key=lambda each: each[0])
        layout, plan = with_attention(layout, plan, sizes, self.rooms)
        return layout, replace(plan, layout=str(layout), tried=tuple(tried))


def with_room_to_save(config: TrainerConfig, plan: MemoryPlan, rooms: Rooms, ranks_here: int) -> MemoryPlan:
    """The plan, without the copy that checkpoints are written from where the host has no room for it now.

    Adapters' copy stays: what is saved of their model is made of both, and is nowhere in memory.
    """
    without = {part: size for part, size in plan.host.items() if part != COPY}
    if config.trainer.lora is not None or host_bytes(plan, ranks_here) <= rooms.host.free:
        return plan
    return replace(plan, host=without, saves_in_place=COPY in plan.host)


def with_attention(layout: Layout, plan: MemoryPlan, sizes: Sizes, rooms: Rooms) -> tuple[Layout, MemoryPlan]:
    """With what attention gives kept where there is room for it in all layers: the rest of them is computed again."""
    size = sum(unit.attended for unit in sizes.units)
    if rooms.device is None or not layout.checkpointing or not size:
        return layout, plan
    layout = replace(layout, keeps_attention=False)
    if MARGIN * (sum(plan.device.values()) + size) > rooms.device.free:
        return layout, plan
    return replace(layout, keeps_attention=True), replace(plan, device={**plan.device, ATTENTION: size})


def _fits(plan: MemoryPlan, rooms: Rooms, ranks_here: int) -> bool:
    host = host_bytes(plan, ranks_here)
    if rooms.device is None:  # Of the whole memory, so that a run lies alike whatever else the host does.
        return host <= rooms.host.total
    return host <= rooms.host.free and MARGIN * sum(plan.device.values()) <= rooms.device.free


def plan_memory(
    config: TrainerConfig,
    algorithm: Algorithm,
    sizes: Sizes,
    layout: Layout,
    ranks: int,
    *,
    on_gpu: bool,
    expert_parallel: int = 1,
    base: bool | None = None,
) -> MemoryPlan:
    """The leader's, which alone keeps groups; the others need what is left. `base` as in `Rooms`."""
    width = DTYPES[config.model.dtype].itemsize
    adapters = config.trainer.lora is not None
    frozen_whole = ranks == 1 and layout.offload != "parameters"
    shard = -(-sizes.learned // layout.shard_ranks)
    coded = sum(unit.coded for unit in sizes.units)
    frozen = sizes.frozen - coded
    moments, saved_moments = (
        -(-size // layout.shard_ranks) if size else shard * MOMENTS_BYTES
        for size in (sizes.moments, sizes.saved_moments)
    )

    own_frozen = -(-frozen // (1 if frozen_whole else layout.shard_ranks)) * width

    def gathered(unit: Unit) -> int:
        """Bytes of a unit as it is computed with."""
        return unit.learned * (FP32 if adapters else width) + (
            0 if frozen_whole else (unit.frozen - unit.coded) * width
        )

    # Of experts that are divided over ranks, each gathers and reduces its own.
    *layers, root = [unit.of_rank(expert_parallel) for unit in sizes.units]
    largest = max(layers, key=gathered, default=root)
    whole = _Whole(gathered(root), gathered(largest), sum(map(gathered, [*layers, root])))
    device = {
        "masters": shard * FP32,
        "moments": moments,
        "gradients": (sizes.learned if layout.shard == "state" else shard) * FP32,
        "frozen weights": 0 if base else own_frozen,
        **_work(
            sizes,
            layout,
            whole,
            largest,
            FP32 if adapters else width,
            width,
            several=ranks > layout.shard_ranks,
        ),
        "reference": _reference_bytes(config, algorithm, sizes, layout),
    }
    if coded:
        device["quantized weights"] = sizes.coded_bytes
        device["decoded weight"] = sizes.decoded * width
    if sizes.merged:
        device["merged experts"] = sizes.merged * width // expert_parallel
    alone = adapters and config.weights.lora != "merged"
    published = sizes.learned * FP32 if alone else (sizes.learned + sizes.frozen) * width
    if config.weights.publish == "ranks":
        published = -(-published // ranks)
    host = {
        # In shared memory of the leader's host: what rollouts install, and one that a commit casts or the one before.
        "published versions": VERSIONS * published * config.installed,
        "hold": shard * FP32 + moments if algorithm.passes.several else 0,
        "kept groups": kept_bytes(config, algorithm) if sizes.answers else 0,
    }
    if alone and base is None and config.installed:  # Else it is the file that is computed with.
        host["published base"] = sizes.frozen * width
    if config.checkpoint.enabled:
        host[COPY] = shard * FP32 + saved_moments + own_frozen + coded * width
    if layout.activations_away:
        host[INPUTS] = sum(unit.inputs for unit in layers)
    if not on_gpu:
        return MemoryPlan(device | host, {})
    if config.installed and (lent := lent_bytes(config, published)):
        device[LENT] = lent
    # Between the infer rounds that use it, a reference lies in host memory.
    host["reference"] = device["reference"]
    for part in _OFFLOADED[layout.offload]:
        host[part] = device.pop(part)
    # Weights come from files and go to rollouts one by one; one is dropped as the next one is there. Those of adapters
    # are merged where they are computed with.
    transit, asleep = sizes.tensors * (width if adapters else FP32), 0
    if config.placement.mode != "disaggregated" and config.placement.memory != "resident":
        # While rollouts have the GPU. A step may be open then, whose gradients wait.
        asleep = sum(device.get(part, 0) for part in _OFFLOADED["parameters"])
    # No weight travels while the trainer sleeps: of the two a host has the larger one.
    host["weights in transit"] = transit if transit > asleep else 0
    host["asleep"] = asleep if asleep >= transit else 0
    return MemoryPlan(host, device)


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
    sizes: Sizes, layout: Layout, whole: _Whole, largest: Unit, gradient: int, width: int, *, several: bool
) -> dict[str, int]:
    """What a micro-batch needs beside all that stays, at the moment when it is most: as the loss's gradient reaches the
    head, in the first layer of a backward, or as the root's gradients are reduced, last of all.

    `gradient`: bytes of an element of a layer's gradient before it is reduced. `several`: copies of the model.
    """
    divided, summed = layout.shard == "weights", layout.shard == "state"
    *layers, root = sizes.units
    outside = root.kept
    inputs = [unit.inputs for unit in layers]
    if layout.activations_away:
        kept = outside + max(inputs, default=0)
    else:
        kept = outside + (sum(inputs) if layout.checkpointing else sum(unit.kept for unit in layers))
    # Logits of a chunk, what they become, and their gradients; of fp32 factors a copy more than of bf16 ones.
    tiles = (5 if width == FP32 else 4) * sizes.tile * FP32
    # The head's gradient before it is added to others: its weights are multiplied as they are.
    head = sizes.head * sizes.root_bytes if root.learned >= sizes.head else 0
    waiting = 0 if summed else root.learned * sizes.root_bytes
    # What the layer before has given to its reduction.
    reduced = 0 if summed else largest.learned * FP32
    # A layer that is computed again keeps its activations, with gradients of about half as much at a time; they go as
    # the gradients of its weights come.
    again = max((unit.again for unit in layers), default=0) if layout.checkpointing else 0
    again = max(again, 0 if summed else largest.learned * gradient)
    # A backward multiplies A and B with fp32 copies of what a layer got and of what comes back to it.
    again += sizes.widened * FP32
    # One rank that has a copy alone gathers nothing ahead, and reduces by two copies of what is given to a reduction.
    alone = layout.shard_ranks == 1
    ahead, copies = (0, 3) if alone else (whole.layer, 1)
    # Of several copies fully_shard keeps what each layer has given to the reduction over them until the backward ends.
    given = sum(unit.learned for unit in sizes.units[:-1]) * FP32 // layout.shard_ranks if several else 0
    # As a backward begins no layer has given anything; as it ends the inputs of layers are gone.
    end = {"activations": outside + again, "head": min(waiting, head), "reductions": reduced + given}
    # A layer while the next one comes, and the root's, which stay for the whole of a backward.
    gathered = whole.root + whole.layer + ahead
    moments = [
        # The layer that was gathered last leaves its place when the next one is.
        {"gathered weights": whole.root + whole.layer, "activations": kept, "head": head + tiles},
        {
            "gathered weights": gathered,
            "activations": kept + again,
            "head": min(waiting, head),
            "reductions": reduced,
        },
        {"gathered weights": gathered, **end},
        # The layer's gradients as they are reduced: all else of it is gone.
        {
            "gathered weights": whole.root + ahead,
            "activations": kept,
            "head": min(waiting, head),
            "reductions": copies * reduced,
        },
        {
            "gathered weights": 0,
            "activations": outside,
            "head": waiting,
            "reductions": waiting * max(1, copies - 1) + given,
        },
    ]
    if not divided:
        moments = [moment | {"gathered weights": whole.all} for moment in moments]
    return max(moments, key=lambda moment: sum(moment.values()))


def _reference_bytes(config: TrainerConfig, algorithm: Algorithm, sizes: Sizes, layout: Layout) -> int:
    """Of a rank's shards of the reference, in its own type; of adapters that stand in for it: those of the warm-up."""
    if sizes.reference:
        section: ModelSection = config.trainer.reference or config.model
        return -(-sizes.reference // layout.shard_ranks) * DTYPES[section.dtype].itemsize
    needed = config.trainer.lora is not None and REFERENCE_LOG_PROBS in algorithm.columns
    return sizes.learned * FP32 if needed and config.trainer.warmup.steps else 0
