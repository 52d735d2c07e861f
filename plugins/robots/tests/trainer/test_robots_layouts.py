"""Large robot policies in the layouts of language models: the step of a policy that each rank has whole (Gloo)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from headrace_robots.policies.directory import policy_config, save_policy
from headrace_schema.openings import TrainerConfig
from headrace_trainer.backends.fsdp.layouts.planned import choose_layout
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import Refusal
from headrace_trainer.memory import Room, Rooms, check_rooms
from headrace_trainer.workloads import run_kind
from rank_processes import RankProcess, end
from safetensors.torch import load_file
from test_robots_bandit import ACT, DIFFUSION, GROOT, OFT, OPENVLA, PI0, PI05, SMOLVLA, UNIT, WALL

RANKS = Path(__file__).parent / "robot_ranks.py"
pytestmark = pytest.mark.timeout(600)
OFT = {**OFT, "head": "l1", "cameras": ["image", "wrist"], "proprio": UNIT}
FLOW = {"flow": {"steps": 3, "noise": "learned", "drawn": "all"}}
POLICIES = {
    "oft": OFT,
    "openvla": {"kind": "openvla", **OPENVLA},
    "pi0": {**PI0, **FLOW},
    "pi05": {**PI05, "flow": {"steps": 3}},
    "smolvla": {**SMOLVLA, **FLOW},
    "groot": {**GROOT, **FLOW},
    "wall": {**WALL, **FLOW},
    "act": {**ACT, "height": 20, "width": 20},
    "diffusion": {**DIFFUSION, "height": 20, "width": 20},
}
LORA = {"lora": {"rank": 4, "alpha": 8}}
SHARDED = {"shard": "weights", "shard_ranks": 2}
AGAIN = {"gradient_checkpointing": True, "backend_options": SHARDED}
CASES = {
    "oft whole": None,
    "oft state": {"backend_options": {"shard": "state"}},
    "oft again": AGAIN,
    "oft copies": {"backend_options": {"shard": "weights", "shard_ranks": 1}},
    "oft away": {**AGAIN, "backend_options": {**SHARDED, "offload": "parameters"}},
    "openvla whole": None,
    "openvla gradients": {"backend_options": {"shard": "gradients"}},
    "pi0 whole": None,
    "pi0 state": {"backend_options": {"shard": "state"}},
    "pi0 again": AGAIN,
    "pi05 whole": None,
    "pi05 again": AGAIN,
    "smolvla whole": None,
    "smolvla again": AGAIN,
    "smolvla frozen": {"freeze": ["vision", "language"], **AGAIN},
    "groot whole": None,
    "groot again": AGAIN,
    "groot frozen": {"freeze": ["vision", "language"], **AGAIN},
    "wall whole": None,
    "wall again": AGAIN,
    "wall frozen": {"freeze": ["vision", "language"], **AGAIN},
    "act whole": None,
    "act again": AGAIN,
    "act frozen": {"freeze": ["vision", "vae"], **AGAIN},
    "diffusion whole": None,
    "diffusion again": AGAIN,
    "diffusion frozen": {"freeze": ["vision"], **AGAIN},
    "oft lora": {**LORA, "backend_options": {"shard": "state"}},
    "oft lora again": {**LORA, **AGAIN},
    "oft frozen": {"freeze": ["vision", "language"], **AGAIN},
    "pi0 frozen": {"freeze": ["vision", "language"], **AGAIN},
}
QUICK = {"oft", "smolvla"}
"""Policies whose cases go through the quick tests: one that answers in tokens, and one that denoises."""
RARE = {
    *("oft copies", "oft away", "smolvla frozen"),
    *(name for name in CASES if name.split()[0] not in QUICK),
}
"""Cases that only the nightly tests go through."""
RESUMES = {"oft lora": LORA, "oft again": {}, "pi0 frozen": {"freeze": ["vision", "language"]}}
"""Of two ranks, and how one goes on."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    for name, fields in POLICIES.items():
        policy = policy_config(fields).build(seed=0)
        for own in policy.parameters():  # values that count, and layers that do not begin at nothing
            own.data.add_(torch.randn_like(own), alpha=0.02)
        save_policy(policy, folder / name)
    return folder


