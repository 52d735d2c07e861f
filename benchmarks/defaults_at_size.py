"""What a run leaves to its GPUs, by model and GPU: `python benchmarks/defaults_at_size.py [--write]`.

Prints the table of docs/at-size.md, or writes it there; `integration_tests/packaging/test_defaults_table.py` holds both
together. Needs no GPU, no weights and no torch: the defaults follow from config.json. A run of GRPO in turns on all
GPUs, with a rank on each, prompts of 1,024 tokens and answers of up to 8,192, vLLM.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "fake_world"))

from headrace_fake_world.models import MODELS
from headrace_schema.gpu_defaults import SPAN, Gpus, gpu_defaults
from headrace_schema.learner_size import fit
from headrace_schema.model_size import model_size
from headrace_schema.spec import RunSpec

PAGE = Path(__file__).resolve().parents[1] / "docs" / "at-size.md"
BEGIN, END = "<!-- table of benchmarks/defaults_at_size.py -->\n", "<!-- end of the table -->\n"
NAMES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-30b-a3b", "qwen2.5-32b", "llama-3-70b")
CARDS = {"24 GB": 24e9, "40 GB": 40e9, "80 GB": 80e9, "141 GB": 141e9}
CLUSTERS = (
    ("24 GB", 1),
    ("40 GB", 8),
    ("80 GB", 1),
    ("80 GB", 8),
    ("80 GB", 32),
    ("141 GB", 8),
    ("141 GB", 32),
)
ON_HOST = 8
ANSWER = 8192
HEAD = ("model", "GPUs", "`tensor_parallel_size`", "`max_concurrency`", "layout", "`micro_batch_tokens`")


def spec_on(ranks: int) -> RunSpec:
    """The run of each row."""
    return RunSpec.model_validate(
        {
            "model": {"path": "a/model"},
            "data": {"source": "copy_digits"},
            "sampling": {"max_new_tokens": ANSWER},
            "algorithm": {"name": "grpo", "group_size": 8, "prompts_per_step": 64},
            "trainer": {"ranks": ranks},
            "placement": {"mode": "collocated"},
            "rollout": {"engine": "vllm"},
            "reward": {"scorers": [{"name": "exact"}]},
        }
    )


def row(name: str, card: str, count: int) -> tuple[str, ...]:
    """What `auto` chooses for a model on a cluster."""
    spec, memory = spec_on(count), int(CARDS[card])
    size = model_size(MODELS[name])
    assert size is not None
    gpus = Gpus(memory, min(count, ON_HOST), count, min(count, ON_HOST))
    decided = {each.key: each for each in gpu_defaults(spec, "vllm", MODELS[name], gpus)}
    span = decided[SPAN].value if SPAN in decided else 1
    share = decided["rollout.engine_options.gpu_memory_utilization"].value
    fits = size.weight_bytes(None) <= span * share * memory
    found = fit(spec, size, memory, min(count, ON_HOST), 1024 + ANSWER)
    return (
        name,
        f"{count} × {card}",
        str(span) if fits else "refused: weights",
        str(decided["rollout.max_concurrency"].value) if fits else "",
        found.layout,
        f"{decided['trainer.micro_batch_tokens'].value:,}",
    )


def table() -> str:
    """All rows, in Markdown."""
    rows = [row(name, card, count) for name in NAMES for card, count in CLUSTERS]
    lines = [HEAD, ("---",) * len(HEAD), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def page(text: str) -> str:
    """The page's text with the table of now. Raises ValueError where its marks are gone."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{PAGE.name} has no place for the table: {BEGIN!r} to {END!r}")
    return before + BEGIN + table() + END + after


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the table into docs/at-size.md")
    if parser.parse_args().write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
