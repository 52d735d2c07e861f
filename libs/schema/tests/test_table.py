"""Each row of the table refuses a spec that asks for both of its features, and none that asks for one."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from headrace_schema.evaluating import AnswerSection
from headrace_schema.problems import explain
from headrace_schema.rules.asked import EPISODES, RATIO_OPTIONS
from headrace_schema.rules.features import Feature, Resolved, value_at
from headrace_schema.rules.table import TABLE, Row, table_rows
from headrace_schema.sections.run import RunSections
from headrace_schema.spec import RunSpec
from headrace_schema.yaml_text import read_yaml
from pydantic import ValidationError

BASE: dict[str, Any] = {
    "model": {"path": "org/model"},
    "data": {"source": EPISODES},
    "reward": {"scorers": []},
}
OTHER_MODEL = {"path": "org/other"}
TASKS, LORA = {"environment.tasks": ["a.py:A"]}, {"trainer.lora": {}}
BACKEND, ENGINE = "trainer.backend_options", "rollout.engine_options"
STALE = {"algorithm.max_staleness": 1}
VALUES = read_yaml("""
workflow: agentic
deterministic: true
after: sft
from_checkpoint: {run: r-1}
model: {policy: {kind: mlp}, gguf_file: f, max_context: 9}
policies: {b: {}}
agent: {online: {}, python: "a.py:f", command: [a], backend: v}
environment:
  {alternating: 3, horizon: 8, reward: dense, stop_on_success: true, state: [x], cameras: {a: b},
   instructions: {a: b}, videos: {}, variants: {v: {}}, rewritten_turns: append, max_episode_s: 9.0,
   max_episode_tokens: 9, on_overflow: truncate, roles: {r: {}}}
data:
  {source: jsonl, prompt: {template: "{question}?", system: s, prefill: p, longest: 9, template_arguments: {a: 1}},
   exclude: [q], curriculum: {}, heldout: 4}
sampling:
  {stages: [{until_step: 1, max_new_tokens: 2}], temperature: 0.5, top_p: 0.5, top_k: 4, min_p: 0.1,
   repetition_penalty: 2.0, max_new_tokens: 5, stop: [x]}
algorithm:
  {max_staleness: 1, truncated: mask, options: {routing_replay: true, drop_equal: true, critic_path: x, top_k: 8,
   direction: forward, turns: all}}
trainer:
  {backend: megatron, helpers: 1, draft: {}, reference: {path: org/other}, shared_prefix: true, lora: {},
   warmup: {steps: 2, demonstrations: d}, backend_options: {compile: true, fp8: true, offload_activations: true,
   expert_parallel: 2, context_parallel: 2,
   virtual_stages: 2}}
rollout:
  {engine: vllm, helpers: 1, chunk_tokens: 4, install: drain, instances: 2, max_concurrency: 3, enable_lora: true,
   engine_options: {hosts: 2, speculative: {method: ngram}, engine_args: {enable_expert_parallel: true}}}
reward:
  {give: [tokens], pictures: 1, truncated_reward: 0.5, scorers: [{name: exact}], evaluation: [{name: exact}],
   stages: {s: [{name: exact}]}}
placement: {flow: pipelined, joint: {rollout: 0.5, simulator: 0.5}, simulator: "1", reward: "1", measure_steps: 3,
   rollout: "0"}
optimizer: {name: muon, momentum: 0.5, schedule: {name: cosine}}
session: {idle_s: 9}
evaluation:
  {every: 2, samples: 2, data: {x: {source: y}}, temperature: 0.5, max_new_tokens: 9, baseline_prefill: p}
