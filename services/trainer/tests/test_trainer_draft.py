"""A head that drafts, learning beside the policy: its loss and gradients by a plain computation, its own rate, its
state, its export.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.families.draft_files import add_draft, open_draft, save_draft
from headrace_modelkit.families.drafts import DRAFT
from headrace_modelkit.loading import load_model
from headrace_modelkit.logprobs import Head
from headrace_modelkit.presets.tiny import write_tiny
from headrace_modelkit.weights import load_weights
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import DraftSection
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp.layouts.sizes import Sizes
from headrace_trainer.backends.fsdp.policy import DECAY
from headrace_trainer.backends.shared.fit import check_fit
from headrace_trainer.errors import Refusal
from safetensors.torch import load_file, save_file

STEPS = 3
BOUND = 0.25
"""What the overlap of a new head has risen by after 40 steps: it rises by 0.43 here."""


def drafting(**options):
    return {"micro_batch_tokens": 512, "draft": {"unrolled": STEPS, "lr": 3e-3, **options}}


def copied(tensors):
    return {name: tensor.clone() for name, tensor in tensors}


def plain_model(backend, directory):
    """The policy and its head as plain modules, with a backend's weights."""
    section = ModelSection(path=str(directory), dtype="float32")
    model = load_model(section)
    add_draft(model, DraftSection(), section)
    load_weights(model, dict(backend.weights()))
    return model


def plain_step(draft, embeds, hidden, seen, at):
    """One token behind position `at` of a chain, read by itself: what the head gives, and what it adds to `seen`."""
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    given = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], -1)
    q, k, v = (
        own(given).view(-1, attention.head_dim)
        for own in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    cos, sin = draft.rotary(hidden[None, None], torch.tensor([[at]]))

    def turned(heads):
        half = heads.shape[-1] // 2
        return heads * cos[0] + torch.cat([-heads[:, half:], heads[:, :half]], -1) * sin[0]

    seen = [*seen, (turned(k), v)]
    groups = len(q) // len(k)
    keys, values = (
        torch.stack([each[side] for each in seen]).repeat_interleave(groups, 1) for side in (0, 1)
    )
    weights = (turned(q)[None] * keys).sum(-1).mul(attention.scaling).softmax(0)
    hidden = hidden + attention.o_proj((weights[..., None] * values).sum(0).flatten())
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden)), seen


def plain_loss(model, sequence):
    """The unrolled head's loss of one sequence, token by token."""
    draft, ids = model.draft, torch.tensor(sequence.tokens)
    with torch.no_grad():
        found = model(ids[None], output_hidden_states=True)
        raw = list(found.hidden_states[:-1])
        # transformers gives the last one normed: made anew from the layer below
        kept = {}
        hook = model.model.layers[-1].register_forward_hook(lambda _, __, out: kept.update(last=out))
        model(ids[None])
        hook.remove()
        states = [*raw, kept["last"]]
        features = torch.cat([states[at][0] for at in draft.layers], -1)
        wanted = found.logits[0].softmax(-1)
        embeds = model.get_input_embeddings()(ids)
    fused = draft.fc(features)
    total, trained = torch.zeros(()), set(sequence.trained)
    seen = []
    for t in range(len(ids) - 1):
        hidden, seen = plain_step(draft, embeds[t + 1], fused[t], seen, t)
        chain = seen
        for k in range(STEPS):
            if t + 2 + k >= len(ids):
                break
            if t + 2 + k in trained:
                own = draft.lm_head(draft.norm(hidden)).log_softmax(-1)
                total = total - DECAY**k * (wanted[t + 1 + k] * own).sum()
            hidden, chain = plain_step(draft, embeds[t + 2 + k], hidden, chain, t + 1 + k)
    return total


def test_the_loss_is_that_of_a_head_that_drafts_token_by_token(
    make_backend, sequences, accumulate, relative_l2, tiny_directory
):
    """Of packed rows that share prefixes, against chains that are followed one token at a time."""
    backend, without = make_backend(trainer=drafting()), make_backend()
    groups = [sequences(seed) for seed in (1, 2)]
    accumulate(backend, groups, 256)
    accumulate(without, groups, 256)
    found = backend.reduced_gradient(1.0)
    model = plain_model(backend, tiny_directory)
    sum((plain_loss(model, each) for group in groups for each in group), torch.zeros(())).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if name.startswith(DRAFT)}
    own = {name: found.pop(name) for name in expected}
    assert relative_l2(own, expected) < 1e-4
    alone = without.reduced_gradient(1.0)
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[name], alone[name]) for name in alone), "the policy's gradient is its own"


