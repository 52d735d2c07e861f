"""Whether and how a model computes a prefix tree exactly: decided once, when it is loaded. Knows no packing."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_modelkit.loading import context_limit
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.logs import get_logger
from transformers import PreTrainedConfig, PreTrainedModel

from headrace_trainer.backends.fsdp.attending.attention import attend_to_trees
from headrace_trainer.errors import invalid

_log = get_logger(__name__)


def shares_prefixes(config: TrainerConfig, architectures: Iterable[PreTrainedConfig]) -> bool:
    """What `trainer.shared_prefix` comes to for policy and critic. Raises Refusal INVALID when one cannot and must."""
    wanted = config.trainer.shared_prefix
    found = (obstacle_to_trees(config, architecture) for architecture in architectures)
    obstacle = next((each for each in found if each), "")
    if wanted and obstacle:
        raise invalid(
            f"trainer.shared_prefix: true, but {obstacle}; leave it out, or set it to false, and every sample "
            "gets a row of its own"
        )
    if wanted is None and obstacle:
        _log.info("every sample gets a row of its own", extra={"reason": obstacle})
    return wanted is not False and not obstacle


def attends_along_paths(config: TrainerConfig, bodies: Iterable[PreTrainedModel]) -> bool:
    """Sets up the attention of these models where it can be; whether all of them take paths and segments. Once for
    each model.
    """
    able = [not obstacle_to_trees(config, body.config) and attend_to_trees(body) for body in bodies]
    return all(able)


def obstacle_to_trees(config: TrainerConfig, architecture: PreTrainedConfig) -> str:
    """Why the model would not follow a tree's attention mask; empty when it does."""
    implementation = getattr(architecture.get_text_config(), "_attn_implementation", "")
    if implementation != "sdpa":
        # Only sdpa takes a mask of four dimensions as it is.
        return f"the model's attention is {implementation or 'unknown'}, which takes no mask of its own (sdpa does)"
    window = _window(architecture)
    if window and window < context_limit(config.model, architecture):
        return (
            f"the model attends to the last {window} tokens only (set model.max_context to {window} or less)"
        )
    return ""


def _window(architecture: PreTrainedConfig) -> int:
    text = architecture.get_text_config()
    kinds = getattr(text, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else True
    return int(getattr(text, "sliding_window", None) or 0) if slides else 0
