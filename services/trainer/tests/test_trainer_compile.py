"""`backend_options.compile`: the step of a backend that compiles nothing, and what cannot be compiled is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from headrace_modelkit.presets.tiny import write_tiny_moe
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp import checks, sharding
from headrace_trainer.backends.fsdp.backend import FsdpBackend
from headrace_trainer.backends.fsdp.checks import COMPILE, check_run, compiles
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.packing import Attends

pytestmark = pytest.mark.timeout(600)
BUDGETS = (64, 200)
"""Of the micro-batches of two groups: rows of other lengths."""


@pytest.fixture
def gradients(make_backend, sequences, accumulate, monkeypatch):
    """Of a backend whose layers `compiler` compiles and of a plain one; and how many graphs were made."""

    def run(compiler: str, model: str = "", **trainer):
        made: list[int] = []
        plain = torch.compile

        def counted(function, **options):
            def backend(graph, inputs):
                made.append(len(graph.graph.nodes))
                return torch._dynamo.lookup_backend(compiler)(graph, inputs)

            return plain(function, backend=backend, **options)

        monkeypatch.setattr(sharding.torch, "compile", counted)
        found = []
        for wanted in (True, False):
            torch._dynamo.reset()
            sections = {"model": {"path": model}} if model else {}
            backend = make_backend(trainer={"backend_options": {"compile": wanted}, **trainer}, **sections)
            for seed, budget in enumerate(BUDGETS):
                accumulate(backend, [sequences(seed)], budget)
            found.append(backend.reduced_gradient(17.0))
        return *found, len(made)

    return run


def test_layers_are_compiled_where_the_run_asks_for_it_alone(make_backend, monkeypatch):
    """The quick twin: tracing a layer takes a minute on a busy core, so that steps are nightly."""
    compiled: list[bool] = []
    monkeypatch.setattr(
        sharding.torch, "compile", lambda forward, *, dynamic: compiled.append(dynamic) or forward
    )
    make_backend()
    assert not compiled
    make_backend(trainer={"backend_options": {"compile": True}})
    assert compiled == [True], "for rows of any length, and once for all layers of a class"


@pytest.mark.parametrize(
    ("options", "sections", "expected"),
    [
        ({}, {}, True),
        ({"compile": False}, {}, False),
        ({}, {"deterministic": True}, False),
        ({}, {"model": "experts"}, True),
    ],
    ids=["default", "eager", "deterministic", "experts"],
)
def test_a_gpu_compiles_where_nothing_speaks_against_it(
    make_config, monkeypatch, tmp_path, options, sections, expected
):
    if sections.get("model"):
        write_tiny_moe(tmp_path / "experts")
        sections = {"model": {"path": str(tmp_path / "experts")}}
    config = TrainerConfig.model_validate(make_config(**sections))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(checks, "find_spec", lambda name: name)
    assert compiles(FsdpOptions(**options), config, torch.device("cuda", 0)) is expected
    assert not compiles(FsdpOptions(), config, torch.device("cpu"))
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert not compiles(FsdpOptions(), config, torch.device("cuda", 0)), "there is no Triton"


@pytest.mark.nightly
def test_another_length_compiles_nothing_anew(make_backend, sequences, accumulate, monkeypatch):
    """Graphs are counted: those of the first micro-batch, which all layers share, serve every other one."""
    made, plain = [], torch.compile

    def counted(function, **options):
        return plain(function, backend=lambda graph, _: made.append(graph) or graph.forward, **options)

    monkeypatch.setattr(sharding.torch, "compile", counted)
    monkeypatch.setattr(FsdpBackend, "_attends", Attends.SEGMENTS)  # as on a GPU: rows one behind the other
    torch._dynamo.reset()
    backend = make_backend(trainer={"backend_options": {"compile": True}})
    counts = []
    for seed, prompt in enumerate((9, 12, 17, 5, 23)):
        accumulate(backend, [sequences(seed, prompt=prompt)], 512)
        counts.append(len(made))
    assert counts[0] > 0 and counts == counts[:1] * len(counts)
    layers = backend._sharded.model.config.num_hidden_layers
    assert counts[0] < 4 * layers, "layers share their graphs: before and behind attention, in two modes"


FLASH_3 = """
import sys, types
import torch
from torch.library import Library
from torch.nn.attention import current_flash_attention_impl
from headrace_trainer.backends.shared import attention

kernels = Library("flash_attn_3", "DEF")
kernels.define("fwd(Tensor q) -> Tensor")
kernels.define("bwd(Tensor q) -> Tensor")
sys.modules[attention.FLASH_3] = types.ModuleType(attention.FLASH_3)
sys.modules[attention.FLASH_3].__spec__ = types.SimpleNamespace(name=attention.FLASH_3)
cuda = torch.device("cuda", 0)
torch.cuda.is_available = lambda: True
for major in (8, 9):
    torch.cuda.get_device_capability = lambda device: (major, 0)
    attention.use_newest_flash(cuda)
    attention.use_newest_flash(torch.device("cpu"))
    print(current_flash_attention_impl())
"""


def test_hopper_takes_flash_attention_3_where_it_is_installed():
    """torch's own registration, which refuses a package without forward and backward kernels."""
    done = subprocess.run([sys.executable, "-c", FLASH_3], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["None", "FA3"], done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    "trainer",
    [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 4}}],
    ids=["whole", "recomputed", "adapters"],
)
def test_a_compiled_step_is_the_plain_one(gradients, relative_l2, trainer):
    own, expected, made = gradients("aot_eager", **trainer)
    assert made > 0, "layers were compiled"
    assert relative_l2(own, expected) <= 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize(
    "trainer",
    [{"gradient_checkpointing": True}, {"lora": {"rank": 4, "targets": ["q_proj", "experts"]}}],
    ids=["recomputed", "adapters"],
)
def test_compiled_experts_are_the_plain_ones(gradients, relative_l2, tmp_path, trainer):
    write_tiny_moe(tmp_path / "experts")
    own, expected, made = gradients("aot_eager", str(tmp_path / "experts"), **trainer)
    assert made > 0, "routers and experts were compiled"
    assert relative_l2(own, expected) <= 1e-5


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_what_inductor_makes_is_the_same_step(gradients, relative_l2):
    own, expected, made = gradients("inductor")
    assert made > 0
    assert relative_l2(own, expected) <= 1e-5


def refusal(make_config, **sections) -> Refusal:
    config = TrainerConfig.model_validate(make_config(**sections))
    with pytest.raises(Refusal) as caught:
        check_run(FsdpOptions(compile=True), config, build_algorithm(config.algorithm))
    assert caught.value.reason == "INVALID" and caught.value.message.startswith(COMPILE)
    return caught.value


def test_what_cannot_be_compiled_is_refused_with_its_key(make_config, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler" in refusal(make_config).message
