"""Where tokens go in a model with experts: the load-balance loss over a minibatch, and the engine's routes replayed."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from headrace_modelkit.families.mixtures import ExpertShape
from headrace_modelkit.families.routing import OWN
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.families import write_family
from headrace_modelkit.presets.tiny import write_tiny_moe
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import ModelSection
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.packing import Attends, pack
from headrace_trainer.learning.segments import read_routes
from headrace_trainer.workloads import run_kind

LAYERS, EXPERTS, CHOSEN = 2, 8, 2
DENOMINATOR, COEFFICIENT, RATE = 7.0, 0.3, 0.01


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "moe"
    write_tiny_moe(directory, initializer_range=0.2)
    return directory


@pytest.fixture
def moe_backend(make_backend, moe):
    def make(**sections):
        return make_backend(model={"path": str(moe), "dtype": "float32"}, **sections)

    return make


def plain(moe: Path, routes: list[np.ndarray] | None = None):
    """The model as transformers computes it, and a list that gets (probabilities, experts) of each layer."""
    model = load_model(ModelSection(path=str(moe), dtype="float32"))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer, block in enumerate(model.model.layers):
        gate = block.mlp.gate

        def forward(hidden, gate=gate, layer=layer):
            probs = (hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T).softmax(-1)
            index = probs.topk(CHOSEN).indices if routes is None else torch.from_numpy(routes[0][:, layer])
            weights = probs.gather(-1, index)
            seen.append((probs, index))
            return probs, weights / weights.sum(-1, keepdim=True), index

        gate.forward = forward
    return model, seen


def groups_of(sequences) -> list[list]:
    """Two groups, each with what its sequences have in common at their beginning."""
    return [
        [msgspec.structs.replace(s, advantages=[0.0] * len(s.trained)) for s in sequences(seed)]
        for seed in (1, 2)
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_the_gradient_of_the_load_balance_loss_is_of_the_whole_minibatch(
    moe_backend, moe, sequences, relative_l2, shared
):
    """Against autograd through the loss as it is written down, over all sequences one by one."""
    groups = groups_of(sequences)
    options = {"balance_loss_coef": COEFFICIENT}
    backend = moe_backend(
        algorithm={"options": options, "group_size": 4},
        trainer={"shared_prefix": shared, "micro_batch_tokens": 512},
    )
    works = [[group] for group in groups] if shared else [[[each] for each in group] for group in groups]
    for rows in works:
        backend.count_experts(rows)
    backend.balance_experts(DENOMINATOR)
    for rows in works:
        assert backend.micro(rows)
    found = backend.reduced_gradient(DENOMINATOR)

    model, seen = plain(moe)
    probs = [[] for _ in range(LAYERS)]
    chosen = [[] for _ in range(LAYERS)]
    for sequence in (each for group in groups for each in group):
        model(torch.tensor([sequence.tokens[: sequence.trained[-1]]]))
        for layer, (own, index) in enumerate(seen):
            probs[layer].append(own)
            chosen[layer].append(index)
        seen.clear()
    losses = []
    for layer in range(LAYERS):
        share = torch.nn.functional.one_hot(torch.cat(chosen[layer]), EXPERTS).double().mean((0, 1)) * CHOSEN
        losses.append(EXPERTS * (share / CHOSEN * torch.cat(probs[layer]).mean(0)).sum())
    (COEFFICIENT * sum(losses)).backward()
    # The head and the last layer's experts have no part in it: their gradient is 0 here and none there.
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert "model.layers.1.mlp.gate.weight" in wanted
    assert relative_l2({name: found[name] for name in wanted}, wanted) < 1e-5
    assert all(not value.any() for name, value in found.items() if name not in wanted)
    for rows in works:
        backend.count_experts(rows)
    backend.balance_experts(DENOMINATOR)
    sums = backend.commit(DENOMINATOR, 1e-3).token_sums
    assert sums["balance_loss"] == pytest.approx(float(sum(losses).detach()) / LAYERS, rel=1e-5)
    assert sums["balanced"] == 1.0 and 1.0 < sums["busiest_expert"] <= EXPERTS
    assert backend.micro(works[0])
    assert not any(value.any() for value in backend.reduced_gradient(1.0).values()), (
        "the next step counts anew"
    )


def routes_of(sequence, seed: int) -> np.ndarray:
    """Experts at random for each token but the last, (tokens, layers, chosen)."""
    drawn = np.random.default_rng(seed)
    shape = (len(sequence.tokens) - 1, LAYERS)
    return np.argsort(drawn.random((*shape, EXPERTS)), -1)[..., :CHOSEN]


def test_routes_of_the_engine_are_followed(moe_backend, moe, sequences):
    backend = moe_backend(algorithm={"options": {"routing_replay": True}, "group_size": 4})
    told = []
    for index, sequence in enumerate(sequences(1)):
        routes = routes_of(sequence, 0)  # what sequences share goes to the same experts in all of them
        told.append(msgspec.structs.replace(sequence, routes=routes.astype(np.uint8).tobytes()))
        model, _ = plain(moe, [routes])
        with torch.no_grad():
            log_probs = model(torch.tensor([sequence.tokens[:-1]])).logits[0].log_softmax(-1)
        wanted = [float(log_probs[at - 1, sequence.tokens[at]]) for at in sequence.trained]
        [found] = backend.infer([[told[-1]]], ["old_log_probs"])
        assert found["old_log_probs"] == pytest.approx(wanted, abs=1e-5), index
        [free] = backend.infer([[sequence]], ["old_log_probs"])
        assert found["old_log_probs"] != pytest.approx(free["old_log_probs"], abs=1e-2)
    together = backend.infer([told], ["old_log_probs"])
    alone = [backend.infer([[each]], ["old_log_probs"])[0] for each in told]
    for one, other in zip(together, alone, strict=True):
        assert one["old_log_probs"] == pytest.approx(other["old_log_probs"], abs=1e-5)


def test_a_step_tells_the_mismatch_with_and_without_replay(moe_backend, sequences):
    backend = moe_backend(algorithm={"options": {"routing_replay": True}, "group_size": 4})
    rows = []
    for sequence in sequences(1):
        routes = routes_of(sequence, 0).astype(np.uint8).tobytes()
        told = msgspec.structs.replace(sequence, routes=routes, weight=0.5)
        [found] = backend.infer([[told]], ["old_log_probs"])
        rows.append([msgspec.structs.replace(told, engine_log_probs=found["old_log_probs"])])
    assert backend.micro(rows)
    sums = backend.commit(DENOMINATOR, 1e-3).token_sums
    assert sums["mismatch"] / sums["engine_tokens"] < 1e-5
    assert sums["unforced_mismatch"] / sums["unforced_tokens"] > 1e-2
    tokens = sum(row[0].trained[-1] for row in rows)
    assert sums["routes"] == tokens * LAYERS * CHOSEN
    assert 0.5 < sums["routes_changed"] / sums["routes"] < 1.0, "three of four choices at random are others"


def test_tokens_without_a_route_go_where_the_router_sends_them(moe_backend, sequences):
    backend = moe_backend(algorithm={"options": {"routing_replay": True}, "group_size": 4})
    sequence = sequences(1)[0]
    [free] = backend.infer([[sequence]], ["old_log_probs"])
    one = np.full((1, LAYERS, CHOSEN), 3, dtype=np.uint8)  # the first token's alone
    [found] = backend.infer([[msgspec.structs.replace(sequence, routes=one.tobytes())]], ["old_log_probs"])
    assert all(map(math.isfinite, found["old_log_probs"]))
    assert found["old_log_probs"] != free["old_log_probs"]
    assert OWN > 512, "no model has so many experts"


def test_biases_follow_the_load_of_their_experts_and_go_back_with_the_weights(
    make_backend, sequences, tmp_path
):
    """Up by the rate where an expert got less than an equal share of the minibatch, as DeepSeek V3's are."""
    model = write_family(tmp_path / "model", "deepseek_v3", num_hidden_layers=3)
    section = {"path": str(tmp_path / "model"), "dtype": "float32"}
    algorithm = {"options": {"expert_bias_rate": RATE}, "group_size": 4}
    backend = make_backend(model=section, algorithm=algorithm)
    groups = groups_of(sequences)
    seen: dict[str, torch.Tensor] = {}
    gates = {name: each for name, each in model.named_modules() if name.endswith("mlp.gate")}
    for name, gate in gates.items():
        counts = seen[name] = torch.zeros(4)

        def count(_, __, found, counts=counts):
            counts += found[2].flatten().bincount(minlength=4)

        gate.register_forward_hook(count)
    for sequence in (each for group in groups for each in group):
        model(torch.tensor([sequence.tokens[: sequence.trained[-1]]]))
    backend.hold()
    for end in (True, False):  # what is taken back leaves nothing
        for group in groups:
            backend.count_experts([group])
        backend.balance_experts(DENOMINATOR)
        for group in groups:
            assert backend.micro([group])
        backend.commit(DENOMINATOR, 0.0)
        weights = dict(backend.weights())
        for name, counts in seen.items():
            expected = RATE * (counts.mean() - counts).sign()
            assert expected.any()
            torch.testing.assert_close(weights[f"{name}.e_score_correction_bias"], expected)
        if end:
            backend.end_hold(back=True)
            weights = dict(backend.weights())
            assert not any(weights[f"{name}.e_score_correction_bias"].any() for name in seen)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("family", "trainer", "words"),
    [
        ("qwen3_moe", {}, "in none of its layers"),
        ("qwen3", {}, "which has no experts"),
        ("deepseek_v3", {"lora": {"rank": 4}}, "trainer.lora publishes adapters alone"),
    ],
)
def test_biases_that_cannot_follow_are_refused_by_name(family, trainer, words, make_config, tmp_path):
    write_family(tmp_path / "model", family)
    algorithm = {"options": {"expert_bias_rate": RATE}}
    config = make_config(model={"path": str(tmp_path / "model")}, algorithm=algorithm, trainer=trainer)
    with pytest.raises(Refusal, match=rf"algorithm\.options\.expert_bias_rate: .*{words}"):
        run_kind(TrainerConfig.model_validate(config)).check()


