"""The critic in the backend: values and gradients against transformers alone, packing, its own rate, its checkpoint."""

from __future__ import annotations

import msgspec
import pytest
import torch
from algorithm_losses import value_loss
from headrace_modelkit.critic import ValueHead, check_critic
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import load_model, save_model
from headrace_modelkit.presets.tiny import CHARACTERS, character_tokenizer, tiny_model, write_tiny
from headrace_modelkit.weights import load_weights
from headrace_schema.sections.generating import ModelSection
from headrace_trainer.algorithms._base import OLD_LOG_PROBS, VALUES
from headrace_trainer.backends.shared.fit import CRITIC
from headrace_trainer.learning.planning import context

PASSES = {"epochs": 2, "minibatches": 2}
KINDS = ("head", "model")
HEAD = {"weight": f"{CRITIC}head.weight", "bias": f"{CRITIC}head.bias"}


def ppo(**options):
    return {"name": "ppo", "options": {**PASSES, **options}}


def with_columns(sequences, seed=0):
    """The sequences as a learner hands them over, with old log-probs, old values and returns."""
    generator = torch.Generator().manual_seed(seed)

    def column(sequence, scale):
        return (scale * torch.randn(len(sequence.trained), generator=generator)).tolist()

    return [
        msgspec.structs.replace(
            s,
            columns={
                "old_log_probs": [-3.4 + x for x in column(s, 0.1)],
                "values": column(s, 0.5),
                "returns": column(s, 1.0),
            },
        )
        for s in sequences
    ]


def shake_head(backend, seed=5):
    """A head that is not 0, so that gradients reach the body."""
    generator = torch.Generator().manual_seed(seed)
    shards = backend._sharded.shards()
    for name in HEAD.values():
        shards[name].copy_(0.1 * torch.randn(shards[name].shape, generator=generator))
    backend.release()


def copied(tensors):
    """What a backend yields, as it is now."""
    return {name: tensor.clone() for name, tensor in tensors}


def critic_weights(backend):
    """Every parameter and buffer of the critic, whole."""
    return {name: backend._sharded.gather(name) for name in backend._sharded.critic_names}


