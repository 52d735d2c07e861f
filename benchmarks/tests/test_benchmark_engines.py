"""The engines' benchmark: its arithmetic on hand-made rates, its words where an engine is not installed, and the
memory of a small model's cache.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _engine_memory import kv_bytes_vs_needed
from engines import Found, Side, figures
from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer, tiny_model

SCRIPT = Path(__file__).parents[1] / "engines.py"


def test_the_ratio_is_of_medians():
    found = Found(Side([90.0, 10.0, 95.0]), Side([100.0, 300.0, 80.0]), 1.0, 2.0, 0.5)
    flat = figures({"transformers": found}, 1.2)
    assert flat["service_vs_bare_transformers"] == pytest.approx(0.9)
    assert (flat["bare_q1_transformers"], flat["bare_q3_transformers"]) == (90.0, 200.0)
    assert (flat["kv_bytes_vs_needed"], flat["start_s_transformers"]) == (1.2, 1.0)
    assert "kv_bytes_vs_needed" not in figures({"vllm": found}, None)


def test_a_cache_takes_no_less_than_its_tokens_need(tmp_path):
    torch.manual_seed(0)
    save_model(tiny_model(vocab_size=1024), character_tokenizer(), tmp_path)
    assert 1 <= kv_bytes_vs_needed(tmp_path, "float32", long=96, short=40, new=4) < 4


@pytest.mark.parametrize(("engines", "status"), [("slow", 2), ("vllm,slow", 2)])
def test_an_engine_that_nobody_can_measure_is_named(engines, status):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--engines", engines], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status and "slow cannot be measured" in done.stderr