""")
"""A value of each key that asks for it."""
ASKS: dict[str, dict[str, Any]] = {
    "language models": {"workflow": "reasoning"},
    "`placement.mode: auto`": {"placement.mode": "auto"},
    "`placement.mode` other than collocated": {"placement.mode": "hybrid"},
    "`algorithm.name` other than sft": {"algorithm.name": "grpo"},
    "`algorithm.name` other than ppo": {"algorithm.name": "grpo"},
    "`algorithm.name` other than dpo or ipo or simpo or orpo or kto": {"algorithm.name": "grpo"},
    "`algorithm.group_size` other than 1": {"algorithm.group_size": 4},
    "`algorithm.prompts_per_step` other than 1": {"algorithm.prompts_per_step": 4},
    "`algorithm.name` other than session": {"algorithm.name": "grpo"},
    "`workflow` other than session": {"workflow": "reasoning"},
    "`optimizer.name` other than muon": {"optimizer.name": "adamw"},
    "`placement.mode` other than collocated or disaggregated": {"placement.mode": "hybrid"},
    "`algorithm.group_size` other than 2": {"algorithm.group_size": 4},
    "`workflow` other than supervised": {"workflow": "reasoning"},
    "`workflow` other than preference": {"workflow": "reasoning"},
    "`workflow` other than reward_model": {"workflow": "reasoning"},
    "answers that the data gives, without `evaluation.data`": {"workflow": "supervised"},
    "`algorithm.name` other than bradley_terry or prm": {"algorithm.name": "grpo"},
    f"`algorithm.options`: {', '.join(RATIO_OPTIONS)}": {"algorithm.options.clip_low": 0.1},
    "`environment`": TASKS,
    "`rollout.install: in_flight or abort_and_resume`": {"rollout.install": "in_flight", **STALE},
    "answers that go on with a new version": STALE,
    "`placement.mode: auto` with `placement.measure_steps` above 0": {"placement.measure_steps": 3},
    "any placement but `disaggregated` without `share`": {},
    "named devices": {"placement": {"mode": "auto", "rollout": "0"}},
    "`placement.memory: resident` with `placement.mode: collocated or auto`": {
        "placement.memory": "resident"
    },
    "`trainer.ranks` or `max_ranks` above 1": {"trainer.ranks": 2},
    "`trainer.min_ranks` or `max_ranks` other than `ranks`": {"trainer.max_ranks": 2},
    "GPUs": {"@gpus": True},
    "`trainer.lora.quantization`": {"trainer.lora": {"quantization": "nf4"}},
    f"`{BACKEND}.shard_ranks` below `trainer.ranks`": {f"{BACKEND}.shard_ranks": 2, "trainer.ranks": 4},
    "`algorithm.options` of a critic that is a head": {},
    "`algorithm.options` of one optimizer step a commit": {},
    "no KL term": {},
    "`trainer.lora` with `workflow: embodied`": {**LORA, "workflow": "embodied"},
    "policies with another model, or without `trainer.lora`": {
        **LORA,
        "policies": {"b": {"model": OTHER_MODEL}},
    },
    "adapters that are published alone": LORA,
    "`policies.NAME.own_devices`": {"policies": {"b": {"own_devices": True}}},
    "a quantised engine": {f"{ENGINE}.quantization": "fp8"},
    "a model without experts": {"@plain": True},
    "an evaluation's `sampling.top_p`, `top_k` or `min_p`": {"@asked": AnswerSection(min_p=0.1)},
    "an evaluation's `sampling.top_p` with `top_k` or `min_p`": {"@asked": AnswerSection(top_p=0.5, top_k=2)},
    "an evaluation's `sampling.repetition_penalty`": {"@asked": AnswerSection(repetition_penalty=2)},
    "images": {"@images": "the data has images"},
    "images in the data": {"@images": "the data has images", "@in_data": True},
    "a local model of a family whose images are not read": {"@blind": {"model.path": "qwen2"}},
    "`placement.flow` other than sequential with `placement.mode: disaggregated`": {
        "placement.mode": "disaggregated",
        "placement.flow": "pipelined",
    },
}
"""What asks for a feature that no single key of `VALUES` does."""
UNDO: dict[str, dict[str, Any]] = {
    "language models": {"workflow": "embodied"},
    "`workflow` other than supervised": {"workflow": "supervised"},
    "`placement.mode` other than collocated": {"placement.mode": "collocated"},
    "`workflow` other than preference": {"workflow": "preference"},
    "`algorithm.name` other than sft": {"algorithm.name": "sft"},
    "`algorithm.name` other than ppo": {"algorithm.name": "ppo"},
    "`algorithm.name` other than dpo or ipo or simpo or orpo or kto": {"algorithm.name": "dpo"},
    "`workflow` other than reward_model": {"workflow": "reward_model"},
    "`algorithm.name` other than bradley_terry or prm": {"algorithm.name": "prm"},
    "`algorithm.group_size` other than 1": {"algorithm.group_size": 1},
    "`algorithm.group_size` other than 2": {"algorithm.group_size": 2},
    "`algorithm.prompts_per_step` other than 1": {"algorithm.prompts_per_step": 1},
    "`algorithm.name` other than session": {"algorithm.name": "session"},
    "`workflow` other than session": {"workflow": "session"},
    "`optimizer.name` other than muon": {"optimizer.name": "muon"},
    "`placement.mode` other than collocated or disaggregated": {"placement.mode": "collocated"},
    "`workflow` other than embodied": {"workflow": "embodied"},
    "`workflow` other than embodied or agentic": {"workflow": "agentic"},
    "`workflow` other than agentic": {"workflow": "agentic"},
    "no `environment` with no `agent.online`": TASKS,
    "`algorithm.max_staleness: 0`": STALE,
    "`placement.mode: auto`": {"placement.mode": "disaggregated"},
    "any placement but `disaggregated` without `share`": {"placement.mode": "disaggregated"},
    "`trainer.warmup.steps: 0`": {"trainer.warmup.steps": 2},
    "`algorithm.options` of a critic that is a head": {"algorithm.options.critic": "model"},
    "`algorithm.options` of one optimizer step a commit": {"algorithm.options.epochs": 2},
    "no `trainer.reference`": {"trainer.reference": OTHER_MODEL},
    "no `algorithm.options.top_k`": {"algorithm.options.top_k": 8},
    "no KL term": {"algorithm.options.kl_loss_coef": 0.1},
    "no `trainer.warmup.steps` with no `algorithm.options.demonstrations_share`": {"trainer.warmup.steps": 2},
    "no `trainer.warmup.demonstrations` with `workflow: embodied`": {"trainer.warmup.demonstrations": "d"},
    "no `trainer.lora`": LORA,
    "no `data.heldout`": {"data.heldout": 4},
    "no `data.heldout` with no `evaluation.data`": {"data.heldout": 4},
    "`evaluation.greedy: true`": {"evaluation.greedy": False},
    f"`{BACKEND}.tensor_parallel: 1`": {f"{BACKEND}.tensor_parallel": 2},
    f"`{BACKEND}.pipeline_parallel: 1`": {f"{BACKEND}.pipeline_parallel": 2},
}
"""What a spec is without a feature by, where leaving out what asks for it is not enough."""


def asks(feature: Feature) -> dict[str, Any]:
    """Values by key that ask for a feature; keys that begin with @ are facts of the fleet."""
    if feature.said in ASKS:
        return ASKS[feature.said]
    if feature.needs:
        sort = next(sort for sort in ("engine", "backend", "algorithm") if sort in feature.said)
        where = {"engine": "rollout.engine", "backend": "trainer.backend"}.get(sort, sort)
        return {"@instead": {f"{where}:{feature.needs}": ["able"]}}
    found: dict[str, Any] = {}
    for part in feature.said.split(" with "):
        path, colon, given = part.removeprefix("no ").strip("`").partition("` ")[0].partition(": ")
        if part.startswith("no ") or part in UNDO:
            continue
        word = given.strip("`").partition(" or ")[0]
        plain = {"true": True, "false": False, "0": 0, "1": 1}
        found |= {path: plain.get(word, word) if colon else value_at(VALUES, path)}
    return found


def resolved(values: dict[str, Any]) -> tuple[Resolved, dict[str, Any]]:
    """A run of values at dotted paths, and its document."""
    spec = deepcopy(BASE)
    if any(key.startswith("environment.") for key in values):
        values = {**TASKS, **values}
    for key, value in sorted(values.items()):
        *parents, last = key.split(".")
        place = spec
        for name in parents if not key.startswith("@") else ():
            place = place.setdefault(name, {})
        if not key.startswith("@"):
            place[last] = deepcopy(value)
    if "policy" in spec["model"]:
        spec["model"].pop("path")
    facts = {key[1:]: value for key, value in values.items() if key.startswith("@")}
    return replace(Resolved(RunSections.model_validate(spec)), engine="other", **facts), spec


@pytest.mark.parametrize("row", TABLE, ids=[f"{row.what.said} / {row.beside.said}" for row in TABLE])
def test_a_row_refuses_both_of_its_features_and_neither_alone(row: Row):
    values = {**asks(row.beside), **asks(row.what)}
    run, document = resolved(values)
    found = list(row.problems(run))
    assert found, values
    assert all(each.problem and each.fix and "{" not in each.problem + each.fix for each in found), found
    if not any(key.startswith("@") for key in values):
        with pytest.raises(ValidationError) as caught:
            RunSpec.model_validate(document)
        assert {each.key for each in found} <= {each.key for each in explain(caught.value, RunSpec)}
    for alone, other in ((row.what, row.beside), (row.beside, row.what)):
        kept, without = asks(alone), UNDO.get(other.said, {})
        assert not list(row.problems(resolved({**kept, **without})[0])), (alone.said, without)


def test_the_page_shows_each_row_without_places_for_values():
    shown = list(table_rows())
    assert len(shown) == len(TABLE)
    assert not [row for row in shown if "{" in "".join(row) or not row[3]]
