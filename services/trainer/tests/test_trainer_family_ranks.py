"""Families of models on two ranks: sharded, recomputed, experts divided and replayed, rows divided, with adapters; each
is the training of one rank, which `test_trainer_families.py` compares with transformers.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from backend_cases import config, part, walk_cases
from headrace_modelkit.families.known import KNOWN
from headrace_modelkit.families.mixtures import expert_shape
from headrace_modelkit.presets.families import FAMILIES, tiny_of, write_family
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp.checks import check_run
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import Refusal
from torch.nn import Linear

pytestmark = pytest.mark.timeout(3000)
QUICK = ("gpt_oss", "nemotron_h")
LOT = 20
CONTEXT = {"context_parallel": 2}
SHAPES = {family: expert_shape(tiny_of(family).config) for family in FAMILIES}
FORMS = ("divided", "context", "lora")
"""Weights sharded and layers recomputed, experts on their own ranks with routes replayed; rows divided; adapters."""


def forms() -> list[object]:
    return [
        pytest.param(
            family,
            form,
            id=f"{family}-{form}",
            marks=() if family in QUICK and form == "divided" else (pytest.mark.nightly,),
        )
        for family in FAMILIES
        for form in FORMS
        if form != "context" or divides_rows(family)
    ]


def divides_rows(family: str) -> bool:
    return KNOWN[family].shares and SHAPES[family] is None


def linears(family: str) -> set[str]:
    """What linear layers of the model are called."""
    return {
        name.rpartition(".")[2] for name, each in tiny_of(family).named_modules() if isinstance(each, Linear)
    }


def keys(family: str, form: str) -> dict[str, object]:
    """What a form adds to a run, however many ranks it has."""
    shape = SHAPES[family]
    if form == "lora":
        if shape is None:
            return {"lora": {"targets": "all-linear"}}
        last = next(each for each in ("o_proj", "o_b_proj", "out_proj") if each in linears(family))
        return {"lora": {"targets": [last, "experts"] if shape.adapts else [last]}}
    return {"routed": True} if form == "divided" and shape is not None and shape.routed else {}


def options(family: str, form: str) -> dict[str, object]:
    if form == "context":
        return CONTEXT
    return {"shard": "weights", **({"expert_parallel": 2} if form == "divided" and SHAPES[family] else {})}


@pytest.fixture(scope="module")
def walked(request, tmp_path_factory) -> tuple[dict[str, SimpleNamespace], dict[str, SimpleNamespace]]:
    """The chosen cases on one rank and on two, each number of ranks in one group of processes."""
    named = [
        item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    chosen = {(own["family"], own["form"]) for item in named if "form" in (own := item.callspec.params)}
    folder: Path = tmp_path_factory.mktemp("families")
    one: dict[str, Any] = {}
    two: dict[str, Any] = {}
    for family, form in sorted(chosen):
        write_family(folder / family, family)
        more, name = keys(family, form), f"{family}-{form}"
        one[name] = {"config": config(folder / family, **more), "saved": ""}
        again = {"gradient_checkpointing": True} if form == "divided" else {}
        own = config(folder / family, 2, options(family, form), backend="fsdp", **more, **again)
        two[f"{name}-two"] = {"config": own, "saved": ""}
    return in_lots(folder, 1, one), in_lots(folder, 2, two)


def in_lots(folder: Path, ranks: int, cases: dict[str, Any]) -> dict[str, SimpleNamespace]:
    """As `walk_cases`, of more cases than its time is for."""
    found: dict[str, SimpleNamespace] = {}
    names = list(cases)
    for first in range(0, len(names), LOT):
        found |= walk_cases(folder, ranks, {name: cases[name] for name in names[first : first + LOT]})
    return found


@pytest.mark.parametrize(("family", "form"), forms())
def test_two_ranks_train_as_one_does(family, form, walked, relative_l2):
    one, two = (found[f"{family}-{form}{end}"] for found, end in zip(walked, ("", "-two"), strict=True))
    gradient, own = part(one.tensors, "gradient"), part(two.tensors, "gradient")
    assert own.keys() == gradient.keys() and any(bool(value.any()) for value in gradient.values())
    assert relative_l2(own, gradient) < 1e-4
    for shares, [whole] in zip(two.log_probs, one.log_probs, strict=False):
        in_order = [None] * len(whole)
        for replica, share in enumerate(shares):
            in_order[replica :: len(shares)] = share
        for found, expected in zip(in_order, whole, strict=True):
            assert found[0] == pytest.approx(expected[0], abs=1e-4)
    assert relative_l2(part(two.tensors, "weights"), part(one.tensors, "weights")) < 1e-4
    assert two.layout == one.layout and two.held and two.refused
    shape = SHAPES[family]
    if form == "divided" and shape is not None and shape.routed:
        assert one.sums[0]["routes_changed"] > 0 and one.sums[0]["balance_loss"] > 0.9


def refused(make_config, tmp_path, family, given) -> str:
    """What a run of two ranks is told as it opens."""
    write_family(tmp_path / family, family)
    section = {"path": str(tmp_path / family), "dtype": "float32"}
    made = TrainerConfig.model_validate(make_config(model=section, trainer={"ranks": 2}))
    with pytest.raises(Refusal) as caught:
        check_run(FsdpOptions(**given), made, build_algorithm(made.algorithm))
    assert caught.value.reason == "INVALID"
    return caught.value.message


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_5_text", "linear_attention layers"),
        ("deepseek_v3", "has experts"),
        ("gpt_oss", "has experts"),
        ("lfm2", "conv layers"),
        ("gemma2", "eager"),
        ("glm_moe_dsa", "has experts"),
    ],
)
def test_rows_that_ranks_cannot_divide_are_refused_by_name(family, reason, make_config, tmp_path):
    assert not divides_rows(family)
    message = refused(make_config, tmp_path, family, CONTEXT)
    assert "context_parallel" in message and reason in message and "leave it out" in message


@pytest.mark.parametrize(
    ("family", "reason"),
    [("llama4_text", "whose experts only its own class can compute"), ("llama", "which has no experts")],
)
def test_experts_that_cannot_be_divided_are_refused_by_name(family, reason, make_config, tmp_path):
    message = refused(make_config, tmp_path, family, {"expert_parallel": 2})
    assert family in message and reason in message
