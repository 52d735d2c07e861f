"""Runs whose answers the data gives: they learn what a plain loop learns, and a trainer that dies changes no bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ledger import audit
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS, BATCH, STEPS, RATE = 40, 8, 12, 1e-3


def rows_of(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def given_spec(tiny_model, tmp_path_factory):
    """Makes a spec of the rows `a b c` → `c b a`, in either workflow."""
    folder = tmp_path_factory.mktemp("rows")
    texts = [f"{n:03d}" for n in range(0, 1000, 1000 // ROWS)][:ROWS]
    supervised = [{"question": text, "answer": text[::-1]} for text in texts]
    pairs = [{"prompt": text, "chosen": text[::-1], "rejected": "999"} for text in texts]
    files = {
        "supervised": (rows_of(folder / "rows.jsonl", supervised), "plain"),
        "preference": (rows_of(folder / "pairs.jsonl", pairs), "dpo"),
    }

    def make(workflow: str, **algorithm: Any) -> dict[str, Any]:
        path, form = files[workflow]
        return {
            "name": workflow,
            "workflow": workflow,
            "steps": STEPS,
            "seed": 7,
            "model": {"path": str(tiny_model), "dtype": "float32"},
            "data": {
                "source": "jsonl",
                "options": {"path": path, "form": form},
                "heldout": 8,
                "prompt": {"chat": False},
            },
            "algorithm": {"prompts_per_step": BATCH, **algorithm},
            "optimizer": {"lr": RATE},
            "evaluation": {"every": 3},
            "checkpoint": {"interval_steps": 1},
        }

    return make


def plain_losses(model_path: Path, batches: list[list[tuple[str, str]]]) -> list[float]:
    """Losses of a loop in plain torch over batches of (prompt, answer)."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for batch in batches:
        terms = []
        for prompt, answer in batch:
            before = tokenizer.encode(prompt)
            ids = [*before, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
            found = model(torch.tensor([ids])).logits[0, len(before) - 1 : -1].log_softmax(-1)
            terms.append(-found.gather(-1, torch.tensor(ids[len(before) :])[:, None])[:, 0])
        loss = torch.cat(terms).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def supervised(fleet, given_spec):
    """A supervised run that nothing has disturbed."""
    return fleet.succeed(fleet.submit(given_spec("supervised")))


def test_supervised_steps_are_those_of_a_plain_loop(fleet, supervised, tiny_model):
    run = supervised
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * BATCH and not found.dropped
    assert not any(certificate.tokens_by_version for certificate in found.live)
    steps = fleet.client.metrics(run.id)
    batches = [
        [(each.prompt, each.completion) for each in fleet.client.trajectories(run.id, step=step.step)]
        for step in steps
    ]
    assert [step.figures["loss"] for step in steps] == pytest.approx(
        plain_losses(tiny_model, batches), abs=1e-4
    )
    assert all(step.reward_mean is None and "generate" not in step.stage_s for step in steps)
    first, *_, last = run.evaluations
    assert last.score < 0.8 * first.score and last.measure == "loss"


def test_a_run_that_goes_on_from_its_checkpoint_ends_with_the_same_bits(fleet, supervised, given_spec):
    run = fleet.submit(given_spec("supervised"))
    fleet.reach(run, 2)
    fleet.client.pause(run.id)
    assert fleet.state(run, "PAUSED").step < STEPS
    fleet.client.resume(run.id)
    assert fleet.succeed(run).policy.digest == supervised.policy.digest


@pytest.mark.nightly  # quick: the run above that is paused goes on from a checkpoint, too
def test_a_killed_trainer_changes_no_bit(fleet, given_spec):
    spec = given_spec("supervised") | {"steps": 60}
    whole = fleet.succeed(fleet.submit(spec))
    run = fleet.submit(spec)
    fleet.reach(run, 3)
    fleet.kill("trainer-0")
    run = fleet.succeed(run)
    assert run.recoveries and len(audit(fleet, run).trained) == 60 * BATCH
    assert run.policy.digest == whole.policy.digest


def test_preferences_raise_the_accuracy_of_margins(fleet, given_spec):
    run = fleet.succeed(fleet.submit(given_spec("preference")))
    assert len(audit(fleet, run).trained) == 2 * STEPS * BATCH
    steps = fleet.client.metrics(run.id)
    assert steps[0].figures["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert steps[-1].figures["reward_accuracy"] > 0.9 and steps[-1].figures["loss"] < 0.6
    last = run.evaluations[-1]
    assert last.score > 0.9 and last.parts.keys() == {"chosen_loss", "reward_margin"}


def test_prompts_are_answered_in_evaluations_beside_the_held_out_loss(fleet, given_spec):
    spec = given_spec("supervised")
    spec["steps"] = 3
    spec["evaluation"] = {"every": 3, "data": {"copied": {"source": "copy_digits", "limit": 6}}}
    spec["reward"] = {"scorers": [{"name": "exact"}]}
    spec["sampling"] = {"max_new_tokens": 4}
    run = fleet.succeed(fleet.submit(spec))
    assert [(each.kind, each.step) for each in run.evaluations] == [
        (kind, step) for step in (0, 3) for kind in ("heldout", "copied")
    ]
    read, answered = run.evaluations[-2:]
    assert read.measure == "loss" and answered.answers == 6 and not answered.unanswered
    assert {each["prompt"] for each in answered.examples} and 0 <= answered.score <= 1
    alone = fleet.succeed(fleet.submit({**spec, "evaluation": {"every": 3}, "reward": {}, "sampling": {}}))
    assert alone.policy.digest == run.policy.digest, "evaluations change nothing that is learned"