@pytest.fixture(scope="module")
def config(directories):
    def make(name, ranks=1, dtype="float32", **trainer):
        return {
            "model": {"path": str(directories / name.split()[0]), "dtype": dtype},
            "algorithm": {"name": "ppo", "options": {"level": "action"}},
            "optimizer": {"lr": 1e-3, "grad_clip": 0.5},
            "trainer": {"micro_batch_tokens": 30, "ranks": ranks, **trainer},
            "seed": 1,
            "steps": 3,
        }

    return make


@pytest.fixture(scope="module")
def walk(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("robots")

    def run(ranks, cases):
        listed = [
            {"name": name, "config": config(name, ranks, **(trainer or {})), "whole": trainer is None, **more}
            for name, (trainer, more) in cases.items()
        ]
        job = folder / f"{ranks}.job"
        job.write_text(json.dumps({"ranks": ranks, "folder": str(folder), "cases": listed}))
        children = [RankProcess(str(RANKS), str(job), str(rank)) for rank in range(ranks)]
        try:
            assert [child.wait(300) for child in children] == [0] * ranks
        finally:
            end(children)
        return {
            name: SimpleNamespace(
                **json.loads((folder / f"{name}.json").read_text()),
                tensors=load_file(folder / f"{name}.safetensors"),
                file=str(folder / f"{name}.safetensors"),
            )
            for name in cases
        }

    return run


@pytest.fixture(scope="module")
def two(walk):
    return walk(2, {name: (trainer, {}) for name, trainer in CASES.items() if name not in RARE})


@pytest.fixture(scope="module")
def rare(walk):
    return walk(2, {name: (CASES[name], {}) for name in sorted(RARE)})


@pytest.fixture
def of(request):
    """What came of a case."""

    def find(name):
        return request.getfixturevalue("rare" if name in RARE else "two")[name]

    return find


def seldom(names):
    return [pytest.param(each, marks=pytest.mark.nightly) if each in RARE else each for each in names]


def part(found, kind):
    return {name: value for name, value in found.tensors.items() if name.startswith(f"{kind}/")}


@pytest.mark.parametrize(
    "name",
    seldom(name for name, trainer in CASES.items() if trainer and not {"lora", "freeze"} & trainer.keys()),
)
def test_a_divided_policy_makes_the_step_of_a_whole_one(name, of, relative_l2):
    found, whole = of(name), of(f"{name.split()[0]} whole")
    assert found.held and whole.held
    for figure, bound in (("log_probs", 1e-4), ("finals", 1e-4)):
        own, theirs = torch.tensor(getattr(found, figure)), torch.tensor(getattr(whole, figure))
        assert torch.allclose(own, theirs, atol=bound, rtol=bound), figure
    assert found.norms == pytest.approx(whole.norms, rel=1e-4)
    assert found.imitated == pytest.approx(whole.imitated, rel=1e-4)
    gradient, expected = part(found, "gradient"), part(whole, "gradient")
    assert all(not expected[each].any() for each in expected.keys() - gradient.keys()), "what is unused"
    assert relative_l2(gradient, {each: expected[each] for each in gradient}) < 1e-5
    for kind, bound in (("weights", 1e-5), ("third", 1e-5)):
        assert relative_l2(part(found, kind), part(whole, kind)) < bound, kind


def test_adapters_learn_alike_in_every_layout_and_what_is_added_learns_whole(two, relative_l2):
    plain, again = two["oft lora"], two["oft lora again"]
    gradient = part(plain, "gradient")
    names = {name.removeprefix("gradient/").rpartition(".")[2] for name in gradient}
    whole = {name for name in gradient if "lora_" not in name}
    assert {"lora_A", "lora_B"} < names
    assert whole == {"gradient/value_head.weight", "gradient/value_head.bias", "gradient/log_std"}
    assert not any("featurizer.blocks.1." in name for name in gradient), (
        "the last block of an encoder is unused"
    )
    assert relative_l2(part(again, "gradient"), gradient) < 1e-5
    assert relative_l2(part(again, "weights"), part(plain, "weights")) < 1e-5
    assert plain.held and again.held


@pytest.mark.parametrize(
    "name",
    seldom(
        [
            "oft frozen",
            "pi0 frozen",
            "smolvla frozen",
            "groot frozen",
            "wall frozen",
            "act frozen",
            "diffusion frozen",
        ]
    ),
)
def test_a_frozen_part_stays_and_the_rest_learns_as_ever(name, of, relative_l2):
    found, whole = of(name), of(f"{name.split()[0]} whole")
    policy = policy_config(POLICIES[name.split()[0]]).build(0)
    frozen = tuple(f"gradient/{each}" for part in CASES[name]["freeze"] for each in policy.shape.parts[part])
    gradient, expected = part(found, "gradient"), part(whole, "gradient")
    assert gradient and not any(each.startswith(frozen) for each in gradient)
    assert any(each.startswith(frozen) for each in expected)
    assert relative_l2(gradient, {each: expected[each] for each in gradient}) < 1e-5


@pytest.mark.parametrize("name", seldom(RESUMES))
def test_one_rank_goes_on_where_two_have_saved(name, of, walk, relative_l2):
    one = walk(1, {f"{name} on one": (RESUMES[name], {"resumes": of(name).file})})[f"{name} on one"]
    assert one.resumed == [], "of what was saved, all is there to the last bit"
    assert relative_l2(part(one, "third"), part(of(name), "third")) < 1e-5


def opened(config, **trainer):
    parsed = TrainerConfig.model_validate(config("oft", **trainer))
    return run_kind(parsed).check()


@pytest.mark.parametrize(
    ("trainer", "problem"),
    [
        ({"freeze": ["visoin"]}, r"trainer\.freeze: openvla_oft has no part 'visoin'.*did you mean vision"),
        ({"lora": {"targets": ["q_porj"]}}, r"trainer\.lora\.targets: .*q_porj.*did you mean q_proj"),
        (
            {"lora": {"targets": ["qkv"]}, "freeze": ["vision"]},
            r"trainer\.lora\.targets: no linear layer of the model is called 'qkv'",
        ),
        ({"backend_options": {"shard_ranks": 3}}, r"shard_ranks: 3 does not divide 1 ranks"),
    ],
)
def test_what_a_policy_cannot_have_is_refused_by_its_key(trainer, problem, config):
    with pytest.raises(Refusal, match=problem):
        opened(config, **trainer)


def test_a_small_policy_has_no_layouts(robot_config):
    for key, value in {"lora": {}, "freeze": ["vision"], "gradient_checkpointing": True}.items():
        parsed = TrainerConfig.model_validate(robot_config(trainer={key: value}))
        with pytest.raises(Refusal, match=rf"trainer\.{key}: is for large models"):
            run_kind(parsed).check()


def test_a_policy_that_fits_on_more_ranks_is_told_how_many(config):
    parsed = TrainerConfig.model_validate(config("oft", dtype="bfloat16"))
    kind, options = run_kind(parsed), FsdpOptions(shard="weights", offload="none")
    algorithm = kind.check()
    host = Room("host memory", 2**50, 2**50)

    def planned(room, ranks=1):
        rooms = Rooms(host, Room("GPU memory", room, room))
        return rooms, choose_layout(parsed, algorithm, options, ranks, 8, rooms, kind.sizes)[1]

    four = sum(planned(2**50, ranks=4)[1].device.values())
    rooms, plan = planned(int(1.11 * four))
    with pytest.raises(Refusal, match=r"trainer\.ranks: (2|4) fits, with shard: weights"):
        check_rooms(plan, Rooms(host, Room("GPU memory", 1, 1)))
    rooms, plan = planned(1)
    with pytest.raises(Refusal, match="more ranks alone do not help"):
        check_rooms(plan, rooms)
