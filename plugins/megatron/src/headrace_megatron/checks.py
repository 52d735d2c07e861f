"""What the megatron backend refuses of a run when it opens: before ranks meet, and without importing Megatron."""

from __future__ import annotations

from headrace_modelkit.loading import load_architecture, reads_images
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms._base import REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.errors import invalid

from headrace_megatron.architecture import read_architecture
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