class Plain:
    """Policy and critic of a backend, as plain modules without sharding or packing."""

    def __init__(self, backend, directory, kind):
        section = ModelSection(path=str(directory), dtype="float32")
        whole = critic_weights(backend)
        self.policy = load_model(section)
        load_weights(self.policy, dict(backend.weights()))
        self.body = self.policy.base_model
        if kind == "model":
            self.body = load_model(section).base_model
            own = {n.removeprefix(f"{CRITIC}body."): v for n, v in whole.items() if ".body." in n}
            load_weights(self.body, own)
        self.head = ValueHead(64)
        self.head.load_state_dict({name: whole[full] for name, full in HEAD.items()})
        self.own_body = kind == "model"

    def values(self, sequence):
        hidden_LD = self.body(torch.tensor([sequence.tokens])).last_hidden_state[0]
        return self.head(hidden_LD[[position - 1 for position in sequence.trained]])

    def log_probs(self, sequence):
        log_probs_LV = self.policy(torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
        return torch.stack([log_probs_LV[p - 1, sequence.tokens[p]] for p in sequence.trained])

    def gradients(self):
        found = {name: p.grad for name, p in self.policy.named_parameters()}
        if self.own_body:
            found |= {f"{CRITIC}body.{name}": p.grad for name, p in self.body.named_parameters()}
        return found | {full: self.head.get_parameter(name).grad for name, full in HEAD.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_head_s_of_what_was_read_before_each_token(
    make_backend, sequences, tiny_directory, kind
):
    backend = make_backend(algorithm=ppo(critic=kind))
    group = sequences(1)
    first = backend.infer([group], [VALUES])
    assert all(set(own[VALUES]) == {0.0} for own in first), "a critic begins without an opinion"
    shake_head(backend)
    plain = Plain(backend, tiny_directory, kind)
    found = backend.infer([group], [OLD_LOG_PROBS, VALUES])
    assert backend.shares_prefixes
    for sequence, own in zip(group, found, strict=True):
        torch.testing.assert_close(torch.tensor(own[VALUES]), plain.values(sequence).detach())
        torch.testing.assert_close(torch.tensor(own[OLD_LOG_PROBS]), plain.log_probs(sequence).detach())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_plain_ppo(
    make_backend, sequences, accumulate, relative_l2, tiny_directory, kind
):
    """The whole of policy and value loss against transformers and the function, without packing."""
    options = {"critic": kind, "value_coefficient": 0.7, "value_clip": 0.3, "clip_high": 0.1}
    backend = make_backend(algorithm=ppo(**options))
    shake_head(backend)
    groups = [with_columns(sequences(seed), seed) for seed in (1, 2)]
    accumulate(backend, groups, 64)
    found = backend.reduced_gradient(1.0)

    plain = Plain(backend, tiny_directory, kind)
    total = torch.zeros(())
    for sequence in (s for group in groups for s in group):
        columns = {name: torch.tensor(values) for name, values in sequence.columns.items()}
        ratio_T = (plain.log_probs(sequence) - columns["old_log_probs"]).exp()
        advantages_T = torch.tensor(sequence.advantages)
        policy_T = torch.maximum(-advantages_T * ratio_T, -advantages_T * ratio_T.clamp(0.8, 1.1))
        values = value_loss(
            plain.values(sequence)[None], columns["values"][None], columns["returns"][None], clip=0.3, total=1
        )
        total = total + policy_T.sum() + 0.7 * values.loss
    total.backward()
    expected = plain.gradients()
    assert found.keys() == expected.keys()
    assert relative_l2(found, expected) < 1e-4
    assert relative_l2({n: found[n] for n in HEAD.values()}, {n: expected[n] for n in HEAD.values()}) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_split_into_micro_batches_and_rows_does_not_matter(
    make_backend, sequences, accumulate, relative_l2, kind
):
    backend = make_backend(algorithm=ppo(critic=kind))
    shake_head(backend)
    groups = [with_columns(sequences(seed, count=5), seed) for seed in range(3)]
    accumulate(backend, groups, 10_000)
    whole = backend.reduced_gradient(7.0)
    for budget, order, shared in ((24, 1, True), (60, -1, True), (24, -1, False)):
        accumulate(backend, groups[::order], budget, shared=shared)
        assert relative_l2(backend.reduced_gradient(7.0), whole) < 1e-4, (budget, shared)


def test_padding_changes_no_value(make_backend, sequences):
    backend = make_backend(algorithm=ppo())
    shake_head(backend)
    short, long = sequences(1)[0], sequences(2, prompt=40)[1]
    assert len(context(long)) > 2 * len(context(short))
    alone, beside = (backend.infer(rows, [VALUES])[0][VALUES] for rows in ([[short]], [[short], [long]]))
    torch.testing.assert_close(torch.tensor(alone), torch.tensor(beside))


def test_masked_tokens_between_turns_have_no_value_and_no_gradient(make_backend, sequences, relative_l2):
    """The second turn's values read the tool's tokens; a tool's token is never trained."""
    backend = make_backend(algorithm=ppo(critic="model"))
    shake_head(backend)
    [turns] = with_columns(
        [msgspec.structs.replace(sequences(1)[1], tokens=list(range(3, 23)), trained=[5, 6, 12, 13])]
    )
    turns = msgspec.structs.replace(
        turns,
        engine_log_probs=[-1.0] * 4,
        advantages=[1.0] * 4,
        columns={name: [0.1] * 4 for name in turns.columns},
    )
    [before] = backend.infer([[turns]], [VALUES])
    assert len(before[VALUES]) == 4
    other = [*turns.tokens[:8], 30, *turns.tokens[9:]]
    [after] = backend.infer([[msgspec.structs.replace(turns, tokens=other)]], [VALUES])
    assert after[VALUES][:2] == before[VALUES][:2] and after[VALUES][2:] != before[VALUES][2:]
    backend.micro([[turns]])
    gradient = backend.reduced_gradient(1.0)[f"{CRITIC}body.embed_tokens.weight"]
    read = set(turns.tokens[:13])
    assert {row for row in range(32) if gradient[row].any()} <= read


@pytest.mark.parametrize("kind", KINDS)
def test_the_critic_learns_at_its_own_rate_and_is_never_published(make_backend, sequences, accumulate, kind):
    backend = make_backend(algorithm=ppo(critic=kind, value_coefficient=1.0))
    plain = make_backend()
    assert backend.weight_layout() == plain.weight_layout()
    weights, critic = copied(backend.weights()), copied(critic_weights(backend).items())
    assert weights.keys() == dict(plain.weights()).keys()
    group = with_columns(sequences(1))
    accumulate(backend, [group], 512)
    report = backend.commit(10.0, 0.0, critic_rate=1e-2)
    assert report.finite and report.critic_grad_norm > 0 and report.grad_norm > 0
    assert all(torch.equal(weights[name], value) for name, value in backend.weights())
    moved = {name for name, value in critic_weights(backend).items() if not torch.equal(critic[name], value)}
    assert set(HEAD.values()) <= moved
    sums = report.token_sums
    assert sums["own.value_loss"] > 0 and sums["own.value_error_square"] > 0
    # The value head learns what it is shown.
    losses = [sums["own.value_loss"]]
    for _ in range(30):
        accumulate(backend, [group], 512)
        losses.append(backend.commit(10.0, 0.0, critic_rate=1e-2).token_sums["own.value_loss"])
    assert losses[-1] < losses[0]
    assert all(torch.equal(weights[name], value) for name, value in backend.weights())


def test_a_bad_critic_does_not_shrink_the_policy_s_step(make_backend, sequences, accumulate):
    """Each is clipped by its own norm."""
    group = with_columns(sequences(1))
    far = [
        msgspec.structs.replace(s, columns={**s.columns, "returns": [1e6] * len(s.trained)}) for s in group
    ]
    norms, weights = [], []
    for each in (group, far):
        backend = make_backend(algorithm=ppo(critic="model"))
        accumulate(backend, [each], 512)
        report = backend.commit(10.0, 1e-3, critic_rate=1e-3)
        norms.append((report.grad_norm, report.critic_grad_norm))
        weights.append(copied(backend.weights()))
    assert norms[1][0] == pytest.approx(norms[0][0]) and norms[1][1] > 1e3 * norms[0][1]
    assert all(torch.allclose(weights[0][name], value) for name, value in weights[1].items())


def test_warm_up_leaves_a_critic_that_begins_as_the_policy(make_backend):
    examples = [{"text": f"copy {n}: ", "answer": str(n)} for n in range(10, 20)]
    warmup = {"steps": 2, "lr": 1e-3, "batch": 5}
    backend = make_backend(
        algorithm=ppo(critic="model"), trainer={"warmup": warmup}, warmup_examples=examples
    )
    before = copied(backend.weights())
    assert backend.warm_up().steps == 2
    weights, critic = copied(backend.weights()), copied(critic_weights(backend).items())
    assert not torch.equal(weights["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    body = {n.removeprefix(f"{CRITIC}body."): v for n, v in critic.items() if ".body." in n}
    assert len(body) > 10 and all(torch.equal(weights[f"model.{name}"], v) for name, v in body.items())
    assert not critic[HEAD["weight"]].any()


def test_a_critic_that_cannot_read_the_policy_s_tokens_is_refused(tmp_path, tiny_directory):
    policy = ModelSection(path=str(tiny_directory), dtype="float32")
    check_critic(policy, policy, "critic_path")
    save_model(
        tiny_model(vocab_size=len(CHARACTERS) + 4), character_tokenizer(CHARACTERS + "z"), tmp_path / "other"
    )
    save_model(tiny_model(max_position_embeddings=64), character_tokenizer(), tmp_path / "short")
    write_tiny(tmp_path / "same", seed=3)
    check_critic(policy, ModelSection(path=str(tmp_path / "same"), dtype="float32"), "critic_path")
    for name, problem in (
        ("other", "another vocabulary"),
        ("short", "reads 64 tokens"),
        ("none", "no such directory"),
    ):
        with pytest.raises(ModelNotReadable, match=f"^critic_path: .*{problem}"):
            check_critic(policy, ModelSection(path=str(tmp_path / name), dtype="float32"), "critic_path")
