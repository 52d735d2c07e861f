"""A backend that trains adapters: their gradient, what is published, the base as reference, memory."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from headrace_modelkit.loading import save_model
from headrace_modelkit.lora import is_adapter
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.weights import load_weights, state_tensors
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import OLD_LOG_PROBS, REFERENCE_LOG_PROBS
from headrace_trainer.backends.fsdp.layouts.planned import choose_layout
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.memory import Room, Rooms
from merged_models import base_model, merged
from torch.func import functional_call

LORA = {"rank": 4, "alpha": 8}
KL = {"kl_loss_coef": 0.3}
ROOMY = Rooms(Room("host memory", 2**50, 2**50), None)


@pytest.fixture
def make_moved(make_backend, accumulate, sequences):
    """A backend with adapters that have left 0 by a step."""

    def make(lora=None, trainer=(), **sections):
        trainer = {"lora": lora or LORA, **dict(trainer)}
        backend = make_backend(trainer=trainer, **sections)
        if sections.get("deterministic"):  # a step would compare log-probs with an engine's to the bit
            for name, shard in backend._sharded.parameters.items():
                shard.data.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
            return backend
        accumulate(backend, [sequences(1)], 512)
        assert backend.commit(7.0, 3e-2).finite
        return backend

    return make


@pytest.mark.parametrize(
    ("lora", "trainer"),
    [
        (LORA, {}),
        ({**LORA, "targets": ["q_proj", "down_proj"]}, {}),
        (LORA, {"gradient_checkpointing": True}),
        (LORA, {"backend_options": {"shard": "weights"}}),
    ],
    ids=["all linear", "two kinds", "recomputed", "resharded"],
)
@pytest.mark.parametrize(("budget", "shared"), [(512, True), (24, True), (48, False)])
def test_the_gradient_is_autograds_through_a_plain_merged_model(
    make_moved, accumulate, sequences, relative_l2, lora, trainer, budget, shared
):
    backend = make_moved(lora, trainer)
    adapters = {name: tensor.clone().requires_grad_() for name, tensor in backend._sharded.adapters()}
    assert all(tensor.any() for tensor in adapters.values())
    weights, model = merged(backend, adapters), base_model(backend)
    groups = [sequences(2), sequences(3)]
    total = 0.0
    for sequence in itertools.chain(*groups):
        logits = functional_call(model, weights, (torch.tensor([sequence.tokens]),)).logits[0]
        rows = torch.tensor(sequence.trained) - 1
        ids = torch.tensor([sequence.tokens[position] for position in sequence.trained])
        gained_K = torch.tensor(sequence.advantages) * logits.log_softmax(-1)[rows, ids]
        total = total - sequence.weight * gained_K.sum()
    total.backward()
    accumulate(backend, groups, budget, shared=shared)
    found = backend.reduced_gradient(7.0)
    assert found.keys() == adapters.keys()
    assert relative_l2(found, {name: tensor.grad / 7.0 for name, tensor in adapters.items()}) <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_is_what_the_forward_computes_with(
    make_moved, make_backend, sequences, tmp_path, dtype
):
    """To the last bit in a deterministic run: a backend that loads the published weights gives the same log-probs."""
    backend = make_moved(model={"dtype": dtype}, deterministic=True)
    published = dict(backend.weights())
    model = base_model(backend)
    assert {str(tensor.dtype) for tensor in published.values()} == {f"torch.{dtype}"}
    assert [name for name, _, _ in backend.weight_layout()] == [name for name, _ in state_tensors(model)]
    load_weights(model, published)
    save_model(model, load_tokenizer(backend._config.model), tmp_path / "merged")
    plain = make_backend(model={"path": str(tmp_path / "merged"), "dtype": dtype}, deterministic=True)
    for group in (sequences(2), sequences(3)):
        assert backend.infer([group], [OLD_LOG_PROBS]) == plain.infer([group], [OLD_LOG_PROBS])


def test_the_merge_is_the_sum_in_fp32(make_moved):
    backend = make_moved()
    adapters = dict(backend._sharded.adapters())
    for name, expected in merged(backend, adapters).items():
        torch.testing.assert_close(dict(backend.weights())[name], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_leaves_the_base_as_it_was(make_moved, dtype):
    backend = make_moved(model={"dtype": dtype})
    learned = set(backend._sharded.learned)
    assert learned == {name for name, _ in backend._sharded.adapters()}
    assert {shard.dtype for shard in backend._sharded.shards().values()} == {torch.float32}
    assert set(backend._sharded.parameters) == learned, (
        "one rank computes with the frozen weights, not with a copy"
    )
    own = {name: value for name, value in state_tensors(backend._sharded.model) if not is_adapter(name)}
    for name, tensor in state_tensors(base_model(backend)):
        assert own[name].dtype == tensor.dtype and own[name].equal(tensor), name
        assert own[name].grad is None and not own[name].requires_grad
    moved = {name for name, tensor in backend.weights() if not tensor.equal(own[name])}
    assert moved == {f"{name.rpartition('.')[0]}.weight" for name in learned}, "and every adapter has learned"
    kinds = {part.name.partition("/")[0] for part in backend.moment_parts()}
    assert kinds == {"exp_avg", "exp_avg_sq", "adapter"}
    assert {part.name.partition("/")[2] for part in backend.moment_parts()} == learned | {"alpha"}


def with_columns(backend, group):
    found = backend.infer([group], [REFERENCE_LOG_PROBS])
    return [msgspec.structs.replace(s, columns=own) for s, own in zip(group, found, strict=True)]


WARMUP = {
    "trainer": {"lora": LORA, "warmup": {"steps": 3, "lr": 1e-2, "batch": 6}},
    "warmup_examples": [{"text": f"copy {n}: ", "answer": str(n)} for n in range(10, 20)],
}


@pytest.mark.parametrize("warmed", [False, True])
def test_the_reference_is_the_policy_without_what_it_learned(
    make_backend, accumulate, sequences, tiny_directory, warmed, tmp_path
):
    """Without `trainer.reference`: no second model, and the log-probs of one that is."""
    options = {"algorithm": {"options": KL}}
    sections = (WARMUP if warmed else {"trainer": {"lora": LORA}}) | options
    own = make_backend(**sections)
    if warmed:
        own.warm_up()
    path = str(tmp_path / "initial")
    start = base_model(own)
    load_weights(start, dict(own.weights()))
    save_model(start, load_tokenizer(own._config.model), path)
    own.load_reference()
    beside = make_backend(**options, trainer={"lora": LORA, "reference": {"path": path, "dtype": "float32"}})
    beside.load_reference()
    adapters = sum(tensor.nbytes for _, tensor in own._sharded.adapters())
    assert own.reference_bytes == (adapters if warmed else 0) < beside.reference_bytes
    first = own.infer([sequences(2)], [OLD_LOG_PROBS, REFERENCE_LOG_PROBS])
    assert all(row[OLD_LOG_PROBS] == row[REFERENCE_LOG_PROBS] for row in first), "the run begins at it"
    accumulate(own, [with_columns(own, sequences(1))], 512)
    own.commit(7.0, 3e-2)
    columns = [backend.infer([sequences(3)], [REFERENCE_LOG_PROBS]) for backend in (own, beside)]
    for one, other in zip(*columns, strict=True):  # one computes beside its weights, the other with their sum
        assert one[REFERENCE_LOG_PROBS] == pytest.approx(other[REFERENCE_LOG_PROBS], abs=1e-5)
    after = own.infer([sequences(3)], [OLD_LOG_PROBS, REFERENCE_LOG_PROBS])
    assert all(row[OLD_LOG_PROBS] != row[REFERENCE_LOG_PROBS] for row in after)
    assert own.reference is not None and own.base_model is not None
    assert (own.reference.digest != own.base_model.digest) is warmed


def test_a_value_head_learns_beside_the_adapters(make_backend, make_settled):
    ppo = {"name": "ppo", "options": {"critic": "head"}}
    backend = make_backend(trainer={"lora": LORA}, algorithm=ppo)
    learned = set(backend._sharded.learned)
    assert {"critic.head.weight", "critic.head.bias"} == {name for name in learned if not is_adapter(name)}


def test_several_passes_can_be_undone(make_moved, accumulate, sequences):
    backend = make_moved()
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    backend.hold()
    accumulate(backend, [sequences(2)], 512)
    backend.commit(7.0, 3e-2)
    assert not all(tensor.equal(before[name]) for name, tensor in backend.weights())
    backend.end_hold(back=True)
    assert all(tensor.equal(before[name]) for name, tensor in backend.weights())
    assert set(backend._sharded.learned) < set(before) | set(backend._sharded.learned)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_plan_is_what_the_backend_has(make_backend, accumulate, sequences, dtype):
    passes = {"epochs": 2, "minibatches": 2, **KL}
    backend = make_backend(trainer={"lora": LORA}, algorithm={"options": passes}, model={"dtype": dtype})
    backend.load_reference()
    plan = backend.memory_plan(ROOMY).host
    shards = backend._sharded.shards().values()
    assert plan["masters"] == sum(shard.nbytes for shard in shards)
    frozen = [t for name, t in state_tensors(backend._sharded.model) if not is_adapter(name)]
    assert plan["frozen weights"] == sum(tensor.nbytes for tensor in frozen)
    assert plan["reference"] == backend.reference_bytes == 0
    group = [
        msgspec.structs.replace(
            s, columns={name: [-1.0] * len(s.trained) for name in backend._algorithm.columns}
        )
        for s in sequences(1)
    ]
    accumulate(backend, [group], 512)
    backend.commit(1.0, 1e-3)
    backend.hold()
    weights, state = backend._held
    moments = [kinds[kind] for kinds in state.tensors.values() for kind in ("exp_avg", "exp_avg_sq")]
    assert plan["moments"] == sum(moment.nbytes for moment in moments)
    assert plan["hold"] == sum(tensor.nbytes for tensor in (*weights.values(), *moments))
    gathered = [layer.lora_A for layer in backend._sharded.model.modules() if hasattr(layer, "lora_A")]
    assert gathered and plan["gathered weights"] == plan["masters"]


def test_ranks_share_the_frozen_weights_and_a_warm_up_keeps_its_adapters(make_config):
    def planned(ranks=1, **sections):
        config = TrainerConfig.model_validate(make_config(**sections, algorithm={"options": KL}))
        algorithm = build_algorithm(config.algorithm)
        found = choose_layout(config, algorithm, FsdpOptions(), ranks, ranks, ROOMY)[1].host
        return {
            part: size
            for part, size in found.items()
            if part not in ("activations", "head", "published versions")
        }

    sections = {"trainer": {"lora": LORA}}
    one, two, whole = planned(**sections), planned(2, **sections), planned()
    assert two["frozen weights"] == one["frozen weights"] / 2
    assert two["gathered weights"] == one["gathered weights"] + one["frozen weights"]
    assert planned(**WARMUP)["reference"] == one["masters"] and one["reference"] == 0
    assert 3 * one["moments"] < whole["moments"] and sum(one.values()) < sum(whole.values()) / 2
