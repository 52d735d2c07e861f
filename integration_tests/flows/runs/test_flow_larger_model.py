"""A larger model for real: nothing that a small one hides breaks a run. Its quick twin has few and small layers."""

import sys
from pathlib import Path

import pytest
from harness.processes import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from _run_at_size import Size, run, write_model

SMALL, HALF_BILLION = "qwen2.5-small", "qwen2.5-0.5b"
NIGHTLY = (pytest.mark.nightly, pytest.mark.timeout(2400))
STEP_BYTES = {SMALL: 1e9, HALF_BILLION: 22e9}
"""A trainer's fp32 masters, moments and gradients, bf16 copy, and the snapshot that a checkpoint is written from."""


@pytest.mark.parametrize(
    ("shape", "engine"),
    [
        (SMALL, "transformers"),
        pytest.param(HALF_BILLION, "transformers", marks=NIGHTLY),
        pytest.param(HALF_BILLION, "vllm", marks=NIGHTLY),
    ],
)
def test_three_steps_of_a_run_are_whole(shape, engine, tmp_path):
    if engine == "vllm" and not (ROOT / ".envs" / "vllm").is_dir():
        pytest.skip("make engines ENGINE=vllm makes its environment")
    size = Size(shape, engine)
    found = run(size, write_model(shape, Path(tmp_path) / "model"))
    assert found["steps"] == size.steps and found["trained"] == size.steps * size.groups * size.samples
    assert found["steps_with_gradient"] >= 1
    # bf16 on both sides, and the same weights: publications and installs are whole.
    assert found["worst_mismatch_kl"] < 1e-3
    assert found["host_peak_trainer_bytes"] < STEP_BYTES[shape]
    assert engine != "vllm" or found["engine_starts"] == 1
