"""Layers by torch, which check what the real ones check."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from transformer_engine.pytorch import attention, distributed, fp8

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "attention",
    "distributed",
    "fp8",
    "ops",
]


class Linear(nn.Module):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        super().__init__()
        assert parallel_mode in ("row", "column") and not return_bias
        self._mode, self._sequence, self._group = parallel_mode, sequence_parallel and tp_size > 1, tp_group
        self._size = tp_size
        rows, columns = (
            (out_features // tp_size, in_features)
            if parallel_mode == "column"
            else (out_features, in_features // tp_size)
        )
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(rows, dtype=params_dtype, device=device)) if bias else None

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        from megatron.core.tensor_parallel import mappings

        if self._mode == "column" and self._size > 1:
            move = (
                mappings.gather_from_sequence_parallel_region
                if self._sequence
                else mappings.copy_to_tensor_model_parallel_region
            )
            inp = move(inp, group=self._group)
        found = F.linear(inp, self.weight, self.bias)
        if self._mode == "row" and self._size > 1:
            move = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if self._sequence
                else mappings.reduce_from_tensor_model_parallel_region
            )
            found = move(found, group=self._group)
        return found


class RMSNorm(nn.Module):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        **kwargs,
    ):
        super().__init__()
        assert set(kwargs) <= {"device"} and normalized_shape is None and not zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=kwargs.get("device")))
        self._eps = eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        bottom_right_diagonal=None,
        softcap=0.0,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
        name=None,
    ):
        super().__init__()
        assert cp_group is None and softmax_scale is None and attention_dropout == 0.0
        self._heads, self._groups = num_attention_heads // tp_size, num_gqa_groups // tp_size

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        bottom_right_diagonal=None,
        softcap=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
        fp8_output=False,
        bf16_backward=None,
        num_splits=1,
        score_mod=None,
        score_mod_bprop=None,
        score_mod_tensors=None,
        score_mod_bprop_tensors=None,
        qkv_layer=None,
        kv_layer=None,
        qkv_interleave_dim=None,
        thd_attention_policies=None,
        thd_attention_policy_dispatch=None,
    ):
        # What the real one asserts of thd.
        assert qkv_format == "thd" and "padding" in attn_mask_type and "causal" in attn_mask_type
        assert all(each.dim() == 3 for each in (query_layer, key_layer, value_layer))
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32 and cu_seqlens_q.dim() == 1
        assert query_layer.shape[1] == self._heads and key_layer.shape[1] == self._groups
        lengths = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).tolist()
        assert max_seqlen_q == max_seqlen_kv == max(lengths) and sum(lengths) == len(query_layer)
        found = [
            F.scaled_dot_product_attention(
                *(each.transpose(0, 1)[None] for each in parts), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
            for parts in zip(
                *(each.split(lengths) for each in (query_layer, key_layer, value_layer)), strict=True
            )
        ]
        return torch.cat(found).flatten(1)


class LayerNormLinear(nn.Module):
    """Not used."""


class GroupedLinear(nn.Module):
    """Not used."""


ops = SimpleNamespace(Sequential=nn.Sequential, FusibleOperation=nn.Module)
"""Not used."""
