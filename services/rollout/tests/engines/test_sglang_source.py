"""What SGLang gives back while it sleeps, by the source of the release that is installed."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from rig import ENGINES_HERE

pytestmark = pytest.mark.skipif(
    "sglang" not in ENGINES_HERE, reason="SGLang's source; see `make test-engines`"
)


def source(module: str) -> str:
    """Of a module of SGLang, which is not imported."""
    found = find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    return (Path(found.submodule_search_locations[0]) / f"{module.replace('.', '/')}.py").read_text()


def test_graphs_lie_where_they_can_be_released_and_all_that_is_released_comes_back():
    from headrace_rollout.engines.base import Scope
    from headrace_sglang.options import RELEASED_GRAPHS, WAKE_TAGS

    names = {
        each.targets[0].id: each.value.value
        for each in ast.parse(source("srt.constants")).body
        if isinstance(each, ast.Assign)
        and isinstance(each.targets[0], ast.Name)
        and isinstance(each.value, ast.Constant)
    }
    kinds = {value for name, value in names.items() if name.startswith("GPU_MEMORY_TYPE_")}
    assert kinds == {tag for tags in WAKE_TAGS.values() for tag in tags}
    assert list(WAKE_TAGS) == [Scope.WEIGHTS, Scope.KV_CACHE]
    ((variable, value),) = RELEASED_GRAPHS.items()
    assert value == "1"
    graphs = source("srt.model_executor.runner_backend.full_cuda_graph_backend")
    assert f'get_bool_env_var("{variable}")' in graphs and "tag=GPU_MEMORY_TYPE_CUDA_GRAPH" in graphs
    assert f"{variable} = EnvBool(False)" in source("srt.environ"), "it must be asked for"
    reduce = source("srt.distributed.device_communicators.custom_all_reduce")
    assert variable in reduce, "graphs that are released register no buffer with others"
