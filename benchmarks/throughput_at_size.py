"""A step's products, bytes and kernels against an H100's roofline: `python benchmarks/throughput_at_size.py`.

One rank goes through the trainer's own step on fake tensors (`tools/fake_world`): 7B on 8 GPUs, 30B-A3B on 32, 70B on
64, in the layout that the trainer chooses and with the largest micro-batch of 32,768, 16,384, … tokens that fits
without offloading. Every operation is seen: its products and sums, the bytes that it reads and writes, whether it is a
kernel, and what collectives move. The same step is then counted with settings that verl and prime-rl have published
(SETTINGS says which file), where they have any for the model: what they set, not their code.

An operation takes as long as its products or its bytes at the rates of `Roof`; a micro-batch as long as the largest of
device, host (launching) and collectives, which overlap, with the first gather and the last reduction behind, and
all-to-all exchanges beside; a step so many micro-batches as TOKENS need, and a commit. The *share* is three forwards'
products (recomputation is no use) a second of that, of the peak. It is a prediction: no GPU has run it.

`share_7b` and `share_30b` are the figures with goals; a row's others begin with its name. `--check` fails below them.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "fake_world"))

from _harness import emit, machine, say
from headrace_fake_world.models import MODELS
from headrace_fake_world.step import Case, Measured, counted, planned
from headrace_fake_world.work import Roof, Work, seconds_of
from headrace_trainer.backends.fsdp import experts
from headrace_trainer.backends.fsdp.layouts.layout import Layout
from headrace_trainer.backends.shared.exchange import Room
from headrace_trainer.errors import Refusal

ROW = 4096
"""Tokens of an answer with its prompt."""
TOKENS = 1024 * ROW
"""Of a step: 1,024 answers."""
LARGEST = (32768, 16384, 8192, 4096)
GOALS = {"share_7b": 0.40, "share_30b": 0.30}
FLASH_3 = {"flash_forward": 0.60, "flash_backward": 0.50}
"""Parts of the peak that FlashAttention 3 reaches."""


@dataclass(frozen=True)
class Setting:
    """How one trainer computes a model. `tokens`: of a micro-batch, 0 for the largest that fits."""

    model: str
    ranks: int
    who: str
    said: str
    compiled: bool
    flash_3: bool = False
    exact: bool = False
    """Divided experts send as many rows as there are, and no empty places."""
    tokens: int = 0
    layout: Layout | None = None
    trainer: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.model}_{self.ranks}_{self.who}"


SETTINGS = (
    Setting("qwen2.5-7b", 8, "headrace", "defaults on GPUs with Triton; FlashAttention 2", compiled=True),
    Setting(
        "qwen2.5-7b",
        8,
        "verl",
        "volcengine/verl examples/grpo_trainer/run_qwen2-7b_seq_balance.sh at 3f388066: ppo_max_token_len_per_gpu "
        "24000, gradient checkpointing, FSDP over 8, eager",
        compiled=False,
        tokens=24576,
        layout=Layout("weights", 8, checkpointing=True),
    ),
    Setting(
        "qwen3-30b-a3b",
        32,
        "headrace",
        "defaults on GPUs with Triton: experts are gathered and not divided; FlashAttention 2",
        compiled=True,
    ),
    Setting(
        "qwen3-30b-a3b",
        32,
        "divided",
        "as that, with expert_parallel: 8",
        compiled=True,
        layout=Layout("weights", 32, checkpointing=True, keeps_attention=True),
        tokens=32768,
        trainer={"backend_options": {"expert_parallel": 8}},
    ),
    Setting(
        "qwen3-30b-a3b",
        16,
        "prime-rl",
        "PrimeIntellect-ai/prime-rl configs/advanced/models/qwen3-30b-a3b/rl/4-nodes.toml at 89fe4684: ep 8, cp 2 of "
        "seq_len 131072 (65,536 tokens a rank; offloading of activations left out), ac every layer, compile, "
        "flash_attention_3",
        compiled=True,
        flash_3=True,
        exact=True,
        tokens=65536,
        layout=Layout("weights", 16, checkpointing=True),
        trainer={"backend_options": {"expert_parallel": 8}},
    ),
    Setting("llama-3-70b", 64, "headrace", "defaults on GPUs with Triton; FlashAttention 2", compiled=True),
)


@dataclass(frozen=True)
class Predicted:
    """Of one setting: counts of a micro-batch, and seconds."""

    setting: Setting
    tokens: int
    layout: Layout
    micro: Counter[str]
    moved: Counter[str]
    exchanged: int
    seconds: dict[str, float]
    commit_s: float

    @property
    def micro_batches(self) -> int:
        return -(-TOKENS // (self.setting.ranks * self.tokens))

    @property
    def micro_s(self) -> float:
        """Of a micro-batch."""
        units: int = MODELS[self.setting.model]["num_hidden_layers"] + 1
        bounds = self.seconds["device"], self.seconds["host"], self.seconds["collectives"]
        return max(bounds) + self.seconds["collectives"] / units + self.seconds["exchanges"]

    @property
    def bound(self) -> str:
        """What a micro-batch is bounded by."""
        return max(("device", "host", "collectives"), key=lambda name: self.seconds[name])

    def share(self, roof: Roof) -> float:
        """Of the peak."""
        useful = 3 * self.micro["flops"] * self.micro_batches
        return useful / (roof.peak * (self.micro_s * self.micro_batches + self.commit_s))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=sorted({each.model for each in SETTINGS}))
    parser.add_argument("--check", action="store_true", help="fail below the goals")
    options = parser.parse_args()
    roof = Roof()
    say(machine())
    say("assumed of a GPU: " + "; ".join(roof.lines()))
    say(f"assumed of FlashAttention 3: {FLASH_3}")
    say(
        f"assumed of a step: {TOKENS} tokens in rows of {ROW}, all equally long, none shared; balanced experts"
    )
    found: dict[str, float] = {}
    for setting in SETTINGS:
        if setting.model in options.models:
            own = replace(roof, **FLASH_3) if setting.flash_3 else roof
            row = predicted(setting, own)
            say(text_of(row, own))
            found |= {f"{setting.name}_{name}": value for name, value in figures(row, own)}
    goals = {
        goal: found[f"{name}_share"]
        for goal, name in (("share_7b", "qwen2.5-7b_8_headrace"), ("share_30b", "qwen3-30b-a3b_32_headrace"))
        if f"{name}_share" in found
    }
    emit("throughput_at_size", {**goals, **found})
    if options.check and (low := [name for name, share in goals.items() if share < GOALS[name]]):
        sys.exit(
            f"below the goal: {', '.join(f'{name} {goals[name]:.2f} < {GOALS[name]:.2f}' for name in low)}"
        )


def predicted(setting: Setting, roof: Roof) -> Predicted:
    """Counts one micro-batch and a commit of a setting, and what they take."""
    case = case_of(setting)
    watch = partial(Work, roof, setting.compiled, MODELS[setting.model]["vocab_size"])
    room = partial(Room, share=1.0) if setting.exact else Room
    with patch.object(experts, "Room", room):
        found = counted(case, watch, compiled=setting.compiled)
    micro, commit = found.phases["micro-batch"], found.phases["commit"]
    device = sum(seconds_of(micro.work).values())
    exchanged = micro.moved["all_to_all"]
    seconds = {
        "device": device,
        "host": micro.work["kernels"] * roof.launch_s,
        "collectives": collective_s(found, "micro-batch", setting, roof),
        "exchanges": exchanged / roof.links,
        **seconds_of(micro.work),
    }
    commit_s = sum(seconds_of(commit.work).values()) + collective_s(found, "commit", setting, roof)
    return Predicted(
        setting, case.tokens, found.layout, micro.work, micro.moved, exchanged, seconds, commit_s
    )


def case_of(setting: Setting) -> Case:
    """The setting's own, or with the largest micro-batch that fits."""
    case = Case(
        setting.model,
        setting.ranks,
        row_tokens=ROW,
        layout=setting.layout,
        tokens=setting.tokens,
        trainer=setting.trainer,
    )
    if setting.tokens:
        return case
    for tokens in LARGEST:
        try:
            layout, plan = planned(replace(case, tokens=tokens))
        except Refusal:
            continue
        if layout.offload == "none":
            return replace(case, tokens=tokens, layout=layout, saves_in_place=plan.saves_in_place)
    raise SystemExit(f"{setting.model} does not fit on {setting.ranks} GPUs without offloading")


