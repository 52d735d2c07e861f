"""Layers of a checkpoint that predict one token more, as heads that draft: read, learned beside the policy, exported.

What they share with other heads is in `test_trainer_draft.py`.
"""

from __future__ import annotations

import pytest
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.families.draft_files import add_draft, open_draft
from headrace_modelkit.families.drafts import DRAFT
from headrace_modelkit.families.known import KNOWN
from headrace_modelkit.families.mtp_files import MTP_FAMILIES
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.families import write_family, write_predicting
from headrace_modelkit.weights import load_weights
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import DraftSection
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp.layouts.sizes import Sizes
from headrace_trainer.backends.fsdp.policy import DECAY
from headrace_trainer.backends.shared.fit import check_fit
from headrace_trainer.kinds.answers import AnswersRun
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from test_trainer_draft import STEPS, Saved, copied, drafting, overlap, sharpened

LAYER = "model.layers.2."
MTP = DraftSection(form="mtp")
RISEN = 0.2


@pytest.fixture(params=MTP_FAMILIES)
def predicting(request, tmp_path):
    """A tiny model of each family with such a layer, and the layer's tensors."""
    return tmp_path / request.param, write_predicting(tmp_path / request.param, request.param)


@pytest.fixture
def one(tmp_path):
    return tmp_path / "model", write_predicting(tmp_path / "model", "deepseek_v3")


def sections(directory, **draft):
    trainer = drafting(form="mtp", **draft)
    return {"model": {"path": str(directory), "dtype": "float32"}, "trainer": trainer}


def plain_loss(model, sequence):
    """The loss of one sequence: every chain of drafts is computed by the model's own layer over all that it reads."""
    draft, body, ids = model.draft, model.model, torch.tensor(sequence.tokens)
    layer = type(body.layers[-1])(model.config, 1)
    layer.load_state_dict(dict(draft.layer.state_dict()))
    own = dict(layer.named_parameters())
    with torch.no_grad():
        hidden = body(ids[None]).last_hidden_state[0]
        wanted = model(ids[None]).logits[0].softmax(-1)
        embeds = model.get_input_embeddings()(ids)

    def read(embed, state):
        return draft.eh_proj(torch.cat([draft.enorm(embed), draft.hnorm(state)]))

    def last(inputs):
        given = torch.stack(inputs)[None]
        rotary = body.rotary_emb(given, torch.arange(len(inputs))[None])
        found = torch.func.functional_call(
            layer, dict(draft.layer.named_parameters()), (given,), {"position_embeddings": rotary}
        )
        return draft.norm(found[0, -1])

    assert own.keys() == dict(draft.layer.named_parameters()).keys()
    total, trained, inputs = torch.zeros(()), set(sequence.trained), []
    for t in range(len(ids) - 1):
        inputs.append(read(embeds[t + 1], hidden[t]))
        chain = list(inputs)
        for k in range(STEPS):
            if t + 2 + k >= len(ids):
                break
            state = last(chain)
            if t + 2 + k in trained:
                said = (state @ model.lm_head.weight.detach().T).log_softmax(-1)
                total = total - DECAY**k * (wanted[t + 1 + k] * said).sum()
            chain.append(read(embeds[t + 2 + k], state))
    return total


def test_the_gradient_is_that_of_the_layer_over_each_chain(
    predicting, make_backend, sequences, accumulate, relative_l2
):
    directory, _ = predicting
    given = sections(directory)
    backend = make_backend(**given)
    without = make_backend(**{**given, "trainer": {"micro_batch_tokens": 512}})
    groups = [sequences(seed) for seed in (1, 2)]
    again = make_backend(**{**given, "trainer": {**given["trainer"], "gradient_checkpointing": True}})
    for each in (backend, without, again):
        accumulate(each, groups, 256, shared=each.shares_prefixes)
    found = backend.reduced_gradient(1.0)
    assert relative_l2(again.reduced_gradient(1.0), found) < 1e-5, "of layers that are computed again"
    section = ModelSection(path=str(directory), dtype="float32")
    model = load_model(section)
    add_draft(model, MTP, section)
    load_weights(model, dict(backend.weights()))
    sum((plain_loss(model, each) for group in groups for each in group), torch.zeros(())).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if name.startswith(DRAFT)}
    own = {name: found.pop(name) for name in expected}
    assert relative_l2(own, expected) < 1e-4
    alone = without.reduced_gradient(1.0)
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[name], alone[name]) for name in alone), "the policy's gradient is its own"


def test_a_layer_learns_at_its_own_rate_and_leaves_the_policy_alone(one, make_backend, sequences):
    backend = make_backend(**sections(one[0], lr=1e-2))
    sharpened(backend)
    before = copied(backend.weights())
    rises = overlap(backend, [sequences(1), sequences(2)], 40)
    assert rises[-1] > rises[0] + RISEN
    after = copied(backend.weights())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith(DRAFT) for name in changed)


def test_a_layer_and_its_moments_go_on_where_a_checkpoint_ended(one, make_backend, sequences):
    given = sections(one[0])
    whole, first = make_backend(**given), make_backend(**given)
    for step in range(4):
        for backend in (whole, first):
            assert backend.micro([sequences(step)])
            backend.commit(1.0, 1e-3)
        if step == 1:
            saved, first = Saved(first), make_backend(**given)
            check_fit(saved, first._config, None)
            first.load_state(saved)
    expected = copied(whole.weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in first.weights())