def overlap(backend, groups, steps):
    """Learns the same groups so often; what head and policy have in common, by step."""
    found = []
    for _ in range(steps):
        assert backend.micro(groups)
        sums = backend.commit(1.0, 0.0).token_sums
        found.append(sums["draft_overlap"] / sums["draft_tokens"])
    return found


def sharpened(backend, by=30.0):
    """A policy that is sure of its words, as one that has learned is."""
    backend._sharded.shards()["lm_head.weight"].mul_(by)
    backend.release()


def test_a_head_learns_at_its_own_rate_and_leaves_the_policy_alone(make_backend, sequences):
    backend = make_backend(trainer=drafting())
    sharpened(backend)
    before = copied(backend.weights())
    rises = overlap(backend, [sequences(1), sequences(2)], 40)
    assert rises[-1] > rises[0] + BOUND
    after = copied(backend.weights())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith(DRAFT)}


def test_a_head_that_rests_is_the_same_until_its_next_step(make_backend, sequences):
    backend = make_backend(trainer=drafting(every=3))
    changed = []
    for _ in range(5):
        before = copied(backend.weights())
        assert backend.micro([sequences(1)])
        backend.commit(1.0, 1e-3)
        after = copied(backend.weights())
        changed.append(
            {name.startswith(DRAFT) for name in after if not torch.equal(before[name], after[name])}
        )
    assert changed == [{True, False}, {False}, {False}, {True, False}, {False}]


class Saved:
    """What a rank of one saves, as a checkpoint is read."""

    def __init__(self, backend):
        self.weights = {part.name: part.value.clone() for part in backend.weight_parts()}
        self.moments = {part.name: part.value.clone() for part in backend.moment_parts()}
        self.optimizer_steps = backend.optimizer_steps

    def weight(self, name, box=None):
        return _boxed(self.weights[name], box)

    def moment(self, kind, name, box=None):
        return _boxed(self.moments[f"{kind}/{name}"], box)

    def weight_shapes(self):
        return {name: tuple(own.shape) for name, own in self.weights.items()}

    def adapter_shapes(self):
        return {}

    def moment_kinds(self):
        return {name.split("/")[0] for name in self.moments}

    def moment_names(self):
        return {name.split("/", 1)[1] for name in self.moments}


def _boxed(tensor, box):
    return tensor if box is None else tensor[tuple(slice(*each) for each in box)]


@pytest.mark.parametrize("every", [1, 2])
def test_a_head_and_its_moments_go_on_where_a_checkpoint_ended(make_backend, sequences, every):
    trainer = drafting(every=every)
    whole, first = make_backend(trainer=trainer), make_backend(trainer=trainer)
    for step in range(6):
        for backend in (whole, first):
            assert backend.micro([sequences(step)])
            backend.commit(1.0, 1e-3)
        if step == 2:
            saved, first = Saved(first), make_backend(trainer=trainer)
            check_fit(saved, first._config, None)
            first.load_state(saved)
    expected = copied(whole.weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in first.weights())


def test_a_step_that_is_taken_back_leaves_no_trace_in_the_head(make_backend, sequences):
    backend = make_backend(trainer=drafting())
    before = copied(backend.weights())
    backend.hold()
    assert backend.micro([sequences(1)])
    backend.commit(1.0, 1e-3)
    backend.end_hold(back=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())


def test_a_checkpoint_of_another_kind_is_refused_by_its_key(make_backend, make_config):
    with_head, without = make_backend(trainer=drafting()), make_backend()
    for has, wants in ((with_head, without), (without, with_head)):
        with pytest.raises(Refusal, match=r"^trainer.draft: the checkpoint has .*head that drafts"):
            check_fit(Saved(has), wants._config, None)


def head_of(directory, name, **config):
    """A head with weights of chance in files, as its authors leave them."""
    section, target = ModelSection(path=str(directory), dtype="float32"), directory.parent / name
    model = load_model(section)
    head = add_draft(model, DraftSection(), section)
    tensors = {each: own.detach().clone() for each, own in head.state_dict().items()}
    for each in tensors.values():
        each.normal_(generator=torch.Generator().manual_seed(1))
    save_draft(target, DraftSection(), section, tensors)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return target, tensors