REFUSED = {
    "balance": (
        {"algorithm": {"options": {"balance_loss_coef": 0.1}}},
        "algorithm.options.balance_loss_coef",
    ),
    "replay": ({"algorithm": {"options": {"routing_replay": True}}}, "algorithm.options.routing_replay"),
    "parallel": (
        {"trainer": {"ranks": 2, "backend_options": {"expert_parallel": 2}}},
        "trainer.backend_options.expert_parallel",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dense_model_is_refused_by_name(make_config, name):
    sections, key = REFUSED[name]
    with pytest.raises(Refusal, match=key.replace(".", r"\.")) as refusal:
        run_kind(TrainerConfig.model_validate(make_config(**sections))).check()
    assert "qwen3 model" in str(refusal.value)


def test_experts_that_ranks_do_not_divide_are_refused(make_config, moe):
    trainer = {"ranks": 3, "backend_options": {"expert_parallel": 3}}
    config = make_config(model={"path": str(moe)}, trainer=trainer)
    with pytest.raises(Refusal, match=r"backend_options\.expert_parallel: .* divides them is 2"):
        run_kind(TrainerConfig.model_validate(config)).check()


@pytest.mark.parametrize("attends", list(Attends))
def test_every_layout_of_a_micro_batch_counts_and_routes_the_same_nodes(sequences, attends):
    """Nodes are found again by token and position: a layout puts trees one below the other, or one behind the other."""
    shape = ExpertShape(LAYERS, EXPERTS, CHOSEN)
    rows = [
        [
            msgspec.structs.replace(s, routes=routes_of(s, seed).astype(np.uint8).tobytes())
            for s in sequences(seed)
        ]
        for seed in (1, 2)
    ]
    batch = pack(rows, shared=True, attends=attends, multiple=8, experts=shape)
    visits, routes = batch.nodes.visits_RL.flatten(), batch.nodes.routes_MNK
    told = [sequence for row in rows for sequence in row]
    assert int(visits.sum()) == sum(sequence.trained[-1] for sequence in told)
    tokens, places = batch.tokens_RL.flatten(), batch.positions_RL.flatten()
    for index in range(len(tokens)):
        wanted = [
            read_routes(sequence.routes, shape)[place].tolist()
            for sequence in told
            if (place := int(places[index])) < sequence.trained[-1]
            and sequence.tokens[place] == tokens[index]
        ]
        found = routes[:, index].tolist()
        assert found in wanted if visits[index] else found == [[OWN] * CHOSEN] * LAYERS


def test_adapters_learn_beside_frozen_experts_and_routers(moe_backend, sequences):
    lora = {"rank": 4, "alpha": 8}
    backend = moe_backend(trainer={"lora": lora, "micro_batch_tokens": 512}, algorithm={"group_size": 4})
    before = {name: value.clone() for name, value in backend.weights()}
    rows = [[msgspec.structs.replace(s, weight=1.0)] for s in sequences(1)]
    for _ in range(2):  # B is 0 at first, so that A learns from the second step on
        assert backend.micro(rows)
        backend.commit(DENOMINATOR, 1e-2)
    moved = {name for name, value in backend.weights() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "self_attn" in name and name.endswith("_proj.weight")}


@pytest.mark.parametrize("target", ["gate", "gate_proj"])
def test_adapters_of_what_experts_have_not_are_refused_by_name(make_config, moe, target):
    config = make_config(model={"path": str(moe)}, trainer={"lora": {"targets": [target]}})
    with pytest.raises(Refusal, match=r"trainer\.lora\.targets.*gate and up are one tensor.*gate_up_proj"):
        run_kind(TrainerConfig.model_validate(config)).check()


def test_a_run_publishes_one_tensor_an_expert(make_config, moe, moe_backend):
    kind = run_kind(TrainerConfig.model_validate(make_config(model={"path": str(moe)})))
    published = kind.checkpoint_names().layout(moe_backend().weight_layout())
    shapes = {name: shape for name, _, shape in published}
    assert shapes["model.layers.1.mlp.experts.7.up_proj.weight"] == (48, 64)
    assert shapes["model.layers.1.mlp.experts.7.down_proj.weight"] == (64, 48)
    assert not any(name.endswith("experts.gate_up_proj") for name in shapes)
