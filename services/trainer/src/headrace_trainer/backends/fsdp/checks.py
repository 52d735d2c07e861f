"""What the fsdp backend refuses of a run when it opens: before ranks meet, and before weights are read."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch
from headrace_modelkit.critic import critic_section
from headrace_modelkit.families.mixtures import expert_shape
from headrace_modelkit.loading import load_architecture, load_model, reads_images
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import ModelSection

from headrace_trainer.algorithms._base import REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.backends.fsdp.attending.context import CONTEXT
from headrace_trainer.backends.fsdp.attending.prefixes import obstacle_to_trees
from headrace_trainer.backends.fsdp.float8 import check_float8
from headrace_trainer.backends.fsdp.layouts.layout import check_run as check_layout
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import invalid

COMPILE = "trainer.backend_options.compile"


def check_run(options: FsdpOptions, config: TrainerConfig, algorithm: Algorithm) -> None:
    """Raises Refusal INVALID, naming the key, and ModelNotReadable."""
    check_layout(options, config, algorithm)
    if config.trainer.lora is not None and config.optimizer.name == "muon":
        key = "optimizer.name"
        raise invalid(
            f"{key}: muon steps whole matrices, and adapters have none; use adamw or adamw_8bit", key=key
        )
    _check_quantization(options, config)
    sees = reads_images(load_architecture(config.model))
    check_float8(options, config, sees=sees)
    if sees:
        _check_vision(options, config, algorithm)
    if options.compile and (missing := _missing_compiler()):
        raise invalid(f"{COMPILE}: {missing} on the trainer's host; install it, or leave it out", key=COMPILE)
    if options.context_parallel > 1:
        _check_context(options.context_parallel, config, algorithm)


def _check_quantization(options: FsdpOptions, config: TrainerConfig) -> None:
    """Also of policies, whose keys the run's table does not judge."""
    lora, key = config.trainer.lora, "trainer.lora.quantization"
    if lora is None or lora.quantization is None:
        return
    beside = {
        "deterministic": config.deterministic,
        "trainer.backend_options.compile": options.compile,
        "trainer.backend_options.offload: parameters": options.offload == "parameters",
    }
    for name in (name for name, asked in beside.items() if asked):
        raise invalid(f"{key}: does not go with {name}; remove one of them", key=key)


def _check_vision(options: FsdpOptions, config: TrainerConfig, algorithm: Algorithm) -> None:
    what = f"{config.model.path!r} is a vision-language model"
    if options.context_parallel > 1 and config.sees:
        raise invalid(f"{CONTEXT}: {what}, whose rows ranks cannot divide; leave it out", key=CONTEXT)
    if algorithm.critic is not None and algorithm.critic.own_model:
        key = "algorithm.options.critic"
        raise invalid(
            f"{key}: {what}, beside which a critic has no model of its own; take one that is a head of the policy",
            key=key,
        )


def compiles(options: FsdpOptions, config: TrainerConfig, device: torch.device) -> bool:
    """Whether layers are compiled: as the run says, or where it helps and can be."""
    if options.compile is not None:
        return options.compile
    here = device.type == "cuda" and torch.cuda.is_available() and find_spec("triton") is not None
    coded = config.trainer.lora is not None and config.trainer.lora.quantization
    if not here or config.deterministic or coded:
        return False
    return not reads_images(load_architecture(config.model))


def _missing_compiler() -> str:
    if torch.cuda.is_available():
        return "" if find_spec("triton") else "there is no Triton"
    return (
        ""
        if shutil.which(os.environ.get("CXX", "g++"))
        else "there is no C++ compiler (g++, or what CXX names)"
    )


def _check_context(size: int, config: TrainerConfig, algorithm: Algorithm) -> None:
    for section in _sections(config, algorithm):
        _check_model(size, config.model_copy(update={"model": section}))


def _sections(config: TrainerConfig, algorithm: Algorithm) -> list[ModelSection]:
    found = [config.model]
    if trainer_reference := config.trainer.reference:
        found += [trainer_reference] if REFERENCE_LOG_PROBS in algorithm.columns else []
    if (plan := algorithm.critic) is not None and plan.own_model:
        found.append(critic_section(config.model, plan.path))
    return found


def _check_model(size: int, config: TrainerConfig) -> None:
    section = config.model
    with torch.device("meta"):
        model = load_model(section, weights=False)
    architecture = model.config
    if expert_shape(architecture) is not None:
        raise invalid(
            f"{CONTEXT}: {section.path!r} has experts, whose routers count the tokens of whole rows; leave it out, or "
            "use expert_parallel",
            key=CONTEXT,
        )
    heads = int(architecture.get_text_config().num_attention_heads)
    if heads % size:
        fits = max(count for count in range(1, size) if heads % count == 0)
        raise invalid(
            f"{CONTEXT}: {heads} attention heads of {section.path!r} cannot be divided over {size} ranks; the nearest "
            f"lower value that divides them is {fits}",
            key=CONTEXT,
        )
    reason = obstacle_to_trees(config, architecture)
    if reason or not model._supports_attention_backend:
        raise invalid(
            f"{CONTEXT}: {reason or 'the model has attention of its own'}, so that ranks cannot divide rows; leave it "
            "out",
            key=CONTEXT,
        )
