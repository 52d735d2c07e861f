"""Writes docs/models.md: the families of models that tests hold, and what each does here.

`python -m ci.model_docs [--check] FILE`. The rows are the data of the tests (`headrace_modelkit.families.known`) and
what the trials at load find of the tiny models that they run. With --check it writes nothing and fails when the file is
not current.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from headrace_modelkit.families.known import KNOWN, Known
from headrace_modelkit.families.mixtures import ExpertShape, expert_shape
from headrace_modelkit.presets.families import FAMILIES, tiny_config

from ci.spec_docs import write_or_check

HEAD = """# Families of models

<!-- Written by `make reference-docs` from `headrace_modelkit.families.known`; change the text there. -->

Each family here has a tiny model in the tests, made of transformers' own configuration class. In fp32 its log-probs
and gradient are transformers' within 1e-4 (most within 1e-5), in whatever form rows lie; an export has the names,
types and numbers that it came from. `make test` holds some families of each kind,
`make nightly` all, and also that two ranks train as one does: weights sharded, layers recomputed, experts divided, rows
divided, adapters, MTP layers that learn (`test_trainer_family_ranks.py`). A family that is not here is not refused:
[trials as it is loaded](own-model.md#how-a-family-is-found-to-be-right) decide.

- **Rows**: *shared*, a group's prompt is computed once and answers are packed; otherwise every answer gets a row of
  its own, for the reason that is named.
- **Experts**: *divided* over ranks (`expert_parallel`), with routes that are *replayed* and the load-balance loss;
  *adapters*: LoRA of experts. Biases of routers (`e_score_correction_bias`) stay as the checkpoint has them, or
  [follow the load](experts.md#biases-that-follow-the-load).
- **Context parallel**: whether ranks can divide a row.
- **Built-in engine**: generates by continuous batching, keys and states kept for next turns; or why it refuses.
  *Begins again*: a next turn is computed from its first token.
- **vLLM, SGLang**: which has its class in the release that is pinned (0.32, 0.5.23), by its own list; where none has,
  generate with the built-in engine. Weights are published by the names that `save_pretrained` gives them.
- **Tools**: the value of `tool_calls` that reads the family's calls, why none does, or –. A turn comes without its
  special tokens, so that marks which are such tokens are lost.
- **MTP**: *drafts*, the layer of a checkpoint that predicts one token more can [learn and
  draft](engines.md#a-head-that-learns-to-draft) (`trainer.draft.form: mtp`); or why such layers are refused there; –:
  checkpoints have none. What does not learn is in an export as it was, of all families.

| family (`type`) | rows | experts | context parallel | built-in engine | vLLM, SGLang | tools | MTP | |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
TAIL = """
Not in transformers' own classes, and so refused by `model.path`: the wrappers of Mistral 3 and Kimi K2.5 with
images (use the language model's own directory). vLLM and SGLang have lists of their own: [Engines](engines.md).

Speed of the tiny models, eight times as wide, against transformers' own loops, in tokens/s over theirs
(`python benchmarks/families.py`, one thread of two cores under a load of 5 to 9, medians of five turns or seven):

| | trained | generated |
| --- | --- | --- |
| DeepSeek V3, GLM-4.5; Gemma 3, Gemma 4 E | 1.82, 2.05; 2.31, 2.41 | 1.05, 1.13; 1.02, 0.91 |
| Ministral 3, SmolLM3, OLMo 3, Phi-3 | 2.27, 2.31, 2.28, 2.41 | 1.14, 1.11, 1.08, 1.19 |
| Qwen3.5, Qwen3-Next; Llama 4 | 0.94, 0.85; 0.95 | 1.02, 0.99; 0.99 |
| Granite 4, Nemotron-H, gpt-oss | 0.90, 0.87, 0.90 | 0.91, 1.14, 1.00 |

Rows that share are computed once. Where they are apart both sides compute the same products, and ours also gathers
weights and reduces their gradient, once a micro-batch, which here has 960 tokens.
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_row(family, known) for family, known in KNOWN.items()) + TAIL


def _row(family: str, known: Known) -> str:
    assert family in FAMILIES, family
    shape = expert_shape(tiny_config(family))
    name, _, variant = family.partition("+")
    cells = [
        f"{known.models} (`{name}`{f' with {variant}' if variant else ''})",
        "shared" if known.shares else f"apart: {known.why_apart}",
        _experts(tiny_config(family), shape),
        _divides(known, shape),
        f"no: {known.generates}" if known.generates else "yes" if known.continues else "yes, begins again",
        ", ".join(name for name, has in (("vLLM", known.vllm), ("SGLang", known.sglang)) if has) or "–",
        f"`{known.parser}`" if known.parser else known.no_parser,
        "drafts" if known.mtp == "read" else f"no: {known.mtp}" if known.mtp else "–",
        known.note,
    ]
    return f"| {' | '.join(cells)} |\n"


def _divides(known: Known, shape: ExpertShape | None) -> str:
    reason = known.why_apart or known.undivided or ("experts" if shape is not None else "")
    return f"no: {reason}" if reason else "yes"


def _experts(config: Any, shape: ExpertShape | None) -> str:
    if shape is None:
        text = config.get_text_config()
        keys = ("num_experts", "num_local_experts", "n_routed_experts")
        has = text.model_type in ("llama4_text", "doge") and any(getattr(text, key, None) for key in keys)
        return "by its class alone" if has else "–"
    found = ["divided", *(["replayed"] if shape.routed else []), *(["adapters"] if shape.adapts else [])]
    return ", ".join(found)


def main() -> int:
    """Writes the page, or says how it differs."""
    return write_or_check(Path(sys.argv[-1]), page(), check="--check" in sys.argv, target="reference-docs")


if __name__ == "__main__":
    sys.exit(main())
