"""The parts that ranks of a real engine upload, exchanged by its own communicator: vLLM's, on a CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from headrace_rollout.engines.hosted import files
from headrace_rollout.engines.hosted.backend import rows_of
from headrace_rollout.engines.hosted.files import agreed, uploaded
from model_weights import weights_of_tensors
from torch import multiprocessing

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: make test-engines"),
]


def test_two_ranks_of_vllm_exchange_what_each_has_uploaded(tmp_path):
    multiprocessing.spawn(one_rank, (str(tmp_path),), nprocs=2)
    assert len(list(tmp_path.glob("passed-*"))) == 2


def one_rank(rank, directory):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        meet = f"file://{directory}/meet"
        parallel_state.init_distributed_environment(2, rank, meet, rank, "gloo")
        parallel_state.initialize_model_parallel(2, backend="gloo")
    group = parallel_state.get_tp_group()
    files.WINDOW_BYTES = 1000
    tensors = {f"w{index}": torch.randn(30 + index, 9) for index in range(5)}
    torch.distributed.broadcast_object_list(shared := [tensors], src=0)
    (tensors,) = shared
    weights = weights_of_tensors(tensors)
    found = dict(uploaded(weights.body, rows_of(weights.entries), torch.device("cpu"), group))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items()) and len(found) == 5

    def opens():
        if rank:
            raise FileNotFoundError("no file")

    with pytest.raises(FileNotFoundError if rank else ValueError):
        agreed(opens, group)
    Path(directory, f"passed-{rank}").touch()