def collective_s(found: Measured, phase: str, setting: Setting, roof: Roof) -> float:
    """Of gathers and reductions, whose ranks each move all but their own part; what is added over copies goes twice."""
    moved, shards = found.phases[phase].moved, found.layout.shard_ranks
    copies = setting.ranks // shards
    once = moved["all_gather"] + moved["reduce_scatter"]
    twice = 2 * moved["all_reduce"]
    return (once * (shards - 1) / shards + twice * (copies - 1) / max(1, copies)) / roof.links


def figures(row: Predicted, roof: Roof) -> Iterator[tuple[str, float]]:
    """By name."""
    yield "share", row.share(roof)
    yield "tokens_s_gpu", row.tokens / row.micro_s
    yield "micro_batch_tokens", row.tokens
    yield "pflop", (row.micro["flops"] + row.micro["flops in backward"]) / 1e15
    yield "gbytes", row.micro["bytes"] / 1e9
    yield "kernels", row.micro["kernels"]
    yield "waits", row.micro["waits"]
    yield "moved_gbytes", sum(row.moved.values()) / 1e9
    for name in ("device", "host", "collectives", "exchanges"):
        yield f"{name}_s", row.seconds[name]


def text_of(row: Predicted, roof: Roof) -> str:
    """A row for people."""
    own, seconds = dict(figures(row, roof)), row.seconds
    kinds = ", ".join(
        f"{name} {value:.2f}"
        for name, value in seconds.items()
        if name in ("products", "attention", "memory")
    )
    return (
        f"{row.setting.model} × {row.setting.ranks}, {row.setting.who} ({row.setting.said}): {row.layout}; micro-batch "
        f"of {row.tokens} tokens: {own['pflop']:.2f} PFLOP, {own['gbytes']:.0f} GB of memory, {own['kernels']:.0f} "
        f"kernels, {own['moved_gbytes']:.0f} GB in collectives, {own['waits']:.0f} waits of the host; device "
        f"{seconds['device']:.2f} s ({kinds}), launching {seconds['host']:.2f} s, collectives "
        f"{seconds['collectives']:.2f} s, exchanges {seconds['exchanges']:.2f} s: {row.micro_s:.2f} s, bounded by its "
        f"{row.bound}; commit {row.commit_s:.2f} s after {row.micro_batches}; share {own['share']:.3f}"
    )


if __name__ == "__main__":
    main()
