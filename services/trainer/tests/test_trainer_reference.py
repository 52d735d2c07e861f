"""The reference model, KL terms and the entropy bonus: gradients by definition, resumes, what is refused."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import grpc
import msgspec
import pytest
import torch
from headrace_modelkit.loading import load_model, save_model
from headrace_modelkit.presets.tiny import CHARACTERS, character_tokenizer
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.weights import load_weights
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.errors import reason_of
from headrace_trainer.algorithms.functional import kl_estimate
from headrace_trainer.backends._base import CommitReport
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.learner import BatchLearner, Learner
from headrace_trainer.learning.planning import Costs

KL = {"kl_loss_coef": 0.3, "entropy_coef": 0.1}


@pytest.fixture
def make_moved(make_backend, accumulate, sequences):
    """A backend whose policy has left its reference by a step, and groups with their columns."""

    def make(options, seeds=(2, 3), **sections):
        backend = make_backend(algorithm={"options": options}, **sections)
        backend.load_reference()
        backend._algorithm.load_state({})
        start = [msgspec.structs.replace(s, columns=of_none(backend, s)) for s in sequences(1)]
        accumulate(backend, [start], 512)
        backend.commit(7.0, 3e-3)
        groups = [[msgspec.structs.replace(s, weight=0.5) for s in sequences(seed)] for seed in seeds]
        columns = backend._algorithm.columns
        found = [backend.infer([group], columns) if columns else [{}] * len(group) for group in groups]
        return backend, [
            [msgspec.structs.replace(s, columns=own) for s, own in zip(group, infer, strict=True)]
            for group, infer in zip(groups, found, strict=True)
        ]

    return make


def of_none(backend, sequence):
    return {name: [-3.0] * len(sequence.trained) for name in backend._algorithm.columns}


def plain_gradient(backend, groups, loss_of):
    """By transformers alone, from logits that are whole: by weight name."""
    model = load_model(ModelSection(path=backend._config.model.path, dtype="float32"))
    load_weights(model, dict(backend.weights()))
    total = 0.0
    for sequence in itertools.chain(*groups):
        log_probs_TV = model(torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
        rows = torch.tensor(sequence.trained) - 1
        ids = torch.tensor([sequence.tokens[position] for position in sequence.trained])
        entropy_K = -(log_probs_TV[rows].exp() * log_probs_TV[rows]).sum(-1)
        total = total + loss_of(log_probs_TV[rows, ids], entropy_K, sequence) * sequence.weight
    total.backward()
    return {name: value.grad / 7.0 for name, value in model.named_parameters()}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k3+"])
def test_kl_and_entropy_terms_have_the_gradient_of_their_definition(
    make_moved, accumulate, relative_l2, estimator
):
    backend, groups = make_moved({**KL, "kl_estimator": estimator})

    def loss_of(log_probs_K, entropy_K, sequence):
        reference_K = torch.tensor(sequence.columns["reference_log_probs"])
        assert not torch.allclose(reference_K, log_probs_K, atol=1e-3), "the policy has left the reference"
        policy_K = -torch.tensor(sequence.advantages) * (log_probs_K - log_probs_K.detach()).exp()
        kl_K = kl_estimate(log_probs_K, reference_K, estimator)
        return (policy_K + 0.3 * kl_K - 0.1 * entropy_K).sum()

    expected = plain_gradient(backend, groups, loss_of)
    accumulate(backend, groups, 512)
    found = backend.reduced_gradient(7.0)
    assert relative_l2(found, {name: expected[name] for name in found}) < 1e-4


def test_micro_batches_order_and_shared_prefixes_leave_the_gradient_alone(
    make_moved, accumulate, relative_l2
):
    backend, groups = make_moved(KL)
    found = []
    for order, budget, shared in ((groups, 512, True), (groups[::-1], 24, True), (groups, 48, False)):
        accumulate(backend, order, budget, shared=shared)
        found.append(backend.reduced_gradient(7.0))
    assert all(relative_l2(each, found[0]) < 1e-5 for each in found[1:])


def test_coefficients_of_zero_change_no_bit_and_load_no_reference(make_moved, accumulate):
    gradients = []
    for options in ({}, {"kl_loss_coef": 0.0, "entropy_coef": 0.0}):
        backend, groups = make_moved(options)
        assert backend.reference is None and not backend._algorithm.every_token
        accumulate(backend, groups, 48)
        gradients.append(backend.reduced_gradient(7.0))
    assert all(gradients[0][name].equal(value) for name, value in gradients[1].items())


def test_at_the_start_the_kl_is_zero_and_adds_no_gradient(make_backend, accumulate, sequences, relative_l2):
    found = []
    for options in ({}, {"kl_loss_coef": 10.0}):
        backend = make_backend(algorithm={"options": options})
        backend.load_reference()
        group = sequences(1)
        if options:
            columns = backend.infer([group], ["reference_log_probs"])
            group = [msgspec.structs.replace(s, columns=c) for s, c in zip(group, columns, strict=True)]
        accumulate(backend, [group], 512)
        sums = backend._figures.sums()
        found.append(backend.reduced_gradient(1.0))
    assert sums["own.reference_kl"] == pytest.approx(0.0, abs=1e-9)
    assert relative_l2(found[1], found[0]) < 1e-5


def test_between_uses_a_reference_on_a_gpu_lies_in_host_memory(make_moved, accumulate, monkeypatch):
    backend, groups = make_moved(KL)
    reference, moves = backend._reference, []
    monkeypatch.setattr(reference, "_ranks", SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(reference._model, "move", lambda move: moves.append(reference._away))
    policy = lambda batch, temperature, anchor: (batch.advantages_K, None)  # noqa: E731
    policy.model = policy.routing = None
    monkeypatch.setattr(reference._model, "policy", policy)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    packed = backend._pack([groups[0]])
    for _ in range(2):
        reference.log_probs(packed)
    assert moves == [], "it stays over the rounds of an infer pass"
    reference.park()
    reference.park()
    reference.log_probs(packed)
    assert moves == [False, True], "away once, and back when it is used"


async def learned(client, config, make_settled, settled_digest, version, rewards=None):
    """One step of one group; its reply."""
    number = version.number + 1
    group = make_settled(version.ordinal, version=version, rewards=rewards)
    await client.begin(version.ordinal, 1, version.number, number)
    [response] = await client.learn(version.ordinal, 1, [group])
    assert response.outcomes[0].disposition == 1, response
    reply = await client.commit(version.ordinal, 1, version.number, number, settled_digest([group]))
    await client.record(version.ordinal, 1, number)
    return reply


WARM = {
    "trainer": {"warmup": {"steps": 3, "lr": 1e-3, "batch": 6}},
    "warmup_examples": [{"text": f"copy {n}: ", "answer": str(n)} for n in range(10, 20)],
}


@pytest.mark.parametrize("sections", [{}, WARM], ids=["cold", "after a warm-up"])
async def test_a_resumed_run_goes_on_with_its_reference_and_its_coefficient(
    client, make_config, make_settled, settled_digest, sections
):
    options = {"kl_loss_coef": 0.5, "kl_target": 1e-6, "kl_horizon": 20}
    config = make_config(**sections, algorithm={"options": options})
    restored = await client.open(config)
    assert restored.figures["reference_bytes"] > 100_000
    trajectory = make_settled(0, version=restored.version).members[1].trajectory
    reference = list((await client.infer([trajectory], kind=2)).sequences[0].values)
    assert reference == list((await client.infer([trajectory])).sequences[0].values)
    first = await learned(client, config, make_settled, settled_digest, restored.version)
    assert first.figures["reference_kl"] == 0.0 and first.figures["kl_coefficient"] == 0.5
    assert first.figures["infer_seconds"] > 0
    second = await learned(client, config, make_settled, settled_digest, first.version)
    # Below its target the coefficient sinks by a fifth of 4 / 20 samples; above it rises by as much.
    assert second.figures["reference_kl"] > 1e-6
    assert second.figures["kl_coefficient"] == pytest.approx(0.5 * 0.96)
    saved = await client.save(second.version.number)
    straight = await learned(client, config, make_settled, settled_digest, second.version)
    assert straight.figures["kl_coefficient"] == pytest.approx(0.5 * 0.96 * 1.04)

    await client.close_run()
    again = await client.open(config, checkpoint=saved.checkpoint.name, number=40)
    assert list((await client.infer([trajectory], kind=2)).sequences[0].values) == reference
    resumed = await learned(client, config, make_settled, settled_digest, again.version)
    assert resumed.version.digest == straight.version.digest
    assert resumed.figures["kl_coefficient"] == straight.figures["kl_coefficient"]


async def test_another_reference_is_refused_by_name(
    client, make_config, make_settled, settled_digest, tiny_directory, tmp_path
):
    section = ModelSection(path=str(tiny_directory), dtype="float32")
    model = load_model(section)
    save_model(model, load_tokenizer(section), tmp_path / "moved")
    model.get_input_embeddings().weight.data += 0.1
    save_model(model, load_tokenizer(section), tmp_path / "other")
    algorithm = {"options": {"kl_loss_coef": 0.5}}
    config = make_config(algorithm=algorithm)
    restored = await client.open(config)
    reply = await learned(client, config, make_settled, settled_digest, restored.version)
    saved = await client.save(reply.version.number)

    def with_reference(name):
        path = {"path": str(tmp_path / name), "dtype": "float32"}
        return make_config(algorithm=algorithm, trainer={"reference": path})

    await client.close_run()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.open(with_reference("other"), checkpoint=saved.checkpoint.name, number=40)
    assert reason_of(caught.value) == "CHECKPOINT_MISMATCH"
    details = caught.value.details()
    assert "trainer.reference" in details and str(tiny_directory) in details and "other" in details
    await client.close_run()
    # The same weights elsewhere are the same reference.
    await client.open(with_reference("moved"), checkpoint=saved.checkpoint.name, number=50)


async def test_a_group_without_advantages_is_learned_from_where_there_is_a_kl_term(
    client, make_config, make_settled, settled_digest
):
    norms = []
    for options in ({}, {"entropy_coef": 0.1}, {"kl_loss_coef": 1.0}):
        config = make_config(algorithm={"options": options})
        version = await client.reopen_with(config)
        moved = await learned(client, config, make_settled, settled_digest, version)
        equal = await learned(client, config, make_settled, settled_digest, moved.version, [1.0] * 4)
        norms.append(equal.figures["grad_norm"])
    assert norms[0] == 0 < min(norms[1:])


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        ({"trainer": {"reference": {"path": "."}}}, "trainer.reference", "no option of grpo uses it"),
        (
            {"algorithm": {"options": {"kl_loss_coef": 1}}, "trainer": {"reference": {"path": "/no/model"}}},
            "trainer.reference.path",
            "there is no such directory",
        ),
    ],
)
async def test_a_reference_that_does_not_fit_is_refused_as_the_run_opens(
    client, make_config, sections, key, words
):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.open_run(make_config(**sections))
    assert key in caught.value.details() and words in caught.value.details()


async def test_a_run_without_a_reference_infers_none(client, make_settled):
    version = (await client.open()).version
    with pytest.raises(grpc.aio.AioRpcError, match="has no reference model"):
        await client.infer([make_settled(0, version=version).members[0].trajectory], kind=2)


class BackendRounds:
    """A trainer group of one: its rounds go straight to a backend; an optimizer step gives its gradient away."""

    replicas = 1
    shares_prefixes = True
    costs, micro_batch_tokens = Costs(), 512

    def __init__(self, backend):
        self.backend = backend

    def micro(self, work):
        return [self.backend.micro(each[0]) for each in work]

    def infer(self, groups, columns):
        return [self.backend.infer([group], columns) for group in groups]

    def apply(self, denominator, rate, critic_rate):
        self.gradient = self.backend.reduced_gradient(denominator)
        return CommitReport(True, 1.0)


def test_a_streamed_step_equals_a_batched_one(make_moved, make_group, relative_l2):
    """With KL and entropy terms, a group without advantages, and groups that come one by one in any order."""
    backend, _ = make_moved({**KL, "kl_target": 0.1})
    state = steps.restored(steps.StepState(), steps.Version(5, 1, 1), {1: 0})
    state = steps.begin(state, steps.Begin(1, 1, 5, 6))[0]
    groups = [make_group(0, version=5), make_group(1, version=5, rewards=[1.0] * 4), make_group(2, version=5)]
    gradients = []
    for kind, arrivals in ((BatchLearner, [groups]), (Learner, [[group] for group in groups[::-1]])):
        rounds = BackendRounds(backend)
        learner = kind(backend._config, backend._algorithm, rounds)
        after = state
        for arrived in arrivals:
            after = learner.learn(after, arrived)
        assert len(after.accumulated) == 3 and learner.finish(after, 0.0).finite
        gradients.append(rounds.gradient)
    assert relative_l2(*gradients) < 1e-5


async def test_a_teacher_with_another_tokenizer_is_refused_by_the_token_that_differs(
    client, make_config, tiny_directory, tmp_path
):
    section = ModelSection(path=str(tiny_directory), dtype="float32")
    turned = character_tokenizer(CHARACTERS[::-1])
    save_model(load_model(section), turned, tmp_path / "teacher")
    trainer = {"reference": {"path": str(tmp_path / "teacher"), "dtype": "float32"}}
    config = make_config(algorithm={"name": "distill"}, trainer=trainer)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.open_run(config)
    said = caught.value.details()
    assert (
        reason_of(caught.value) == "INVALID"
        and "trainer.reference.path: its tokenizer is another one" in said
    )
    assert f"{CHARACTERS[0]!r} is token 3 of the policy's and {len(CHARACTERS) + 2} of its own" in said
    save_model(load_model(section), character_tokenizer(), tmp_path / "same")
    trainer = {"reference": {"path": str(tmp_path / "same"), "dtype": "float32"}}
    await client.open_run(make_config(algorithm={"name": "distill"}, trainer=trainer))