def exported(backend, config, directory):
    AnswersRun(config).export(((name, own.clone()) for name, own in backend.weights()), directory)
    return load_file(directory / "model.safetensors")


def test_an_export_has_the_layer_by_the_names_and_with_the_bits_of_the_checkpoint(
    predicting, make_backend, make_config, sequences, tmp_path
):
    directory, layer = predicting
    given = sections(directory)
    config = TrainerConfig.model_validate(make_config(**given))
    backend = make_backend(**given)
    whole = load_file(directory / "model.safetensors")
    found = exported(backend, config, tmp_path / "untrained")
    assert found.keys() == whole.keys() and layer.keys() <= whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert not (tmp_path / "untrained" / "draft").exists()
    assert backend.micro([sequences(1)])
    backend.commit(1.0, 1e-3)
    trained = exported(backend, config, tmp_path / "trained")
    assert trained.keys() == whole.keys()
    ends = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    copies = {f"{LAYER}{end}": name for end, name in ends.items() if f"{LAYER}{end}" in layer}
    assert all(torch.equal(trained[copy], trained[name]) for copy, name in copies.items())
    moved = {name for name in layer if not torch.equal(trained[name], whole[name])}
    fuses = "mtp.fc.weight" if "mtp.fc.weight" in layer else f"{LAYER}eh_proj.weight"
    assert moved > {*copies, fuses}
    again = make_backend(**sections(tmp_path / "trained"))
    expected = copied(backend.weights())
    assert all(torch.equal(own, expected[name]) for name, own in again.weights())


@pytest.mark.parametrize(
    ("family", "names"),
    [("deepseek_v3", None), ("qwen3_next", ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"))],
)
def test_layers_that_nothing_learns_are_exported_as_they_were(
    family, names, make_backend, make_config, sequences, tmp_path
):
    directory = tmp_path / "model"
    if names is None:
        beside = write_predicting(directory, family)
    else:
        write_family(directory, family)
        file = directory / "model.safetensors"
        beside = {name: torch.randn(3, 5).to(torch.bfloat16) for name in names}
        save_file({**load_file(file), **beside}, file, metadata={"format": "pt"})
    given = {"model": {"path": str(directory), "dtype": "float32"}}
    backend = make_backend(**given)
    assert backend.micro([sequences(1)])
    backend.commit(1.0, 1e-3)
    found = exported(backend, TrainerConfig.model_validate(make_config(**given)), tmp_path / "out")
    assert found.keys() == load_file(directory / "model.safetensors").keys()
    assert all(
        torch.equal(found[name], own) and found[name].dtype == own.dtype for name, own in beside.items()
    )


def opened(directory):
    section = ModelSection(path=str(directory), dtype="float32")
    model = load_model(section, weights=False)
    add_draft(model, MTP, section)
    return open_draft(MTP, section, model, 0)


def test_families_whose_layers_are_not_read_are_refused_by_name(tmp_path):
    """The table says of each family why, or that they are read."""
    assert {family for family, known in KNOWN.items() if known.mtp == "read"} == set(MTP_FAMILIES)
    for family in ("ernie4_5_moe", "nemotron_h"):
        assert KNOWN[family].mtp not in ("", "read")
        write_family(tmp_path / family, family)
        with pytest.raises(
            ModelNotReadable, match=rf"^trainer.draft.form: MTP layers of {family} are not read"
        ):
            opened(tmp_path / family)


@pytest.mark.parametrize(("count", "said"), [(0, "names 0 of them"), (2, "names 2 of them")])
def test_another_number_of_layers_is_refused(count, said, tmp_path):
    write_family(tmp_path / "model", "deepseek_v3", num_nextn_predict_layers=count)
    with pytest.raises(ModelNotReadable, match=rf"^trainer.draft.form: config.json .*{said}"):
        opened(tmp_path / "model")


def test_tensors_that_are_missing_or_no_copies_are_named(one):
    directory, _ = one
    file = directory / "model.safetensors"
    whole = load_file(file)
    norm = f"{LAYER}input_layernorm.weight"
    bare = {name: own for name, own in whole.items() if name != norm}
    for changed, sentence in (
        (bare, rf"no {norm}"),
        (
            {**whole, f"{LAYER}shared_head.head.weight": whole["lm_head.weight"] + 1},
            "is no copy of lm_head.weight",
        ),
        ({n: own for n, own in whole.items() if n != f"{LAYER}enorm.weight"}, rf"no {LAYER}enorm.weight"),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(ModelNotReadable, match=sentence):
            opened(directory)


def test_a_path_beside_the_layer_of_the_model_is_refused():
    with pytest.raises(ValidationError, match=r"read from model.path; remove path"):
        DraftSection(form="mtp", path="elsewhere")


def test_the_memory_plan_counts_a_layer(one, make_config):
    def learned(**sections):
        config = TrainerConfig.model_validate(make_config(**sections))
        return Sizes.of(config, build_algorithm(config.algorithm))

    given = sections(one[0])
    found, without = learned(**given), learned(**{**given, "trainer": {"micro_batch_tokens": 512}})
    section = ModelSection(path=str(one[0]), dtype="float32")
    head = add_draft(load_model(section, weights=False), MTP, section)
    assert found.learned - without.learned == sum(own.numel() for own in head.parameters())
    assert len(found.units) == len(without.units) and found.units[-1].kept > without.units[-1].kept
