"""Layouts: the order in which they are tried, and that each of them makes the very step of the plain one (Gloo)."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp.layers import kept_on_host
from headrace_trainer.backends.fsdp.layouts.layout import Layout, candidates, check_run
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import Refusal
from rank_processes import RankProcess, end
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.timeout(600)
PLAIN = Layout("state", 0)
ON_TWO = {
    "plain": PLAIN,
    "gradients": Layout("gradients", 0),
    "weights": Layout("weights", 0),
    "recomputed": Layout("weights", 0, checkpointing=True),
    "moments away": Layout("weights", 0, checkpointing=True, offload="optimizer"),
    "parameters away": Layout("weights", 0, checkpointing=True, offload="parameters"),
    "inputs away": Layout("weights", 0, checkpointing=True, activations_away=True),
    "copies": Layout("weights", 1),
}
ON_FOUR = {
    "plain of four": PLAIN,
    "hybrid gradients": Layout("gradients", 2),
    "hybrid weights": Layout("weights", 2, checkpointing=True),
    "hybrid, moments away": Layout("weights", 2, checkpointing=True, offload="optimizer"),
}
SAME = {
    "recomputed": "weights",
    "moments away": "weights",
    "parameters away": "weights",
    "inputs away": "weights",
}
"""Layouts with the arithmetic of another one, to the last bit."""


def config(model: Path, ranks: int, layout: Layout) -> dict:
    options = {"shard": layout.shard, "shard_ranks": layout.shard_ranks or ranks, "offload": layout.offload}
    options |= {"offload_activations": True} if layout.activations_away else {}
    trainer = {"gradient_checkpointing": layout.checkpointing, "backend_options": options}
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "algorithm": {
            "group_size": 4,
            "prompts_per_step": 4,
            "options": {"kl_loss_coef": 0.3, "entropy_coef": 0.1},
        },
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
        "trainer": {"micro_batch_tokens": 512, "ranks": ranks, **trainer},
        "sampling": {"temperature": 0.7},
        "checkpoint": {"keep": 2},
        "seed": 1,
        "steps": 10,
    }


@pytest.fixture(scope="module")
def walk(tiny_directory, tmp_path_factory):
    """Makes two steps in each layout; what they make, by its name; see `backend_ranks.py`."""
    folder = tmp_path_factory.mktemp("layouts")

    def run(ranks, layouts):
        found = {}
        cases = [
            {"name": name, "config": config(tiny_directory, ranks, layout), "saved": ""}
            for name, layout in layouts.items()
        ]
        job = folder / f"{ranks}.job"
        job.write_text(json.dumps({"ranks": ranks, "folder": str(folder), "cases": cases}))
        children = [RankProcess("backend_ranks.py", str(job), str(rank)) for rank in range(ranks)]
        try:
            assert [child.wait(300) for child in children] == [0] * ranks
        finally:
            end(children)
        for name in layouts:
            facts = json.loads((folder / f"{name}.json").read_text())
            found[name] = SimpleNamespace(**facts, tensors=load_file(folder / f"{name}.safetensors"))
        return found

    return run


@pytest.fixture(scope="module")
def two(walk):
    """Of two ranks."""
    return walk(2, ON_TWO)


@pytest.fixture(scope="module")
def four(walk):
    """Of four ranks."""
    return walk(4, ON_FOUR)


@pytest.mark.parametrize("name", ["gradients", "recomputed", "copies"])
def test_each_layout_makes_the_step_of_the_plain_one(name, two, relative_l2):
    same_step(two[name], two["plain"], relative_l2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in ON_FOUR if name.startswith("hybrid")])
def test_copies_that_several_ranks_hold_make_the_step_of_the_plain_one(name, four, relative_l2):
    same_step(four[name], four["plain of four"], relative_l2)


def same_step(found, plain, relative_l2):
    assert found.held and found.refused, (
        "a hold brings the state back, and a loss that is not finite leaves nothing"
    )
    assert found.norms == pytest.approx(plain.norms, rel=1e-5)
    assert found.tensors.keys() == plain.tensors.keys()
    for kind, bound in (("gradient", 1e-5), ("weights", 1e-6), ("moments", 1e-4)):
        own, theirs = (
            {key: value for key, value in each.tensors.items() if key.startswith(kind)}
            for each in (found, plain)
        )
        assert relative_l2(own, theirs) < bound, kind


@pytest.mark.parametrize(("name", "other"), SAME.items())
def test_what_changes_no_sum_changes_no_bit(name, other, two):
    for key, value in two[other].tensors.items():
        assert torch.equal(two[name].tensors[key], value), key


@pytest.mark.parametrize("away", [False, True])
def test_a_layer_is_computed_again_from_the_copy_of_its_input_on_the_host(away):
    layer, given = torch.nn.Linear(256, 256), torch.randn(64, 256)
    own = given.clone()
    with kept_on_host(torch.device("cpu")) if away else nullcontext():
        loss = checkpoint(layer, own * 1.0, use_reentrant=False).sum()
        kept = own * 1.0
        loss = loss + checkpoint(layer, kept, use_reentrant=False).sum()
    kept.data.zero_()
    loss.backward()
    expected = given.sum(0) * (2 if away else 1)
    torch.testing.assert_close(layer.weight.grad, expected.expand(256, 256))


def tried(options: dict, *, ranks=32, per_host=8, on_gpu=True, **trainer) -> list[str]:
    wanted = TrainerConfig.model_validate(config(Path("none"), ranks, Layout("state", ranks)))
    own = wanted.trainer.model_copy(update={"gradient_checkpointing": None, **trainer})
    wanted = wanted.model_copy(update={"trainer": own})
    return [str(each) for each in candidates(wanted, FsdpOptions(**options), ranks, per_host, on_gpu=on_gpu)]


def test_layouts_are_tried_from_the_cheapest_on():
    recomputed = "gradient_checkpointing: true"
    assert tried({}) == [
        "shard: state, shard_ranks: 32",
        "shard: gradients, shard_ranks: 8",
        "shard: weights, shard_ranks: 8",
        f"shard: weights, shard_ranks: 8, {recomputed}",
        "shard: gradients, shard_ranks: 32",
        "shard: weights, shard_ranks: 32",
        f"shard: weights, shard_ranks: 32, {recomputed}",
        f"shard: weights, shard_ranks: 32, {recomputed}, offload: optimizer",
        f"shard: weights, shard_ranks: 32, {recomputed}, offload: parameters",
    ]
    assert not any("offload" in each for each in tried({}, on_gpu=False))
    assert all("shard_ranks: 8" in each for each in tried({}, ranks=8)), "no copies on one host"
    divided = tried({"expert_parallel": 8})
    assert len(divided) == 6 and all("shard_ranks: 32" in each for each in divided), "experts have one copy"


def test_what_is_fixed_stays_so_in_all_that_is_tried():
    assert tried({"shard": "state", "offload": "none"}, gradient_checkpointing=False) == [
        "shard: state, shard_ranks: 32",
        "shard: state, shard_ranks: 8",
    ]
    assert all("gradient_checkpointing" in each for each in tried({}, gradient_checkpointing=True))
    assert all("offload: optimizer" in each for each in tried({"offload": "optimizer"}))
    assert all("shard_ranks: 4" in each for each in tried({"shard_ranks": 4}))


def test_copies_that_ranks_do_not_divide_into_are_refused():
    wanted = TrainerConfig.model_validate(config(Path("none"), 4, Layout("state", 4)))
    with pytest.raises(Refusal, match=r"backend_options\.shard_ranks: .* give one of 1, 2, 4"):
        check_run(FsdpOptions(shard_ranks=3), wanted, build_algorithm(wanted.algorithm))
