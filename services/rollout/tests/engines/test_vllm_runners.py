"""What we ask of vLLM's two model runners, of the installed vLLM's own classes.

V1 runs where Triton does not (on a CPU, in the other tests of this folder), V2 on GPUs.

The worker is one class for both, and CPUWorker inherits from it what an update calls. Each test drives the real worker
and the real runner's method on objects without a device.
"""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rig import ENGINES_HERE

if "vllm" not in ENGINES_HERE:
    pytest.skip(
        "vLLM is in an environment of its own: make test-engines ENGINE=vllm", allow_module_level=True
    )

from headrace_rollout.engines.hosted.backend import rows_of
from headrace_rollout.engines.vllm import worker as extension
from headrace_rollout.engines.vllm.arguments import TRANSFER
from model_weights import weights_of_model
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.v1.core.sched import scheduler
from vllm.v1.worker import cpu_worker, gpu_worker, lora_model_runner_mixin
from vllm.v1.worker.gpu import model_runner as second
from vllm.v1.worker.gpu.sample import sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First

Second = second.GPUModelRunner
RUNNERS = {"V1": First, "V2": Second}
UPDATES = (
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "init_weight_transfer_engine",
    "load_model",
)


class Tiny(torch.nn.Module):
    """A model with a loader like those of vLLM, a buffer, and weights that a CUDA graph would know by their place."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4, 8), value), requires_grad=False)
        self.register_buffer("angles", torch.full((3,), value), persistent=False)

    def load_weights(self, tensors):
        found = set()
        for name, tensor in tensors:
            parameter = dict(self.named_parameters())[name]
            getattr(parameter, "weight_loader", lambda own, new: own.data.copy_(new))(parameter, tensor)
            found.add(name)
        return found


class Adapters:
    """Of a runner's adapters, whether they were dropped."""

    dropped = 0

    def remove_all_adapters(self) -> None:
        self.dropped += 1


@pytest.fixture(params=RUNNERS)
def runner(request):
    """A runner with a model and adapters, and nothing else."""
    found = object.__new__(RUNNERS[request.param])
    found.model, found.lora_config, found.lora_manager = Tiny(1.0), SimpleNamespace(), Adapters()
    found.speculator = None  # V2: what drafts
    record_metadata_for_reloading(found.model)  # as vLLM's loader does for every model
    return found


@pytest.fixture
def worker(runner):
    """vLLM's worker of a GPU with our extension and our transfer, as its own factory makes it."""
    config = VllmConfig()
    config.weight_transfer_config = WeightTransferConfig(backend=TRANSFER)
    kind = type("Worker", (gpu_worker.Worker, extension.HeadraceWorker), {})
    found = object.__new__(kind)
    found.vllm_config, found.model_runner, found.device, found.rank = config, runner, torch.device("cpu"), 0
    found._weight_update_active = found._weight_update_is_draft = False
    found.weight_transfer_engine = gpu_worker.WeightTransferEngineFactory.create_engine(
        config.weight_transfer_config, config, found.device, runner.get_model()
    )
    return found


def test_the_worker_that_the_cpu_tests_drive_is_that_of_gpus():
    for name in UPDATES:
        assert getattr(cpu_worker.CPUWorker, name) is getattr(gpu_worker.Worker, name)
    taken = {name for name in dir(extension.HeadraceWorker) if not name.startswith("__")}
    assert not [name for name in taken if hasattr(gpu_worker.Worker, name)]  # vLLM refuses to mix it in


def test_a_version_reaches_the_model_of_either_runner_where_its_weights_lie(
    worker, runner, tmp_path: Path, monkeypatch
):
    """`finish_weight_update` has the runner drop adapters, whose factors were for other weights."""
    monkeypatch.setattr(
        extension, "get_tp_group", lambda: SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None)
    )
    place, weights = runner.model.weight.data_ptr(), weights_of_model(Tiny(3.0))
    file = tmp_path / "body"
    file.write_bytes(weights.body)
    assert worker.weight_transfer_engine.model is runner.get_model()
    worker.init_weight_transfer_engine({})
    worker.start_weight_update()
    worker.update_weights({"path": str(file), "entries": rows_of(weights.entries)})
    worker.finish_weight_update()
    assert not worker.headrace_session()
    assert runner.model.weight.eq(3.0).all() and runner.model.weight.data_ptr() == place
    assert runner.lora_manager.dropped == 1


def test_adapters_are_the_same_managers_of_both_runners():
    """Ours are registered under their requests' ids, which are then not read from a path."""
    mixin = lora_model_runner_mixin.LoRAModelRunnerMixin
    for kind in RUNNERS.values():
        assert issubclass(kind, mixin)
        for name in ("load_lora_model", "reset_lora_state", "_set_active_loras"):
            assert getattr(kind, name) is getattr(mixin, name)
        assert "self.load_lora_model(" in inspect.getsource(kind.load_model)
    manager = lora_model_runner_mixin.LRUCacheWorkerLoRAManager
    assert "lora_int_id not in self.list_adapters()" in inspect.getsource(manager.add_adapter)


