"""Attention of segments is softmax attention under their dense mask, on each kernel that runs here; no mask is made."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from headrace_trainer.backends.shared import attention
from headrace_trainer.backends.shared.attention import attend_segments, block_mask, by_flash, by_flex, by_mask
from headrace_trainer.learning.packing import Attends, pack
from headrace_trainer.learning.samples import Sample
from headrace_trainer.learning.segments import Segment, Segments
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

HEADS, GROUPS, WIDTH = 4, 2, 16


def tree(seed: int, answers: int = 5, rows: int = 2, longest: int = 40) -> Segments:
    """Of random groups whose answers branch off each other at many places."""
    draw = random.Random(seed)
    made = []
    for _ in range(rows):
        own = [[draw.randrange(30) for _ in range(draw.randrange(2, longest))]]
        for _ in range(answers - 1):
            kept = draw.choice(own)[: draw.randrange(1, longest)]
            own.append([*kept, *[draw.randrange(30) for _ in range(draw.randrange(1, longest))]])
        made.append([Sample(tokens, [len(tokens) - 1], [0.0]) for tokens in own if len(tokens) > 1])
    found = pack(made, shared=True, attends=Attends.SEGMENTS).segments
    assert found is not None
    return found


def ancestors(segments: Segments) -> torch.Tensor:
    """(N, N) by walking through the runs of each query, one at a time."""
    mask = torch.zeros(segments.queries, segments.queries, dtype=torch.bool)
    for part in segments.parts:
        for query in range(part.start, part.stop):
            for first, end in part.before:
                mask[query, first:end] = True
            mask[query, part.own : part.own + query - part.start + 1] = True
    return mask


def random_heads(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(queries)
    shapes = [(queries, HEADS, WIDTH), (keys, GROUPS, WIDTH), (keys, GROUPS, WIDTH)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def plain(heads: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Softmax attention as it is written."""
    query, key, value = heads
    again = HEADS // GROUPS
    scores = torch.einsum("nhd,mhd->hnm", query, key.repeat_interleave(again, 1)) / math.sqrt(WIDTH)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, value.repeat_interleave(again, 1))


@pytest.mark.parametrize("kernel", [attention.on_cpu, by_mask], ids=["CPU", "mask"])
@pytest.mark.parametrize("seed", range(4))
def test_output_and_gradients_are_those_under_the_dense_mask(kernel, seed):
    segments = tree(seed)
    heads = random_heads(segments.queries, segments.queries)
    weights = torch.randn(segments.queries, HEADS, WIDTH)
    results = []
    for found in (kernel(*heads, segments, WIDTH**-0.5), plain(heads, ancestors(segments))):
        results.append([found, *torch.autograd.grad((found * weights).sum(), heads)])
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def within(segments: Segments, window: int) -> torch.Tensor:
    """(N, N) as `ancestors`, of each path's last keys alone."""
    mask = torch.zeros(segments.queries, segments.queries, dtype=torch.bool)
    for part in segments.parts:
        path = [key for run in part.runs for key in range(*run)]
        before = len(path) - (part.stop - part.start)
        for query in range(part.start, part.stop):
            end = before + query - part.start + 1
            mask[query, path[max(0, end - window) : end]] = True
    return mask


