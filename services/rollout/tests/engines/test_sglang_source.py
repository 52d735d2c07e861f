"""What SGLang gives back while it sleeps, by the source of the release that is installed."""

from __future__ import annotations

import ast
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


def named(module: str) -> dict[str, Any]:
    """What a module of SGLang gives names to, as far as it stands there in letters and numbers."""
    found = {}
    for each in ast.parse(source(module)).body:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            with suppress(ValueError):
                found[each.targets[0].id] = ast.literal_eval(each.value)
    return found


def body_of(module: str, name: str) -> str:
    """The source of a function or class of a module of SGLang."""
    (found,) = [each for each in ast.walk(ast.parse(source(module))) if getattr(each, "name", "") == name]
    return ast.unparse(found)


def test_what_batch_invariance_asks_for_is_an_argument_and_one_of_its_choices():
    from headrace_sglang.options import FIXED_ARGUMENTS, INVARIANT, OWN_ARGUMENTS

    fields = {
        each.target.id: ast.unparse(each)
        for each in ast.walk(ast.parse(source("srt.arg_groups.fields.exec_")))
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    order = named("srt.arg_groups.field_order")
    assert INVARIANT.keys() <= fields.keys()
    assert any(INVARIANT.keys() <= set(names) for names in order.values() if isinstance(names, (tuple, list)))
    assert "A[bool," in fields["enable_deterministic_inference"]
    assert "choices=RL_ON_POLICY_TARGET_CHOICES" in fields["rl_on_policy_target"]
    assert INVARIANT["rl_on_policy_target"] in named("srt.arg_groups.choices")["RL_ON_POLICY_TARGET_CHOICES"]
    assert not INVARIANT.keys() - {*FIXED_ARGUMENTS, *OWN_ARGUMENTS}, "engine_args set nothing against it"


def test_batch_invariance_changes_the_kernels_that_it_is_asked_for():
    settles = body_of("srt.arg_groups.attention_hook", "handle_deterministic_inference")
    assert "cfg.rl_on_policy_target is not None" in settles
    assert "enable_deterministic_inference=True" in settles
    assert "allreduce:tree" in settles, "sums over tensor parallel ranks have one order"
    assert "'pytorch'" in body_of("srt.arg_groups.overrides", "_deterministic_sampling_backend")
    assert 'rl_on_policy_target == "fsdp"' in source("srt.layers.layernorm")
    sampler = source("srt.layers.sampler")
    assert "self.use_log_softmax_logprob = self.rl_on_policy_target is not None" in sampler
    for family in ("qwen2", "qwen3"):
        assert "rl_on_policy_target is not None" in source(f"srt.models.{family}"), "as transformers rounds"


def test_the_table_of_families_says_which_classes_it_has():
    from headrace_modelkit.families.known import KNOWN
    from headrace_modelkit.presets.families import class_of
    from transformers import CONFIG_MAPPING

    found = find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    listed: set[str] = set()
    for file in (Path(found.submodule_search_locations[0]) / "srt" / "models").rglob("*.py"):
        for each in ast.parse(file.read_text()).body:
            if isinstance(each, ast.Assign) and getattr(each.targets[0], "id", "") == "EntryClass":
                listed |= {name.id for name in ast.walk(each.value) if isinstance(name, ast.Name)}
    here = [family for family in KNOWN if family.partition("+")[0] in CONFIG_MAPPING]  # of its transformers
    assert len(here) > 40
    has = {family: class_of(family) in listed for family in here}
    assert has == {family: KNOWN[family].sglang for family in here}
