"""`headrace demo`: one command from nothing to a trained model, and its last line for machines."""

from __future__ import annotations

import json

import pytest
from harness.processes import run_python

FIGURES = {
    *("run", "state", "eval_before", "eval_after", "baseline_prefill", "steps", "wall_s"),
    *("trained", "dropped", "duplicates", "max_staleness", "warmup_steps"),
}
SLOTS = 128


def last_line(done):
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, "with --json nothing else is on standard output"
    return json.loads(lines[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "after"),
    [("8", 0.0), pytest.param("200", 0.9, marks=pytest.mark.nightly)],
    ids=["begins", "learns"],
)
def test_the_tiny_model_learns(own_fleet, steps, after):
    """The preset's own claim, as README makes it; in a few steps, all that it says but how well it has learned."""
    fleet = own_fleet()
    demo = ("demo", "--preset", "tiny", "--steps", steps)
    figures = last_line(fleet.headrace(*demo, "--json", timeout_s=550))
    assert figures.keys() >= FIGURES and figures["wall_s"] > 0
    assert (figures["state"], figures["warmup_steps"]) == ("SUCCEEDED", 25)
    assert figures["eval_before"] < 0.2 and figures["eval_after"] >= after, figures
    assert (figures["trained"], figures["duplicates"], figures["max_staleness"]) == (
        figures["steps"] * SLOTS - figures["dropped"],
        0,
        0,
    )
    loaded = run_python("-c", GREEDY, figures["export_path"])
    assert float(loaded) >= after, "the exported model answers as the run says"
    fleet.look()
    fleet.assert_nothing_left()


GREEDY = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
right = 0
for number in range(0, 1000, 20):
    inputs = tokenizer(f"{number:03d}=", return_tensors="pt")
    made = model.generate(input_ids=inputs["input_ids"], max_new_tokens=4, do_sample=False)
    text = tokenizer.decode(made[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
    right += text.strip().startswith(f"{number:03d}")
print(right / 50)
"""
