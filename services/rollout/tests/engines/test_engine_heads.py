"""Heads that a run exports, as vLLM's own loader takes them: every weight has a place, and none is left."""

from __future__ import annotations

import pytest
import torch
from headrace_modelkit.families.drafts import add_draft, drawn, save_draft
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.tiny import write_tiny
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import DraftSection

pytest.importorskip("vllm")


@pytest.fixture
def _one_rank(tmp_path):
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    yield lambda: (
        init_distributed_environment(1, 0, f"file://{tmp_path / 'meeting'}", 0, "gloo"),
        initialize_model_parallel(1, 1),
    )
    cleanup_dist_env_and_memory()


def test_vllm_loads_an_exported_head_and_computes_what_the_trainer_does(tmp_path, _one_rank):
    from vllm import AsyncEngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    write_tiny(tmp_path / "tiny", head_dim=32)
    section = ModelSection(path=str(tmp_path / "tiny"), dtype="float32")
    head = add_draft(load_model(section), DraftSection(), section)
    head.load_state_dict(drawn(head, 3))
    save_draft(tmp_path / "draft", DraftSection(), section, head.state_dict())
    speculative = {"method": "eagle3", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    config = AsyncEngineArgs(
        model=section.path,
        dtype="float32",
        max_model_len=64,
        speculative_config=speculative,
        enforce_eager=True,
    ).create_engine_config()
    with set_current_vllm_config(config):
        _one_rank()
        found = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    read = torch.randn(5, 3 * 64, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.allclose(found.combine_hidden_states(read), head.fc(read), atol=1e-5)
        own = found.lm_head.weight[: head.lm_head.weight.shape[0]]
        assert torch.equal(own, head.lm_head.weight)
        layer = found.model.layers[0]
        qkv = torch.cat(
            [getattr(head.midlayer.self_attn, name).weight for name in ("q_proj", "k_proj", "v_proj")]
        )
        assert torch.equal(layer.self_attn.qkv_proj.weight, qkv)
        gates = torch.cat([head.midlayer.mlp.gate_proj.weight, head.midlayer.mlp.up_proj.weight])
        assert torch.equal(layer.mlp.gate_up_proj.weight, gates)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            assert torch.equal(getattr(layer, name).weight, getattr(head.midlayer, name).weight)
        assert torch.allclose(layer.mlp(hidden), head.midlayer.mlp(hidden), atol=1e-5)
