"""Layers of Transformer Engine compute what Megatron's own do, by calls that the package takes.

It runs on GPUs alone. Here an imaginary one, with the package's signatures and what it asserts, computes on a CPU.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from backend_cases import config, part, walk_cases
from headrace_modelkit.presets.tiny import write_tiny, write_tiny_moe

HERE = Path(__file__).parent
IMAGINARY = HERE / "imaginary/transformer_engine"
VERSION = "2.20.2"
pytestmark = pytest.mark.timeout(600)
needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: make test-megatron"
)
CASES = {
    "engine": (1, "qwen3", {}),
    "engine-experts": (1, "qwen3_moe", {}),
    "engine-off": (1, "qwen3", {"transformer_engine": "off"}),
    "engine-sequence": (2, "qwen3", {"tensor_parallel": 2, "sequence_parallel": True}),
    "engine-context": (2, "qwen3", {"context_parallel": 2}),
    "engine-pipeline": (2, "qwen3", {"pipeline_parallel": 2}),
}
QUICK = ("engine",)
SIGNED = {
    "pytorch/attention/dot_product_attention/dot_product_attention.py": "DotProductAttention",
    "pytorch/module/linear.py": "Linear",
    "pytorch/module/rmsnorm.py": "RMSNorm",
    "pytorch/attention/rope.py": "apply_rotary_pos_emb",
}
"""Where the package has what Megatron's layers call."""


@pytest.fixture(scope="module")
def walked(tmp_path_factory, request):
    """What the chosen cases find, and the fsdp backend for their models."""
    folder = tmp_path_factory.mktemp("engine")
    write_tiny(folder / "qwen3")
    write_tiny_moe(folder / "qwen3_moe", initializer_range=0.2)
    named = [item for item in request.session.items if item.path == request.path]
    chosen = {item.callspec.params["name"] for item in named if hasattr(item, "callspec")}
    models = {CASES[name][1] for name in chosen}
    found = walk_cases(folder, 1, {name: {"config": config(folder / name), "saved": ""} for name in models})
    for ranks in sorted({CASES[name][0] for name in chosen}):
        cases = {
            name: {"config": config(folder / model, own, options), "saved": found[model].file}
            for name, (own, model, options) in CASES.items()
            if name in chosen and own == ranks
        }
        found |= walk_cases(folder, ranks, cases, start=with_engine)
    return found


def with_engine(_: str, *arguments: str) -> subprocess.Popen:
    """A rank whose layers are the imaginary package's."""
    return subprocess.Popen([sys.executable, "-W", "ignore", str(HERE / "engine_ranks.py"), *arguments])


@needs_megatron
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else (pytest.mark.nightly,)) for name in CASES]
)
def test_layers_of_the_engine_learn_as_the_fsdp_backend_does(name, walked, relative_l2):
    found, fsdp = walked[name].tensors, walked[CASES[name][1]].tensors
    assert relative_l2(part(found, "gradient"), part(fsdp, "gradient")) < 1e-5
    assert relative_l2(part(found, "weights"), part(fsdp, "weights")) < 1e-5
    assert walked[name].resumed and walked[name].layout == walked[CASES[name][1]].layout
    assert set(walked[name].engine) == ({"Norm"} if name == "engine-off" else {"RMSNorm"})


@pytest.mark.nightly
def test_the_imaginary_package_has_the_signatures_of_the_real_one(tmp_path):
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path)]
    subprocess.run([*pip, f"transformer-engine=={VERSION}"], check=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    for path, name in SIGNED.items():
        real = zipfile.ZipFile(wheel).read(f"transformer_engine/{path}").decode()
        own = "pytorch/attention/rope.py" if name.islower() else "pytorch/__init__.py"
        signatures = _signatures(real, name)
        imaginary = _signatures((IMAGINARY / own).read_text(), name)
        assert {key: imaginary[key] for key in signatures} == signatures != {}  # a norm inherits its forward


def _signatures(source: str, name: str) -> dict[str, list[str]]:
    """Arguments of a function, or of a class's `__init__` and `forward`."""
    [found] = [node for node in ast.parse(source).body if getattr(node, "name", None) == name]
    functions = [found] if isinstance(found, ast.FunctionDef) else found.body
    return {
        each.name: [argument.arg for argument in each.args.args]
        for each in functions
        if isinstance(each, ast.FunctionDef) and each.name in ("__init__", "forward", name)
    }