def test_a_head_is_read_from_its_files_and_knows_fewer_words(make_backend, tmp_path, sequences):
    directory = tmp_path / "tiny"
    write_tiny(directory)
    target, tensors = head_of(directory, "head", draft_vocab_size=10)
    words = torch.tensor([0, 3, 4, 7, 9, 11, 20, 21, 30, 31])
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:10].clone()
    tensors["d2t"] = words - torch.arange(10)
    renamed = {name.replace("midlayer.", "layers.0."): own for name, own in tensors.items()}
    save_file(renamed, target / "model.safetensors")
    backend = make_backend(
        model={"path": str(directory), "dtype": "float32"}, trainer=drafting(path=str(target))
    )
    found = {name.removeprefix(DRAFT): own for name, own in backend.weights() if name.startswith(DRAFT)}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    sharpened(backend)
    rises = overlap(backend, [sequences(1), sequences(2)], 3)
    assert all(math.isfinite(each) for each in rises) and rises[-1] > rises[0]
    plain = plain_model_of(directory, target)
    logits = plain.draft.logits(torch.ones(1, 64), Head.of(plain))
    assert logits[0].isfinite().nonzero().flatten().tolist() == words.tolist()
    save_draft(tmp_path / "again", DraftSection(path=str(target)), backend._config.model, found)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.pop("t2d").nonzero().flatten().tolist() == words.tolist()
    assert again.keys() == tensors.keys()


def plain_model_of(directory, target):
    section, draft = ModelSection(path=str(directory), dtype="float32"), DraftSection(path=str(target))
    model = load_model(section)
    head = add_draft(model, draft, section)
    source = open_draft(draft, section, model, 0)
    head.load_state_dict({name: source.read(name) for name in source.names()})
    return model


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "names LlamaForCausalLM, and EAGLE-3 heads are"),
        ({"hidden_size": 32}, "hidden_size 32 and the model 64"),
        ({"vocab_size": 31}, "vocab_size 31 and the model 32"),
        ({"num_hidden_layers": 2}, "has 2 layers"),
        ({"fc_norm": True}, "has fc_norm"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, r"reads the layers \[0, 1, 9\]"),
    ],
)
def test_a_head_of_another_form_or_model_is_refused(tmp_path, changes, sentence):
    write_tiny(tmp_path / "tiny")
    target, _ = head_of(tmp_path / "tiny", "head", **changes)
    with pytest.raises(ModelNotReadable, match=rf"^trainer.draft.path: .*{sentence}"):
        plain_model_of(tmp_path / "tiny", target)


def test_a_tensor_that_is_missing_or_too_many_is_named(tmp_path):
    write_tiny(tmp_path / "tiny")
    target, tensors = head_of(tmp_path / "tiny", "head")
    file = target / "model.safetensors"
    save_file({name: own for name, own in tensors.items() if name != "fc.weight"}, file)
    with pytest.raises(ModelNotReadable, match=r"trainer.draft.path: .* fc.weight has the shape none there"):
        plain_model_of(tmp_path / "tiny", target)
    save_file({**tensors, "embed_tokens.weight": torch.zeros(32, 64)}, file)
    with pytest.raises(ModelNotReadable, match="an embedding of its own"):
        plain_model_of(tmp_path / "tiny", target)
    file.unlink()
    with pytest.raises(ModelNotReadable, match=r"^trainer.draft.path: .*model.safetensors"):
        plain_model_of(tmp_path / "tiny", target)


def test_the_memory_plan_counts_a_head_and_what_it_keeps(make_config):
    """Weights with what learning needs of them, and activations that grow with each step that it is unrolled."""

    def sizes(draft):
        trainer = {"micro_batch_tokens": 512, **({"draft": draft} if draft is not None else {})}
        config = TrainerConfig.model_validate(make_config(trainer=trainer))
        return Sizes.of(config, build_algorithm(config.algorithm))

    without, one, three = (sizes(each) for each in (None, {"unrolled": 1}, {"unrolled": 3}))
    with torch.device("meta"):
        config = TrainerConfig.model_validate(make_config())
        head = add_draft(load_model(config.model, weights=False), DraftSection(), config.model)
    assert one.learned - without.learned == sum(own.numel() for own in head.parameters())
    assert without.units[-1].kept < one.units[-1].kept < three.units[-1].kept
