"""Losses that a loop of the user's own asks for, against plain torch: values, gradients, AdamW, and what is refused."""

from __future__ import annotations

import math
import re

import pytest
import torch
from headrace.trainer.v1 import trainer_pb2
from headrace_modelkit.loading import load_model
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.digests import set_digest
from headrace_trainer.session.calls import by_prompt, sequence_sample
from trainer_calls import refusal, refused

SESSION = {"name": "session", "group_size": 1, "prompts_per_step": 1}
NUMBERS = ("weights", "advantages", "log_probs")
ROWS = [[5, 9, 12, 7, 20, 4], [8, 8, 3, 30]]
ADAM = {
    "learning_rate": 1e-2,
    "beta1": 0.8,
    "beta2": 0.9,
    "eps": 1e-6,
    "weight_decay": 0.1,
    "grad_clip_norm": 0.5,
}


def data(**more):
    return [
        trainer_pb2.LossSequence(
            token_ids=row[:-1], targets=row[1:], **{name: own(len(row) - 1) for name, own in more.items()}
        )
        for row in ROWS
    ]


def ramp(first, step):
    return lambda count: [first + step * place for place in range(count)]


OFF_POLICY = {"weights": ramp(0.0, 0.5), "advantages": ramp(-1.0, 0.7), "log_probs": ramp(-3.0, -0.2)}


async def ask(
    client, sequences, loss="cross_entropy", *, prompt=0, learn=True, attempt=1, at=0, options=None
):
    return await client.stub.ComputeLoss(
        trainer_pb2.ComputeLossRequest(
            header=client.header(),
            step=at,
            attempt=attempt,
            prompt_ordinal=prompt,
            slot_attempt=prompt + 1,
            sequences=sequences,
            loss=loss,
            options=options or {},
            learn=learn,
            digest=f"digest-{prompt}",
        ),
        timeout=240,
    )


async def step(client, prompts=1, attempt=1, at=0, base=1, **adam):
    digest = set_digest((place, 0, place + 1, f"digest-{place}") for place in range(prompts))
    request = trainer_pb2.CommitStepRequest(
        header=client.header(),
        step=at,
        attempt=attempt,
        base_number=base,
        next_number=base + 1,
        set_digest=digest,
    )
    request.adam.CopyFrom(trainer_pb2.AdamParams(**(ADAM | adam)))
    return await client.stub.CommitStep(request, timeout=240)


def plain(directory):
    model = load_model(ModelSection(path=str(directory), dtype="float32"))
    return model.train()


def log_probs(model, sequence):
    found = model(torch.tensor([list(sequence.token_ids)])).logits[0].log_softmax(-1)
    each = len(sequence.targets) // len(sequence.token_ids)
    rows = torch.arange(len(sequence.token_ids)).repeat_interleave(each)
    return found[rows, torch.tensor(list(sequence.targets))]


def formula(loss, lp, sequence, options):
    """As the tinker documentation writes them."""
    weights = torch.tensor(list(sequence.weights) or [1.0] * len(lp))
    if loss == "cross_entropy":
        return -(weights * lp).sum()
    q, advantages = torch.tensor(list(sequence.log_probs)), torch.tensor(list(sequence.advantages))
    ratio = (lp - q).exp()
    low, high = options.get("clip_low_threshold", 0.8), options.get("clip_high_threshold", 1.2)
    terms = {
        "importance_sampling": ratio * advantages,
        "ppo": torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages),
        "cispo": ratio.detach().clamp(low, high) * lp * advantages,
        "dro": lp * advantages - 0.5 * options.get("beta", 0.05) * (lp - q) ** 2,
    }[loss]
    return -(weights * terms).sum()


