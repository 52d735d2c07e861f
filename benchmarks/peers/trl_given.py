"""One supervised or DPO run with TRL's trainers on the CPU; run by the peer's own Python, see `given_vs_trl.py`.

    python trl_given.py TASK.json

Prints a JSON line for the start and for each optimizer step: when it ended (seconds of CLOCK_MONOTONIC), and its loss.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


class Steps(TrainerCallback):
    """Tells when each step ended, and then its loss."""

    def __init__(self) -> None:
        self._ended = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        tell({"started": time.monotonic()})

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._ended = time.monotonic()

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            tell({"at": self._ended, "loss": float(logs["loss"])})


def tell(line: dict[str, float]) -> None:
    """One line for whoever started this."""
    print(json.dumps(line), flush=True)


def in_order(trainer: type[Any]) -> type[Any]:
    """The trainer, with its rows as they come, and losses that are not rounded."""

    class InOrder(trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    return InOrder


def main() -> None:
    """Command line."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    pairs = task["workflow"] == "preference"
    micro = task["micro_batch"]
    common: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "max_steps": task["steps"],
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": task["rows_per_step"] // micro,
        "learning_rate": task["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "max_length": None,
    }
    model = AutoModelForCausalLM.from_pretrained(
        task["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    with tempfile.TemporaryDirectory() as output:
        config = (
            DPOConfig(output_dir=output, beta=0.1, **common)
            if pairs
            else SFTConfig(output_dir=output, completion_only_loss=True, **common)
        )
        trainer = in_order(DPOTrainer if pairs else SFTTrainer)(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(task["rows"]),
            processing_class=AutoTokenizer.from_pretrained(task["model"]),
            callbacks=[Steps()],
        )
        trainer.train()
    sys.stdout.flush()
    os._exit(0)  # threads of libraries may hold up a normal exit


if __name__ == "__main__":
    main()
