"""Session runs on a real fleet: a loop of one's own learns, samples, saves and loads; a killed trainer loses nothing."""

from __future__ import annotations

import pytest
import torch
from harness.ledger import audit
from headrace.client import Datum, Training
from transformers import AutoModelForCausalLM

ROWS = [[5, 9, 12, 7, 20, 4], [8, 8, 3, 30, 11, 6, 9]]
RATE = 1e-2


def data(rows=ROWS):
    return [Datum(tokens=row[:-1], targets=row[1:]) for row in rows]


@pytest.fixture
def session(fleet, tiny_model):
    """Opens sessions on the tiny model; they are cancelled at the end."""
    opened = []

    def open_session(**more):
        spec = {"model": {"path": str(tiny_model), "dtype": "float32"}, "export": False, **more}
        made = Training(fleet.client, spec)
        opened.append(made)
        return made

    yield open_session
    for made in opened:
        if made.info().state not in ("SUCCEEDED", "FAILED", "CANCELLED"):
            fleet.client.cancel(made.session)


def plain_losses(model_path, steps):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        terms = []
        for row in ROWS:
            found = model(torch.tensor([row[:-1]])).logits[0].log_softmax(-1)
            terms.append(-found.gather(-1, torch.tensor(row[1:])[:, None]).sum())
        loss = sum(terms)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_loop_of_ones_own_learns_what_plain_torch_learns_and_samples_it(fleet, session, tiny_model):
    training = session()
    calls = [(training.forward_backward(data()), training.optim_step(RATE)) for _ in range(4)]
    losses = [gradient.result(120).metrics["loss:sum"] for gradient, _ in calls]
    assert losses == pytest.approx(plain_losses(tiny_model, 4), rel=1e-3)
    steps = [step.result() for _, step in calls]
    assert [step.step for step in steps] == [1, 2, 3, 4]
    published = training.publish().result(60)
    assert published.version == steps[-1].version
    prompt = ROWS[0][:4]
    asked = dict(samples=3, max_tokens=5, seed=7, prompt_log_probs=True, top_prompt_log_probs=2)
    found = training.sample(prompt, **asked).result(120)
    assert found.version == published.version and len(found.sequences) == 3
    again = training.sample(prompt, **asked).result(120)
    assert again.sequences == found.sequences
    told = training.forward([{"tokens": prompt[:-1], "targets": prompt[1:]}]).result(60).log_probs[0]
    assert found.prompt_log_probs[0] is None and found.prompt_log_probs[1:] == pytest.approx(told, abs=1e-3)
    assert [len(each) for each in found.top_prompt_log_probs[1:]] == [2, 2, 2]
    sampled = found.sequences[0]
    whole = [*prompt, *sampled.tokens]
    read = training.forward([{"tokens": whole[:-1], "targets": whole[1:]}]).result(60).log_probs[0]
    assert sampled.log_probs == pytest.approx(read[-len(sampled.tokens) :], abs=1e-3)
    training.close()
    run = fleet.client.wait(training.session, timeout=120)
    assert run.state == "SUCCEEDED"
    assert len(audit(fleet, run).trained) == 4
