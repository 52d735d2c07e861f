"""What a step computes is counted from its operations: products, bytes, kernels, and how often the host waits."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace_fake_world.models import MODELS
from headrace_fake_world.step import Case, measure
from headrace_fake_world.work import Roof, Work, seconds_of
from headrace_trainer.backends.fsdp.layouts.layout import Layout

pytestmark = pytest.mark.timeout(300)
DIVIDED = Layout("weights", 8)
SMALL = Case("qwen2.5-0.5b", 8, tokens=2048, row_tokens=2048, layers=2, layout=DIVIDED)
SHAPE = MODELS[SMALL.model]


def micro_batch(case: Case, **own):
    """What is counted of one."""
    watch = partial(Work, Roof(), vocabulary=MODELS[case.model]["vocab_size"], **own)
    return measure(case, watch=watch).phases["micro-batch"].work


def test_a_forward_s_products_are_two_for_each_weight_and_token_and_a_backward_s_twice_as_many():
    work = micro_batch(SMALL)
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    keys = hidden * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"]
    layer = hidden * (2 * hidden + 2 * keys + 3 * inner)
    pairs = SMALL.tokens * (SMALL.tokens + 1) // 2
    trained = SMALL.row_tokens - SMALL.row_tokens // 32
    head, attention = 2 * trained * hidden * SHAPE["vocab_size"], 2 * 4 * hidden * pairs
    expected = 2 * SMALL.tokens * 2 * layer + head + attention
    assert work["flops"] == pytest.approx(expected, rel=0.01)
    # The head's logits are made again, a tile at a time, and flash attention makes its scores again.
    assert work["flops in backward"] == pytest.approx(2 * expected + head + attention / 2, rel=0.01)
    again = micro_batch(replace(SMALL, layout=replace(DIVIDED, checkpointing=True)))
    assert again["flops"] == work["flops"]
    more = again["flops in backward"] - work["flops in backward"]
    last = 2 * SMALL.tokens * 2 * hidden * inner
    assert more == pytest.approx(expected - head - last, rel=0.01), "of a layer all but its last product"


def test_what_is_compiled_has_fewer_kernels_and_moves_fewer_bytes():
    eager, compiled = micro_batch(SMALL), micro_batch(SMALL, fuses=True)
    assert compiled["kernels"] < eager["kernels"] and compiled["bytes"] < eager["bytes"]
    assert compiled["flops"] == eager["flops"]
    assert seconds_of(compiled)["products"] == pytest.approx(seconds_of(eager)["products"], rel=0.01)


@pytest.mark.parametrize("layers", [2, 3])
def test_the_host_waits_once_a_micro_batch_whatever_the_layers_of_experts(layers):
    """Whether the loss is finite: where tokens go stays on the device. Divided experts are exchanged by sizes that the
    host must know, in each layer.
    """
    case = Case("qwen3-30b-a3b", 8, tokens=1024, row_tokens=1024, layers=layers, layout=DIVIDED)
    assert micro_batch(case)["waits"] == 1
