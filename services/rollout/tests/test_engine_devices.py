"""An engine's tensors lie on the leased device and on no other.

FakeTensorMode cannot carry this on a CPU build: indexing a make-believe cuda:1 tensor fails with "PyTorch is not
linked with support for cuda devices". So the leased device is `meta` here, and a dispatch mode refuses, as that one
would, an operation on tensors of two devices. `meta` has no values: the decoder's own lines, which read tokens, run on
the CPU under a function mode that notes factory calls without a device. One forgotten `device=` fails one of the two.
"""

from __future__ import annotations

import sys
from pathlib import Path

import headrace_rollout
import numpy as np
import pytest
import torch
from headrace_modelkit import devices
from headrace_rollout.engines.base import Policy
from headrace_rollout.engines.samples import Distribution
from headrace_rollout.engines.transformers.cache import PrefillPlan, PromptKeys
from headrace_rollout.engines.transformers.policy_model import PolicyModel
from headrace_rollout.engines.transformers.sampling import RowDistributions, draw, process
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LEASED = torch.device("meta")
MOVES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
FACTORIES = {
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.tensor,
    torch.arange,
    torch.rand,
    torch.randn,
}
OURS = str(Path(headrace_rollout.__file__).parent)


class OneDevice(TorchDispatchMode):
    """Refuses an operation on tensors that do not all lie on the leased device; numbers and moves are free."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()
        ]
        elsewhere = {str(tensor.device) for tensor in tensors} - {LEASED.type}
        assert func in MOVES or not (elsewhere and len({t.device for t in tensors}) > 1), (
            f"{func} on {elsewhere}"
        )
        return func(*args, **(kwargs or {}))


class EveryFactorySaysWhere(TorchFunctionMode):
    """Notes factory calls in this package that name no device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.silent: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        caller = sys._getframe(1)
        if func in FACTORIES and caller.f_code.co_filename.startswith(OURS):
            self.seen += 1
            if not (kwargs or {}).get("device"):
                self.silent.append(f"{caller.f_code.co_filename}:{caller.f_lineno} {func.__name__}")
        return func(*args, **(kwargs or {}))


def installed(config, device: torch.device) -> PolicyModel:
    model = PolicyModel(config, torch.device("cpu"))
    model.place(device)
    model.take_memory()
    model.policy = Policy(1, "one")
    model.adopt_weights()
    return model


def test_passes_and_sampling_run_on_the_leased_device(model_config):
    model = installed(model_config, LEASED)
    with OneDevice(), torch.inference_mode():
        kept, cache = PromptKeys(3), model.cache
        cache.free_bytes = 0  # splits rows of any length
        model.learn_token_size()
        cache.join([], [3, 3, 60])
        cache.prefill(PrefillPlan(0, [0, 0, 1], [(0, kept)]), LEASED)
        hidden = model.prefill([[1, 2, 3], [4] * 60])
        found = [hidden, *(tensor for layer in kept.layers for tensor in layer)]
        hidden = model.decode(np.array([[1], [2], [3]]), np.array([3, 3, 60]))[:, 0]
        assert len(cache.buckets) == 2
        cache.remove([0], {2: 0})
        cache.join([60, 4], [3])
        cache.place(2, [kept])
        rows = RowDistributions.of(
            [Distribution(0.7, 0.9, 0, 0.1, 1.2), Distribution(0.0), Distribution()], LEASED
        )
        uniform = torch.from_numpy(np.zeros(3, dtype=np.float32)).to(LEASED)
        seen = torch.from_numpy(np.zeros((3, model.vocabulary_size), dtype=bool)).to(LEASED)
        found += [hidden, *draw(process(model.head.logits(hidden), rows, seen), rows, uniform)]
        held = [tensor for bucket in cache.buckets for layer in bucket.layers for tensor in layer]
        assert held and {tensor.device for tensor in [*found, *held]} == {LEASED}
        model.free_memory()
        assert all(not p.numel() for p in model._model.parameters()) and not cache.buckets


async def test_every_tensor_of_decoding_and_scoring_says_where_it_lies(
    new_engine, collector, groups, weights
):
    engine = await new_engine(install=False)
    watch = EveryFactorySaysWhere()

    def start() -> None:
        watch.__enter__()

    engine._executor.submit(start).result(10)  # modes are a thread's own
    try:
        await engine.install(Policy(1, "one"), weights)
        distribution = Distribution(0.8, 0.9, 5, 0.01, 1.1)
        await engine.submit(collector.stream(max_new_tokens=6, distribution=distribution), groups)
        await collector.wait_ended(15)
        await engine.score([([1, 2, 3], 1)], Distribution())
    finally:
        engine._executor.submit(watch.__exit__, None, None, None).result(10)
    assert watch.seen > 10 and not watch.silent


def test_leased_gpus_are_found_by_their_uuid(monkeypatch):
    monkeypatch.setattr(devices, "_seen", lambda: ["aa-1", "8f2a-2"])
    assert devices.torch_devices(["GPU-8f2a-2", "GPU-aa-1"]) == (
        torch.device("cuda", 1),
        torch.device("cuda", 0),
    )
    assert devices.torch_devices([]) == (torch.device("cpu"),)
    with pytest.raises(devices.DeviceNotSeen, match="GPU-bb is leased and this process sees aa-1, 8f2a-2"):
        devices.torch_devices(["GPU-bb"])