@pytest.mark.parametrize(
    ("loss", "options", "more"),
    [
        ("cross_entropy", {}, {"weights": ramp(0.0, 0.5)}),
        ("importance_sampling", {}, OFF_POLICY),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}, OFF_POLICY),
        ("cispo", {}, OFF_POLICY),
        ("dro", {"beta": 0.3}, OFF_POLICY),
    ],
)
async def test_loss_gradient_and_adamw_are_those_of_plain_torch(
    client, make_config, tiny_directory, loss, options, more
):
    await client.open(make_config(algorithm=SESSION))
    await client.begin(0, 1, 1, 2)
    sequences, model = data(**more), plain(tiny_directory)
    only_read = await ask(client, sequences, loss, learn=False, options=options)
    reply = await ask(client, sequences, loss, options=options)
    own = [log_probs(model, each) for each in sequences]
    expected = sum(formula(loss, lp, each, options) for lp, each in zip(own, sequences, strict=True))
    for found, read, lp in zip(reply.sequences, only_read.sequences, own, strict=True):
        assert list(found.values) == pytest.approx(lp.tolist(), abs=1e-4)
        assert list(read.values) == pytest.approx(lp.tolist(), abs=1e-4)
    assert reply.loss == pytest.approx(float(expected.detach()), rel=1e-4)
    assert only_read.loss == pytest.approx(reply.loss, rel=1e-5)
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM["grad_clip_norm"])
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6).step()
    committed = await step(client)
    assert committed.figures["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    await client.record(0, 1, 2)
    learned = await client.weights(2)
    for name, tensor in model.state_dict().items():
        if name in learned:
            assert torch.allclose(learned[name], tensor, atol=2e-4), name


async def test_several_calls_add_up_and_targets_may_be_several_of_a_position(
    client, make_config, tiny_directory
):
    await client.open(make_config(algorithm=SESSION))
    await client.begin(0, 1, 1, 2)
    soft = trainer_pb2.LossSequence(
        token_ids=[5, 9, 12], targets=[9, 3, 12, 4, 7, 5], weights=[0.75, 0.25] * 3
    )
    replies = [await ask(client, [soft], prompt=0), await ask(client, data(), prompt=1)]
    model = plain(tiny_directory)
    own = log_probs(model, soft)
    assert list(replies[0].sequences[0].values) == pytest.approx(own.tolist(), abs=1e-4)
    total = formula("cross_entropy", own, soft, {}) + sum(
        formula("cross_entropy", log_probs(model, each), each, {}) for each in data()
    )
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    committed = await step(client, prompts=2, grad_clip_norm=0.0)
    assert committed.figures["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert (committed.sequence_count, committed.token_count) == (2, 6 + 8)


async def test_sequences_of_a_prompt_are_computed_together_and_told_in_the_calls_order(
    client, make_config, tiny_directory
):
    await client.open(make_config(algorithm=SESSION))
    await client.begin(0, 1, 1, 2)
    prompts, model = ([5, 9, 12], [5, 9, 30, 4]), plain(tiny_directory)
    given = []
    for place in range(6):
        prompt, answer = prompts[place % 2], [3 + place, 7, 11 + place]
        ids, before = [*prompt, *answer], [0.0] * (len(prompt) - 1)
        told = (
            {"weights": [*before, 1.0, 1.0, 1.0]} if place < 4 else {"advantages": [*before, 1.0, -1.0, 1.0]}
        )
        given.append(trainer_pb2.LossSequence(token_ids=ids[:-1], targets=ids[1:], **told))
    samples = [
        sequence_sample(*(list(getattr(each, name)) for name in ("token_ids", "targets", *NUMBERS)))
        for each in given
    ]
    grouped = by_prompt(samples)
    assert [[samples.index(each) for each in group] for group in grouped] == [[0, 2, 4], [1, 3, 5]]
    for learn in (True, False):
        reply = await ask(client, given, learn=learn)
        for found, each in zip(reply.sequences, given, strict=True):
            assert list(found.values) == pytest.approx(log_probs(model, each).tolist(), abs=1e-4)


def test_sequences_of_which_all_tokens_count_are_together_where_they_begin_alike():
    rows = [[*range(40), last] for last in (50, 51)] + [[9, 8, 7], [9, 8, 6]]
    samples = [sequence_sample(row[:-1], row[1:], [], [], []) for row in rows]
    assert list(map(len, by_prompt(samples))) == [2, 1, 1]


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
async def test_weights_alone_are_loaded_with_the_optimizer_of_a_first_step(client, make_config, lora):
    async def one_step(at, base, rows):
        await client.begin(at, 1, base, base + 1)
        await ask(client, data()[rows], at=at)
        await step(client, at=at, base=base, weight_decay=0.0, grad_clip_norm=0.0)
        await client.record(at, 1, base + 1)
        return await client.weights(base + 1)

    await client.open(make_config(algorithm=SESSION, trainer={"lora": lora}))
    before, moved = await one_step(0, 1, slice(0, 1)), {}
    saved = await client.save(2)
    for number, weights_only in ((10, True), (20, False)):
        await client.restore(saved.checkpoint.name, number, weights_only=weights_only)
        held = await client.weights(number)
        assert all(torch.equal(held[name], before[name]) for name in before)
        after = await one_step(1, number, slice(1, 2))
        change = torch.cat([(after[name] - held[name]).flatten().abs() for name in held])
        moved[weights_only] = float(change[change > 0].median()) / ADAM["learning_rate"]
    # AdamW's first step moves a weight by the rate, whatever its gradient; the next one hangs on both gradients.
    assert moved[True] == pytest.approx(1.0, abs=0.05) and moved[False] < 0.9


async def test_a_loss_that_is_not_finite_commits_nothing(client, make_config):
    await client.open(make_config(algorithm=SESSION))
    await client.begin(0, 1, 1, 2)
    far = data(advantages=ramp(1.0, 0.0), log_probs=lambda count: [-1e4] * count)
    assert (await ask(client, data())).finite
    assert not (await ask(client, far, "importance_sampling", prompt=1)).finite
    assert (await step(client)).result != trainer_pb2.COMMIT_RESULT_COMMITTED
    await client.begin(0, 2, 1, 2)
    assert (await ask(client, data(), attempt=2)).finite
    assert (await step(client, attempt=2)).result == trainer_pb2.COMMIT_RESULT_COMMITTED


@pytest.mark.parametrize(
    ("sequence", "more", "said"),
    [
        ({"token_ids": [5, 99], "targets": [9, 9]}, {}, r"data\[0\]: the id 99 is none of the model's"),
        ({"token_ids": [5, 9], "targets": [9]}, {}, r"data\[0\]: 1 targets of 2 tokens"),
        ({"token_ids": [5], "targets": [9], "weights": [1, 1]}, {}, r"2 weights of 1 targets"),
        ({"token_ids": [5], "targets": [9], "weights": [math.nan]}, {}, "not finite"),
        ({"token_ids": [5] * 5000, "targets": [9] * 5000}, {}, "has 5000 tokens, and the model reads"),
        ({"token_ids": [], "targets": []}, {}, "no token"),
        ({"token_ids": [5], "targets": [9]}, {"loss": "ppo"}, "no log_probs, of which ppo makes ratios"),
        ({"token_ids": [5], "targets": [9]}, {"loss": "gspo"}, "loss: 'gspo' is none; use cross_entropy"),
        (
            {"token_ids": [5], "targets": [9], "log_probs": [-1]},
            {"loss": "dro", "options": {"betta": 1}},
            "dro has no option 'betta'",
        ),
    ],
)
async def test_what_cannot_be_computed_is_refused_by_name(client, make_config, sequence, more, said):
    await client.open(make_config(algorithm=SESSION))
    await client.begin(0, 1, 1, 2)
    reason, message = await refusal(ask(client, [trainer_pb2.LossSequence(**sequence)], **more))
    assert reason == "INVALID"
    assert re.search(said, message), message
    assert (await ask(client, data())).finite  # the attempt goes on


async def test_a_call_comes_once_an_attempt_and_of_a_session_run_alone(client, make_config):
    await client.open(make_config(algorithm=SESSION))
    assert await refused(ask(client, data())) == "NOT_OPEN"
    await client.begin(0, 1, 1, 2)
    await ask(client, data())
    assert await refused(ask(client, data())) == "CONFLICT"
    await client.reopen_with(make_config())
    reason, message = await refusal(ask(client, data(), learn=False))
    assert reason == "CONFLICT" and "the run is no session" in message
