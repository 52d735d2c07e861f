"""A larger model for real: nothing that a small one hides breaks a run. Its quick twin has few and small layers."""

import sys

import pytest
from harness.processes import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from _run_at_size import Size, figures, run, write_model

SMALL, HALF_BILLION = "qwen2.5-small", "qwen2.5-0.5b"
STEP_BYTES = 22e9
"""A trainer's fp32 masters, moments and gradients, bf16 copy, and the snapshot that a checkpoint is written from."""


def check_whole(found: dict[str, float], size: Size) -> None:
    assert found["steps"] == size.steps and found["trained"] == size.steps * size.groups * size.samples
    assert found["steps_with_gradient"] >= 1
    # bf16 on both sides, and the same weights: publications and installs are whole.
    assert found["worst_mismatch_kl"] < 1e-3


@pytest.mark.nightly  # quick: test_flow_runs.py, with a tiny one
def test_three_steps_of_a_small_one_are_whole(fleet, tmp_path):
    size = Size(SMALL)
    ended = fleet.succeed(fleet.submit(size.spec(write_model(SMALL, tmp_path / "model"))))
    check_whole(figures(fleet.client.metrics(ended.id), size), size)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_three_steps_of_a_run_are_whole(engine, tmp_path):
    if engine == "vllm" and not (ROOT / ".envs" / "vllm").is_dir():
        pytest.skip("make engines ENGINE=vllm makes its environment")
    size = Size(HALF_BILLION, engine)
    found = run(size, write_model(HALF_BILLION, tmp_path / "model"))
    check_whole(found, size)
    assert found["host_peak_trainer_bytes"] < STEP_BYTES
    assert engine != "vllm" or found["engine_starts"] == 1
