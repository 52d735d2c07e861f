"""Rotary embeddings of packed sequences, by the definition."""

import torch


def apply_rotary_pos_emb(
    t,
    freqs,
    tensor_format="sbhd",
    start_positions=None,
    interleaved=False,
    fused=False,
    cu_seqlens=None,
    cp_size=1,
    cp_rank=0,
):
    assert fused and tensor_format == "thd" and t.dim() == 3 and cp_size == 1 and not interleaved
    assert cu_seqlens.dtype is torch.int32 and int(cu_seqlens[-1]) == len(t) and freqs.dtype is torch.float32
    places = torch.cat([torch.arange(length) for length in cu_seqlens.diff().tolist()])
    angles = freqs[places, 0]
    first, second = t.chunk(2, -1)
    half = torch.cat((-second, first), -1)
    return t * angles.cos().to(t.dtype) + half * angles.sin().to(t.dtype)
