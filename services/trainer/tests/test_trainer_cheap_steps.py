"""Muon and AdamW with moments in a byte each: equal to plain PyTorch, sharded and whole, saved and resumed, planned."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from backend_cases import config, part, walk_cases
from headrace_modelkit.loading import load_model
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import OptimizerSection
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp.checks import check_run
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.backends.shared.blocks import decode, encode
from headrace_trainer.backends.shared.fit import check_state_shapes
from headrace_trainer.backends.shared.muon import hidden_matrices
from headrace_trainer.backends.shared.optimizer import KINDS, MOMENTS, ShardedAdamW
from headrace_trainer.errors import Refusal
from test_trainer_memory import ROOMY

pytestmark = pytest.mark.timeout(300)
SETTINGS = {"lr": 1e-3, "beta2": 0.9, "weight_decay": 0.1, "grad_clip": 1e9}


def test_steps_equal_torch_s_muon_and_adamw_for_what_is_no_hidden_matrix(make_backend, sequences, accumulate):
    backend = make_backend(optimizer={**SETTINGS, "name": "muon", "momentum": 0.9})
    model = load_model(ModelSection.model_validate(backend._config.model.model_dump()))
    own = dict(model.named_parameters())
    hidden = hidden_matrices(model)
    assert {name.split(".")[-2] for name in hidden} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    rest = [parameter for name, parameter in own.items() if name not in hidden]
    optimizers = [
        torch.optim.Muon(
            [own[name] for name in hidden],
            lr=1e-3,
            weight_decay=0.1,
            momentum=0.9,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.dim() > 1]},
                {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=1e-3,
            betas=(0.9, 0.9),
            weight_decay=0.1,
        ),
    ]
    for step in range(3):
        accumulate(backend, [sequences(step)], 64)
        backend._sharded.finish_backward()
        for name, gradient in backend._sharded.gradients().items():
            own[name].grad = gradient.clone() / 16.0  # a power of two: bfloat16 rounds alike
        backend.commit(16.0, 1e-3)
        for each in optimizers:
            each.step()
    for name, value in backend.weights():
        torch.testing.assert_close(value, own[name].detach(), atol=1e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def walk(tiny_directory, tmp_path_factory):
    """Walks through cases by name: (optimizer, checkpoint, options of the backend)."""
    folder = tmp_path_factory.mktemp("cheap")

    def found(ranks, **cases):
        def case(name, saved, options):
            plain = config(tiny_directory, ranks, options, backend="fsdp")
            optimizer = {"lr": 1e-3, "weight_decay": 0.1, "name": name}
            return {"config": plain | {"optimizer": optimizer}, "saved": saved}

        return walk_cases(folder, ranks, {name: case(*given) for name, given in cases.items()})

    return found


def test_muon_over_two_ranks_steps_as_torch_s_own_of_the_whole(walk):
    stepped_alike(walk(2, divided=("muon", "", {"shard": "weights"}))["divided"])


def stepped_alike(found):
    assert found.held and found.refused and found.whole_step < 1e-6
    assert {each.split("/")[1] for each in found.tensors if each.startswith("moments/")} == set(KINDS)


@pytest.mark.nightly
def test_another_number_of_ranks_goes_on_to_the_bit_and_every_layout_steps_alike(walk, relative_l2):
    alone = walk(1, alone=("muon", "", {}))["alone"]
    coded = walk(2, coded=("adamw_8bit", "", {}))["coded"]
    found = walk(
        2,
        state=("muon", alone.file, {}),
        away=("muon", "", {"shard": "weights", "offload": "parameters"}),
        again=("adamw_8bit", coded.file, {}),
    )
    assert found["state"].resumed and found["again"].resumed
    for each in (alone, found["state"], found["away"]):
        stepped_alike(each)
        own, theirs = part(each.tensors, "weights"), part(alone.tensors, "weights")
        assert relative_l2(own, theirs) < 1e-3, (
            "sums over ranks differ in last bits, which bfloat16 rounds apart"
        )


def test_codes_are_stable_and_small_values_of_squares_are_not_lost():
    torch.manual_seed(0)
    values = torch.randn(1000, 7) * torch.rand(1000, 7) ** 8
    for squared, given in ((False, values), (True, values.square())):
        codes, scales = encode(given, squared=squared)
        assert codes.dtype == torch.uint8 and codes.shape == given.shape and len(scales) == -(-7000 // 256)
        found = decode(codes, scales, squared=squared)
        again, same = encode(found, squared=squared)
        assert again.equal(codes) and same.equal(scales)
        assert (found - given).norm() / given.norm() < 0.02
    first = decode(*encode(values, squared=False), squared=False)
    assert (decode(*encode(values.square(), squared=True), squared=True)[first != 0] > 0).all()
    for squared in (False, True):
        assert not decode(*encode(torch.zeros(300), squared=squared), squared=squared).any()


def test_moments_in_a_byte_each_step_much_as_fp32_ones():
    torch.manual_seed(0)
    start, target = torch.randn(64, 64), torch.randn(64, 64)
    found = {}
    for name in ("adamw", "adamw_8bit"):
        weight = start.clone()
        optimizer = ShardedAdamW(OptimizerSection(name=name, lr=0.02), {"a": weight}, decays={"a"})
        for _ in range(150):
            optimizer.step({"a": (weight - target) * torch.rand(64, 64)}, 1.0, 0.02)
        found[name] = weight
    assert (found["adamw_8bit"] - target).norm() < 0.2 * (start - target).norm()
    assert (found["adamw_8bit"] - found["adamw"]).norm() < 0.1 * (start - target).norm()


@pytest.mark.parametrize("name", ["adamw_8bit", "muon"])
def test_the_memory_plan_is_what_the_backend_has(make_backend, name):
    algorithm = {"name": "grpo", "options": {"epochs": 2, "minibatches": 2}}
    backend = make_backend(optimizer={"name": name}, algorithm=algorithm)
    plan = backend.memory_plan(ROOMY).host
    plain = make_backend(algorithm=algorithm).memory_plan(ROOMY).host
    backend._adamw.step(
        {each: torch.ones_like(shard) for each, shard in backend._sharded.shards().items()}, 1.0, 1e-3
    )
    backend.hold()
    weights, state = backend._held
    kept = [value for own in state.tensors.values() for kind, value in own.items() if kind != "step"]
    assert plan["moments"] == sum(tensor.nbytes for tensor in kept) < 0.7 * plain["moments"]
    assert plan["hold"] == sum(tensor.nbytes for tensor in (*weights.values(), *kept))
    saved = [each.value for each in backend.moment_parts()]
    assert plan["checkpoint copy"] == sum(tensor.nbytes for tensor in (*weights.values(), *saved))


def test_a_checkpoint_of_another_optimizer_is_refused_by_its_key(make_backend):
    for saved, name, wanted in (
        (KINDS, "adamw", "set optimizer.name: muon"),
        (MOMENTS, "muon", "set optimizer.name: adamw or adamw_8bit"),
        (("exp_avg",), "muon", "name a checkpoint that muon made"),
    ):
        reader = SimpleNamespace(weight_shapes=dict, moment_kinds=lambda saved=saved: set(saved))
        with pytest.raises(Refusal, match=f"optimizer.name: .*{re.escape(wanted)}"):
            check_state_shapes(reader, {}, "m", optimizer=OptimizerSection(name=name))
    reader = SimpleNamespace(weight_shapes=dict, moment_kinds=lambda: set(MOMENTS))
    check_state_shapes(reader, {}, "m", optimizer=OptimizerSection(name="adamw_8bit"))


def test_muon_is_refused_of_adapters(make_config):
    found = TrainerConfig.model_validate(make_config(trainer={"lora": {}}, optimizer={"name": "muon"}))
    with pytest.raises(Refusal, match=r"optimizer\.name: muon steps whole matrices.*use adamw"):
        check_run(FsdpOptions(), found, build_algorithm(found.algorithm))