def test_a_worker_of_either_runner_keeps_buffers_over_a_sleep(worker, runner, monkeypatch):
    """Level 2 discards all memory of the pool: weights are installed anew, buffers nobody installs."""
    for name, value in (("synchronize", lambda: None), ("get_memory_info", lambda: (2**30, 2**31))):
        monkeypatch.setattr(torch.accelerator, name, value)
    worker._sleep_saved_parameters, worker._sleep_saved_draft_buffers = {}, {}
    worker.vllm_config.model_config = worker.model_config = SimpleNamespace(
        enable_nccl_comm_suspend=False, sleep_preserve_parameter_names=[]
    )
    asked = []

    class Pool:
        def suspend(self, level):
            asked.append(level)
            runner.model.angles.fill_(torch.nan)

        def resume(self, tags):
            asked.append(tags)

    worker._sleep_mode_backend = Pool()
    monkeypatch.setattr(type(worker), "synchronize_device", lambda self: None, raising=False)
    worker.sleep(2)
    worker.wake_up(["kv_cache"])
    assert runner.model.angles.isnan().all()
    worker.wake_up(["weights"])
    assert runner.model.angles.eq(1.0).all() and asked == [2, ["kv_cache"], ["weights"]]


def test_requests_that_a_version_in_flight_stops_are_forgotten_and_come_back_whole():
    """`reset_prefix_cache(reset_running_requests=True)` preempts them; V2 adds them again with all their tokens."""
    dropped = []
    runner = SimpleNamespace(pooling_runner=None, _remove_request=dropped.append)
    Second.finish_requests(runner, SimpleNamespace(finished_req_ids={"a"}, preempted_req_ids={"b", "c"}))
    assert dropped == ["a", "b", "c"]
    assert "_preempt_request(request, timestamp, drop_stale_output=True)" in inspect.getsource(
        scheduler.Scheduler.reset_prefix_cache
    )
    again = inspect.getsource(scheduler.Scheduler.schedule)
    of_second = again[again.index("if self.use_v2_model_runner:") :]
    assert re.match(
        r".*?scheduled_new_reqs\.extend\(scheduled_resumed_reqs\).*?req\._all_token_ids", of_second, re.S
    )


@pytest.mark.parametrize(("mode", "value"), [("processed_logprobs", 7.0), ("raw_logprobs", 1.0)])
def test_log_probs_of_the_second_runner_are_of_the_sampling_distribution(mode, value, monkeypatch):
    """`processed_logprobs`, in the sampler's own flow: temperature, min-p, top-k and top-p are applied."""
    given = []
    monkeypatch.setattr(
        sampler, "compute_topk_scores", lambda logits, *a, **k: given.append((logits, k["logits_mode"]))
    )
    monkeypatch.setattr(sampler, "get_num_sampled_and_rejected", lambda *arguments: (None, None))
    one = SimpleNamespace(
        logprobs_mode=mode,
        compute_nans=False,
        get_logprobs_dims=lambda mapping: (0, 0),
        sample=lambda *a, **k: (torch.zeros(2, dtype=torch.long), torch.full((2, 5), 7.0)),
        trace_replay_state=None,
        logprob_token_ids_state=None,
        return_sampling_mask=False,
        req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=None)),
    )
    rows = torch.zeros(2, dtype=torch.long)
    batch = SimpleNamespace(
        expanded_idx_mapping=rows,
        idx_mapping=rows,
        idx_mapping_np=rows.numpy(),
        cu_num_logits_np=rows.numpy(),
        expanded_local_pos=rows,
        positions=rows,
        logits_indices=rows,
        input_ids=rows,
        seq_lens_cpu_upper_bound=rows,
        seq_lens=rows,
        cu_num_logits=rows,
        num_reqs=2,
    )
    sampler.Sampler.__call__(one, torch.ones(2, 5), batch)
    ((logits, as_logits),) = given
    assert logits.eq(value).all() and not as_logits


def test_the_second_runner_reads_every_parameter_that_our_requests_set():
    folder = Path(os.path.dirname(sampler.__file__))
    text = "".join(file.read_text() for file in [*folder.glob("*.py"), *folder.glob("*/*.py")])
    read = {*re.findall(r"sampling_params\.(\w+)", text)}
    ours = {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "seed",
        "logprobs",
        "prompt_logprobs",
    }
    assert {*ours, "logprob_token_ids"} <= read, f"it does not read {ours - read}"


def test_the_table_of_families_says_which_classes_it_has():
    from headrace_modelkit.families.known import KNOWN
    from headrace_modelkit.presets.families import class_of
    from transformers import CONFIG_MAPPING
    from vllm.model_executor.models.registry import ModelRegistry

    listed = set(ModelRegistry.get_supported_archs())
    here = [family for family in KNOWN if family.partition("+")[0] in CONFIG_MAPPING]  # of its transformers
    assert len(here) > 40
    has = {family: class_of(family) in listed for family in here}
    assert has == {family: KNOWN[family].vllm for family in here}
