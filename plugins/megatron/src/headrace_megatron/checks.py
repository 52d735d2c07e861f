"""What the megatron backend refuses of a run when it opens, and what memory the run needs: before ranks meet, and
without importing Megatron.
"""

from __future__ import annotations

import math

from headrace_modelkit.loading import DTYPES, load_architecture, reads_images
from headrace_schema.gpu_defaults import PARTS_OF_A_STAGE
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms._base import REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.backends.fsdp.layouts.planned import FP32, MOMENTS_BYTES
from headrace_trainer.backends.fsdp.layouts.sizes import Sizes, Unit
from headrace_trainer.errors import invalid
from headrace_trainer.memory import LENT, MemoryPlan, kept_bytes, lent_bytes

from headrace_megatron.architecture import Architecture, read_architecture
from headrace_megatron.layout import Layout
from headrace_megatron.plugin import MEGATRON, MegatronOptions

ELSE = "or set trainer.backend: fsdp"


def check_run(options: MegatronOptions, config: TrainerConfig, algorithm: Algorithm) -> None:
    """Raises Refusal INVALID, naming the key, and ModelNotReadable."""
    if not MEGATRON.is_installed:
        raise invalid(
            "trainer.backend: megatron-core is not installed where this trainer runs; install "
            f"headrace-trainer[megatron] there, {ELSE}",
            key="trainer.backend",
        )
    if reads_images(load_architecture(config.model)):
        reason = f"megatron trains on text alone, and {config.model.path!r} is a vision-language model"
        raise invalid(f"trainer.backend: {reason}; set trainer.backend: fsdp", key="trainer.backend")
    layout = Layout.of(options, config.trainer.ranks)
    read_architecture(config.model).check(layout, "model.path")
    if config.trainer.reference is not None and REFERENCE_LOG_PROBS in algorithm.columns:
        read_architecture(config.trainer.reference, "trainer.reference.path").check(
            layout, "trainer.reference.path"
        )


def plan_memory(
    config: TrainerConfig, algorithm: Algorithm, options: MegatronOptions, layout: Layout, *, on_gpu: bool
) -> MemoryPlan:
    """The leader's, which alone keeps groups: a share of the model at least. Raises ModelNotReadable."""
    own, experts = _share(read_architecture(config.model), layout)
    same = layout.replicas * layout.context
    slice_ = -(-(own - experts) // same) + -(-experts * layout.experts // same)
    width = DTYPES[config.model.dtype].itemsize
    reference = config.trainer.reference or config.model
    frozen = 0
    if REFERENCE_LOG_PROBS in algorithm.columns:
        frozen, _ = _share(read_architecture(reference, "trainer.reference.path"), layout)
    device = {
        "weights": own * width,
        # A model in fp32 computes with its masters themselves.
        "masters": 0 if width == FP32 else slice_ * FP32,
        "moments": slice_ * MOMENTS_BYTES,
        "gradients": (own + slice_) * FP32,
        "activations": kept_activations(config, Sizes.of(config, algorithm).units[0], options, layout),
        "reference": frozen * DTYPES[reference.dtype].itemsize,
    }
    host = {
        "hold": slice_ * (FP32 + MOMENTS_BYTES) if algorithm.passes.several else 0,
        "kept groups": kept_bytes(config, algorithm),
    }
    if not on_gpu:
        return MemoryPlan(device | host, {})
    whole = sum(math.prod(shape) for shape in read_architecture(config.model).shapes.values())
    if lent := lent_bytes(config, whole * width):
        device[LENT] = lent
    # Between the infer rounds that use it, a reference lies in host memory.
    return MemoryPlan(host | {"reference": device["reference"]}, device)


def kept_activations(config: TrainerConfig, unit: Unit, options: MegatronOptions, layout: Layout) -> int:
    """Bytes that the first stage keeps for backward passes: it waits longest for them. `unit` is a layer with what it
    keeps of a micro-batch that is divided over all ranks of a model.
    """
    parts = parts_wanted(options, layout)
    kept = min(parts * layout.virtual, layout.most_kept)
    whole = config.trainer.micro_batch_tokens
    share = -(-whole // (layout.tensor * layout.context * layout.pipeline))
    layers = read_architecture(config.model).layers // (layout.pipeline * layout.virtual)
    a_part = share * layout.pipeline // parts
    if not config.trainer.gradient_checkpointing:
        return unit.kept * a_part * kept * layers // share
    undivided = 1 if options.sequence_parallel else layout.tensor
    return (unit.inputs * undivided * kept * layers + unit.kept) * a_part // share


def parts_wanted(options: MegatronOptions, layout: Layout) -> int:
    """Into how many parts a micro-batch is divided, where it has so many rows."""
    return options.pipeline_micro_batches or (
        PARTS_OF_A_STAGE * layout.pipeline if layout.pipeline > 1 else 1
    )


def _share(architecture: Architecture, layout: Layout) -> tuple[int, int]:
    """(All, expert) weights of one rank, were they divided evenly over tensor, pipeline and expert-parallel ranks."""
    each = {name: math.prod(shape) for name, shape in architecture.shapes.items()}
    experts = sum(size for name, size in each.items() if ".mlp.experts." in name)
    held = layout.tensor * layout.pipeline
    own = -(-experts // (held * layout.experts))
    return -(-(sum(each.values()) - experts) // held) + own, own