@pytest.mark.parametrize("window", [1, 3, 17])
@pytest.mark.parametrize("seed", range(3))
def test_a_window_ends_with_each_query_s_own_path(seed, window):
    segments = tree(seed)
    heads = random_heads(segments.queries, segments.queries)
    weights = torch.randn(segments.queries, HEADS, WIDTH)
    mask = within(segments, window)
    results = []
    for found in (attend_segments(*heads, segments, window=window), plain(heads, mask)):
        results.append([found, *torch.autograd.grad((found * weights).sum(), heads)])
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
    apart = [each.detach() for each in heads]
    torch.testing.assert_close(
        by_flex(*apart, segments, WIDTH**-0.5, window), plain(apart, mask), rtol=1e-4, atol=1e-5
    )
    whole = attend_segments(*apart, segments, window=segments.longest_path)
    torch.testing.assert_close(whole, plain(apart, ancestors(segments)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("places", [(0, 3), (1, 2)])
def test_queries_may_be_a_part_of_the_keys(places):
    """As with context parallelism: of two rows of 24 keys two of four parts each, and of (1, 2) none sees the last."""
    parts = [
        Segment(
            6 * index,
            6 * index + 6,
            24 * row + 6 * place,
            ((24 * row, 24 * row + 6 * place),) if place else (),
        )
        for index, (row, place) in enumerate((row, place) for row in range(2) for place in places)
    ]
    segments = Segments.of(parts, 48)
    mask = torch.zeros(24, 48, dtype=torch.bool)
    causal = torch.ones(24, 24).tril().bool().view(4, 6, 24)
    for row in range(2):
        mask[12 * row : 12 * row + 12, 24 * row : 24 * row + 24] = causal[list(places)].flatten(0, 1)
    heads = random_heads(24, 48)
    for kernel in (attention.on_cpu, by_mask):
        torch.testing.assert_close(
            kernel(*heads, segments, WIDTH**-0.5), plain(heads, mask), rtol=1e-5, atol=1e-5
        )
    apart = [each.detach() for each in heads]
    torch.testing.assert_close(
        by_flex(*apart, segments, WIDTH**-0.5), plain(apart, mask), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(segments.visible.dense(), mask)


@pytest.mark.parametrize("seed", range(3))
def test_the_block_mask_of_flex_attention_is_the_tree_s(seed):
    segments = tree(seed, answers=6, rows=3, longest=90)
    heads = [each.detach() for each in random_heads(segments.queries, segments.queries)]
    torch.testing.assert_close(
        by_flex(*heads, segments, WIDTH**-0.5), plain(heads, ancestors(segments)), rtol=1e-4, atol=1e-5
    )
    blocks = block_mask(segments)
    counted = blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum()
    side = -(-segments.queries // attention.BLOCK)
    assert side > 1 and counted < side * (side + 1) / 2, "blocks that nobody sees are skipped"


@pytest.mark.parametrize("seed", range(4))
def test_the_rule_of_one_query_and_one_key_is_the_tree_s(seed):
    segments = tree(seed)
    mask = ancestors(segments)
    assert torch.equal(segments.visible.dense(), mask)
    assert segments.pairs == int(mask.sum())
    assert segments.seen == int(segments.key_ends[-1]) == len(segments.keys_T)


def test_rows_without_a_tree_need_no_copy_of_their_keys():
    rows = [[Sample(list(range(3, 3 + size)), [size - 1], [0.0])] for size in (9, 4, 7)]
    segments = pack(rows, shared=True, attends=Attends.SEGMENTS).segments
    assert segments.keys_T is None
    assert segments.query_ends.tolist() == segments.key_ends.tolist() == [0, 8, 11, 17]


def test_bf16_is_as_near_to_fp32_as_torch_s_own_kernel():
    segments = tree(1, longest=200)
    heads = random_heads(segments.queries, segments.queries)
    exact = plain(heads, ancestors(segments))
    narrow = [each.bfloat16() for each in heads]
    own = attend_segments(*narrow, segments).float()
    query, key, value = (each.transpose(0, 1)[None] for each in narrow)
    mask = ancestors(segments)
    torchs = (
        F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)[0].transpose(0, 1).float()
    )
    assert (own - exact).norm() < 1.2 * (torchs - exact).norm()


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.name, self.kernels = 0, "", set()
        self.windows: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.kernels.add(function._opname)
        if (kwargs or {}).get("window_size_left") is not None:
            self.windows.append(kwargs["window_size_left"])
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, torch.Tensor) and each.numel() > self.elements:
                self.elements, self.name = each.numel(), function._opname
        return found


@pytest.mark.parametrize(
    ("queries", "dtype", "width", "window", "expected"),
    [
        (8192, torch.bfloat16, 128, None, by_flash),
        (8192, torch.bfloat16, 128, 1024, by_flash),
        (16384, torch.bfloat16, 80, None, by_flash),
        (8192, torch.float32, 128, None, by_flex),
        (8192, torch.bfloat16, 512, 1024, by_flex),
        (1024, torch.float32, 128, None, by_mask),
    ],
)
def test_a_gpu_takes_flash_where_it_can_and_flex_for_many_tokens(queries, dtype, width, window, expected):
    prompt = queries // 2
    answer = queries // 16
    parts = [Segment(0, prompt, 0)] + [
        Segment(first, first + answer, first, ((0, prompt),)) for first in range(prompt, queries, answer)
    ]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        segments = Segments.of(parts).to(torch.device("cuda:0"))
        query, key = (torch.empty(queries, count, width, dtype=dtype, device="cuda:0") for count in (28, 4))
        assert attention.choose_kernel(query, key, key, segments, window) is expected
        if expected is not by_flash:
            return
        with Largest() as largest:
            found = attend_segments(query, key, key, segments, window=window)
    assert (found.shape, found.dtype, found.device.type) == (query.shape, dtype, "cuda")
    assert "_flash_attention_forward" in largest.kernels
    assert largest.windows == ([] if window is None else [window - 1])
    # The largest is of queries and outputs, or of keys that all paths read: neither grows with queries times keys.
    assert largest.elements <= max(
        queries * 28 * (-(-width // 8) * 8), segments.seen * 4 * (-(-width // 8) * 8)
    )


def test_a_tree_that_reads_its_keys_too_often_goes_to_flex_attention():
    prompt, answers = 4096, 40
    parts = [Segment(0, prompt, 0)] + [
        Segment(prompt + 8 * index, prompt + 8 * index + 8, prompt + 8 * index, ((0, prompt),))
        for index in range(answers)
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        segments = Segments.of(parts).to(torch.device("cuda:0"))
        heads = torch.empty(segments.queries, 4, 64, dtype=torch.bfloat16, device="cuda:0")
        assert attention.choose_kernel(heads, heads, heads, segments) is by_flex


def test_a_padded_row_is_no_packed_one():
    """A position that does not follow the one before it would begin another sequence, and cost a mask."""
    rows = [[Sample(list(range(3, 3 + size)), [size - 1], [0.0])] for size in (9, 4)]
    for attends in (Attends.MASK, Attends.CHEAPEST):
        batch = pack(rows, shared=True, attends=attends)
        assert batch.positions_RL.tolist() == [list(range(8))] * 2
        assert (batch.mask_R1LL, batch.paths, batch.segments) == (None, None, None)
