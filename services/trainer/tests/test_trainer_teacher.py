"""A teacher that rollouts hold: its words in the loss, against whole logits, and what is refused of them."""

from __future__ import annotations

from itertools import chain, pairwise

import grpc
import msgspec
import numpy as np
import pytest
import torch
from headrace_modelkit.loading import load_model, save_model
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_servicekit.rpc.errors import reason_of
from headrace_servicekit.rpc.trajectories import pack_top
from headrace_trainer.algorithms.functional import distillation_terms

WORDS = 32
"""All that the tiny model knows."""


@pytest.fixture
def teacher(tiny_directory, tmp_path):
    """A model with other weights than the policy, and its directory."""
    section = ModelSection(path=str(tiny_directory), dtype="float32")
    model = load_model(section)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_model(model, load_tokenizer(section), tmp_path / "teacher")
    return model, tmp_path / "teacher"


def words_of(model, tokens, trained, top):
    with torch.no_grad():
        logits_TV = model(torch.tensor([tokens])).logits[0, torch.tensor(trained) - 1]
    best = logits_TV.log_softmax(-1).topk(top)
    return pack_top(best.indices.numpy(), best.values.numpy())


def distill(path, top=WORDS, **options):
    reference = {"path": str(path), "dtype": "float32"}
    algorithm = {"name": "distill", "options": {"top_k": top, **options}}
    return {"algorithm": algorithm, "trainer": {"reference": reference}}


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize(("budget", "shared"), [(512, True), (24, False)])
def test_all_words_give_the_loss_and_gradient_of_whole_logits(
    make_backend, accumulate, sequences, relative_l2, teacher, direction, budget, shared
):
    model, path = teacher
    backend = make_backend(**distill(path, direction=direction))
    backend.load_reference()
    assert backend.reference is None, "the trainer holds no teacher"
    groups = [
        [
            msgspec.structs.replace(
                each, teacher=words_of(model, each.tokens, each.trained, WORDS), teacher_top=WORDS, weight=0.5
            )
            for each in sequences(seed)
        ]
        for seed in (2, 3)
    ]
    accumulate(backend, groups, budget, shared=shared)
    figure = backend._figures.sums()["own.teacher_kl"]
    found = backend.reduced_gradient(7.0)

    policy = load_model(ModelSection(path=backend._config.model.path, dtype="float32"))
    divergence = 0.0
    for each in chain(*groups):
        rows = torch.tensor(each.trained) - 1
        student_KV = policy(torch.tensor([each.tokens])).logits[0, rows]
        with torch.no_grad():
            teacher_KV = model(torch.tensor([each.tokens])).logits[0, rows]
        divergence = divergence + distillation_terms(student_KV, teacher_KV, direction=direction).loss.sum()
    (0.5 * divergence).backward()
    expected = {name: value.grad / 7.0 for name, value in policy.named_parameters()}
    assert figure == pytest.approx(float(divergence.detach()), rel=1e-5)
    assert relative_l2(found, {name: expected[name] for name in found}) < 1e-5


async def test_a_step_draws_the_policy_to_its_teacher(
    client, make_config, make_settled, settled_digest, teacher
):
    model, path = teacher
    config = make_config(**distill(path, top=8), optimizer={"lr": 1e-3})
    restored = await client.open(config)
    version, distances = restored.version, []
    texts = make_settled(0, version=version)  # the same ones in each step, whoever sampled them
    for _ in range(5):
        number, group = version.number + 1, make_settled(version.ordinal, version=version)
        for member, first in zip(group.members, texts.members, strict=True):
            for own, other in zip(
                member.trajectory.branches[0].segments, first.trajectory.branches[0].segments, strict=True
            ):
                own.tokens.CopyFrom(other.tokens)
        tell(group, model, 8)
        await client.begin(version.ordinal, 1, version.number, number)
        [response] = await client.learn(version.ordinal, 1, [group])
        assert response.outcomes[0].disposition == 1, response
        reply = await client.commit(version.ordinal, 1, version.number, number, settled_digest([group]))
        await client.record(version.ordinal, 1, number)
        version = reply.version
        distances.append(reply.figures["teacher_kl"])
    assert all(after < before for before, after in pairwise(distances)), distances
    assert distances[-1] < 0.8 * distances[0], distances


def tell(group, model, top):
    """Gives each trajectory of a settled group the teacher's words."""
    for member in group.members:
        branch = member.trajectory.branches[0]
        ids, trained = [], []
        for segment in branch.segments:
            if segment.policy_number:
                trained += range(len(ids), len(ids) + len(segment.tokens.token_ids))
            ids += segment.tokens.token_ids
        branch.teacher_top = words_of(model, ids, trained, top)
        member.trajectory.body_digest = trajectory_digest(member.trajectory)


def flooded(branch):
    branch.teacher_top += b"12345678"


def strange(branch):
    ids = np.frombuffer(branch.teacher_top, "<i4").copy()
    ids[0] = WORDS
    branch.teacher_top = ids.tobytes()


def certain(branch):
    values = np.frombuffer(branch.teacher_top, "<f4").copy()
    values[-1] = 0.5
    branch.teacher_top = values.tobytes()


def nothing(branch):
    branch.teacher_top = b""


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (flooded, "8 words of"),
        (nothing, "teacher_top: it has 0 bytes"),
        (strange, "ids that the model does not know"),
        (certain, "log-probs above 0"),
    ],
)
async def test_words_that_no_teacher_tells_are_refused(
    client, make_config, make_settled, teacher, spoil, said
):
    model, path = teacher
    restored = await client.open(make_config(**distill(path, top=8)))
    group = make_settled(0, version=restored.version)
    tell(group, model, 8)
    trajectory = group.members[0].trajectory
    spoil(trajectory.branches[0])
    trajectory.body_digest = trajectory_digest(trajectory)
    await client.begin(0, 1, restored.version.number, restored.version.number + 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.learn(0, 1, [group])
    assert reason_of(caught.value) == "INVALID" and said in caught.value.details()


async def test_more_words_than_the_model_knows_are_refused(client, make_config, teacher):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.open_run(make_config(**distill(teacher[1], top=WORDS + 1)))
    assert "algorithm.options.top_k" in caught.value.details()
    assert f"the nearest valid value is {WORDS}" in caught.value.details()
