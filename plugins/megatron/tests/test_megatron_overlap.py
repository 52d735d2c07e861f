"""Two replicas exchange gradients and weights, bucket by bucket, while they compute."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from headrace_modelkit.presets.tiny import write_tiny_moe
from rank_processes import RankProcess, end
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        find_spec("megatron") is None, reason="megatron-core is not installed: make test-megatron"
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What two ranks have found lies there."""
    folder = tmp_path_factory.mktemp("overlap")
    write_tiny_moe(folder / "model", initializer_range=0.2)  # whose experts nobody calls by their modules
    script = str(Path(__file__).with_name("overlap_ranks.py"))
    ranks = [RankProcess(script, str(folder), str(rank)) for rank in range(2)]
    try:
        assert [rank.wait(200.0) for rank in ranks] == [0, 0]
    finally:
        end(ranks)
    return folder


@pytest.fixture
def found(folder) -> list[list[str]]:
    """Events of small buckets on each rank."""
    return [json.loads((folder / f"{rank}.json").read_text())["4000"] for rank in range(2)]


def test_micro_batches_of_any_number_of_parts_give_the_same_weights_on_both_ranks(folder, relative_l2):
    large, small = (
        [load_file(folder / f"{size}-{rank}.safetensors") for rank in range(2)] for size in (None, 4000)
    )
    for one, other in (large, small):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert 0 < relative_l2(large[0], small[0]) < 1e-5


def test_gradients_are_on_their_way_before_the_backward_pass_ends(found):
    for events in found:
        first, second = events.index("finish"), events.index("micro")
        assert events[:first].count("reduce") == events[second:].count("gather") > 3
        assert "reduce" not in events[first:second]


def test_weights_are_gathered_as_they_change_and_waited_for_where_a_layer_computes(found):
    for events in found:
        assert "wait" not in events[: events.index("forward")]
        assert events[events.index("spread") : events.index("forward")].count("gather") > 3
        after = events[events.index("forward") : events.index("weights")]
        assert after.count("wait") == events.count("gather") and "gather" not in after
