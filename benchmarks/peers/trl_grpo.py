"""One GRPO run with TRL's GRPOTrainer on the CPU; run by the peer's own Python, see `end_to_end_vs_trl.py`.

    python trl_grpo.py TASK.json

Prints a JSON line for the start and for each optimizer step: when it ended (seconds of CLOCK_MONOTONIC), its samples
and their mean reward. Of Headrace only the scorers are imported: plain Python, so both sides reward alike.
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
from headrace_reward.scorers import choose
from headrace_reward.scorers.base import Answer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Rewards:
    """The run's reward: weights times scores, added up."""

    __name__ = "reward"  # TRL's name of its metric

    def __init__(self, scorers: list[dict[str, Any]]) -> None:
        self._parts = [
            (item.get("weight", 1.0), choose(item["name"], item.get("options", {})).build())
            for item in scorers
        ]
        self.since_step: list[float] = []

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        **_: Any,
    ) -> list[float]:
        answers = [
            Answer(prompt, completion, reference, token_count=len(ids))
            for prompt, completion, ids, reference in zip(
                prompts, completions, completion_ids, answer, strict=True
            )
        ]
        found = [sum(weight * one.score(answer) for weight, one in self._parts) for answer in answers]
        self.since_step += found
        return found


class StepTimes(TrainerCallback):
    """Tells when each step ended."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        tell({"started": time.monotonic()})

    def on_step_end(self, *_: Any, **__: Any) -> None:
        values, self._rewards.since_step = self._rewards.since_step, []
        tell({"at": time.monotonic(), "samples": len(values), "reward": sum(values) / len(values)})


def tell(line: dict[str, float]) -> None:
    """One line for whoever started this."""
    print(json.dumps(line), flush=True)


def config(task: dict[str, Any], output: str) -> GRPOConfig:
    """The task as TRL says it; everything that only costs time is off."""
    samples = task["prompts_per_step"] * task["group_size"]
    micro = task.get("micro_batch") or samples
    return GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=task["dtype"] == "bfloat16",  # autocast over fp32 master weights
        seed=task["seed"],
        max_steps=task["steps"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=samples // micro,
        num_generations=task["group_size"],
        max_completion_length=task["max_new_tokens"],
        temperature=task["temperature"],
        use_vllm=False,
        loss_type="dapo",
        beta=0.0,
        num_iterations=1,
        scale_rewards="group",
        learning_rate=task["lr"],
        lr_scheduler_type=task["schedule"],
        warmup_steps=0,
        adam_beta1=task["beta1"],
        adam_beta2=task["beta2"],
        adam_epsilon=task["eps"],
        weight_decay=task["weight_decay"],
        max_grad_norm=task["grad_clip"],
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        **task.get("extra", {}),
    )


def main() -> None:
    """Command line."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    pure = task.get("pure_bf16")
    model = AutoModelForCausalLM.from_pretrained(
        task["model"], dtype=torch.bfloat16 if pure else torch.float32, attn_implementation="sdpa"
    )
    rewards = Rewards(task["scorers"])
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=model,
            args=config(task, output),
            reward_funcs=[rewards],
            train_dataset=Dataset.from_list(task["rows"]),
            processing_class=tokenizer,
            callbacks=[StepTimes(rewards)],
        )
        trainer.train()
    sys.stdout.flush()
    os._exit(0)  # threads of libraries may hold up a normal exit


if __name__ == "__main__":
    main()
