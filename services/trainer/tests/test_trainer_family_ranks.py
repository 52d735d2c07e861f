"""Families of models on two ranks: sharded, recomputed, experts divided and replayed, rows divided, with adapters; each
is the training of one rank, which `test_trainer_families.py` compares with transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from backend_cases import config, part, walk_cases
from headrace_modelkit.families.drafts import DRAFT
from headrace_modelkit.families.known import KNOWN
from headrace_modelkit.families.mixtures import expert_shape
from headrace_modelkit.families.mtp_files import MTP_FAMILIES
from headrace_modelkit.lora import targets_problem
from headrace_modelkit.presets.families import FAMILIES, tiny_config, tiny_of, write_family, write_predicting
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.learning import LoraSection
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp.checks import check_run
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import Refusal
from torch.nn import Linear

pytestmark = pytest.mark.timeout(3000)
QUICK = (("gpt_oss", "divided"), ("nemotron_h", "divided"), ("qwen3_next", "draft"))
LOT = 6
"""Cases of one group of processes: what one of them breaks, the others are not said to have found."""
CONTEXT = {"context_parallel": 2}
SHAPES = {family: expert_shape(tiny_config(family)) for family in FAMILIES}
FORMS = ("divided", "context", "lora", "draft")
"""Weights sharded and layers recomputed, experts on their own ranks with routes replayed; rows divided; adapters; a
layer of the checkpoint that learns to draft.
"""


def forms() -> list[object]:
    return [
        pytest.param(
            family,
            form,
            id=f"{family}-{form}",
            marks=() if (family, form) in QUICK else (pytest.mark.nightly,),
        )
        for family in FAMILIES
        for form in FORMS
        if has_form(family, form)
    ]


def has_form(family: str, form: str) -> bool:
    if form == "draft":
        return family in MTP_FAMILIES
    if form == "lora":
        return family != "gpt2"
    return form != "context" or divides_rows(family)


def divides_rows(family: str) -> bool:
    return KNOWN[family].shares and not KNOWN[family].undivided and SHAPES[family] is None


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
    if form == "draft":
        return {"draft": {"form": "mtp", "unrolled": 2}}
    return {"routed": True} if form == "divided" and shape is not None and shape.routed else {}


def options(family: str, form: str) -> dict[str, object]:
    if form == "context":
        return CONTEXT
    return {"shard": "weights", **({"expert_parallel": 2} if form == "divided" and SHAPES[family] else {})}


@pytest.fixture(scope="module")
def walked(request, tmp_path_factory) -> Callable[[str, str], list[SimpleNamespace]]:
    """What one rank found of a chosen case, and what two did; a lot of cases goes through one group of processes."""
    named = [
        item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    chosen = [(own["family"], own["form"]) for item in named if "form" in (own := item.callspec.params)]
    folder: Path = tmp_path_factory.mktemp("families")
    found: dict[int, dict[str, SimpleNamespace]] = {}

    def walked(family: str, form: str) -> list[SimpleNamespace]:
        lot = chosen.index((family, form)) // LOT
        if lot not in found:
            found[lot] = {}  # of one that fails nothing is tried again
            for ranks in (1, 2):
                cases = dict(case_of(folder, ranks, *each) for each in chosen[lot * LOT :][:LOT])
                found[lot] |= walk_cases(folder, ranks, cases)
        names = [f"{family}-{form}-{ranks}" for ranks in (1, 2)]
        assert found[lot].keys() >= {*names}, "a case of the same lot failed"
        return [found[lot][name] for name in names]

    return walked


def case_of(folder: Path, ranks: int, family: str, form: str) -> tuple[str, dict[str, Any]]:
    """Its name, and what `backend_ranks.py` does."""
    model = folder / f"{family}-{form == 'draft'}"
    if not model.exists():
        (write_predicting if form == "draft" else write_family)(model, family)
    more = keys(family, form)
    if ranks == 1:
        made = config(model, **more)
    else:
        again = {"gradient_checkpointing": True} if form in ("divided", "draft") else {}
        made = config(model, ranks, options(family, form), backend="fsdp", **more, **again)
    return f"{family}-{form}-{ranks}", {"config": made, "saved": ""}


@pytest.mark.parametrize(("family", "form"), forms())
def test_two_ranks_train_as_one_does(family, form, walked, relative_l2):
    one, two = walked(family, form)
    gradient, own = part(one.tensors, "gradient"), part(two.tensors, "gradient")
    assert own.keys() == gradient.keys() and any(bool(value.any()) for value in gradient.values())
    drafts = {name for name, value in gradient.items() if name.startswith(DRAFT) and bool(value.any())}
    assert bool(drafts) == (form == "draft")
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
        ("stablelm", "attention of its own"),
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


def test_adapters_of_a_model_without_linear_layers_are_refused():
    problem = targets_problem(tiny_of("gpt2"), LoraSection(targets="all-linear"))
    assert problem == "the model has no linear layer that learns but its head; remove trainer.lora"
