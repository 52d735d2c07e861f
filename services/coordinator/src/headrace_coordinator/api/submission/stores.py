"""What a store says of a spec's addresses: whether models are there, copies can be written, a run's checkpoints found.

All of it is asked in processes of their own, with a deadline. Data are opened elsewhere, by who reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import Impossible, problem
from headrace_schema.resources.views import CheckpointView, KeyProblemView, PolicyView, RunView
from headrace_schema.spec import RunSpec
from headrace_schema.stores import checked, remote_paths
from headrace_servicekit.stores.problems import StoreProblem
from headrace_servicekit.stores.process import asked_once

from headrace_coordinator.api.submission.submission import Origin

ANSWER_S = 45.0
"""Longest time that a submission waits for a store's answer to one question."""
MODELS = ("path", "critic_path", "model")
"""Last words of keys that name a model."""
_DATA = ("data.", "evaluation.data.")
_NO_MODELS = ("reward.", "environment.options.", "environment.variants.", "agent.options.")
"""Sections whose `path` and `model` may be anything."""


async def check_stores(asked: RunSpec | EvaluationSpec) -> list[KeyProblemView]:
    """Models that are not in their stores, and a `store` that takes no copies; by key."""
    named = {
        key: url
        for key, url in remote_paths(asked.model_dump(mode="json"))
        if not key.startswith(_DATA) and key != "from_checkpoint.run"
    }
    checks: list[Awaitable[list[KeyProblemView]]] = [_look(key, url) for key, url in named.items()]
    if isinstance(asked, RunSpec) and asked.store is not None:
        checks.append(_probe(asked.store.url))
    return [each for found in await asyncio.gather(*checks) for each in found]


async def _look(key: str, url: str) -> list[KeyProblemView]:
    try:
        names = await asked_once(checked(url), "look", ANSWER_S)
    except StoreProblem as found:
        return [problem(key, found.reason, found.fix)]
    except ValueError as error:
        return [problem(key, str(error), "correct the address")]
    is_model = key.rpartition(".")[2] in MODELS and not key.startswith(_NO_MODELS)
    return [*_no_model(key, url, names)] if is_model else []


def _no_model(key: str, url: str, names: Sequence[str]) -> Iterator[KeyProblemView]:
    here = {name for name in names if "/" not in name}
    if "policy.json" in here or any(name.endswith(".gguf") for name in here):
        return
    weights = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in here)
    missing = "config.json" if "config.json" not in here else "" if weights else "safetensors weights"
    if missing:
        inside = sorted(str(PurePosixPath(name).parent) for name in names if name.endswith("/config.json"))
        fix = (
            f"did you mean {url.rstrip('/')}/{inside[0]}?"
            if inside
            else "name a folder in Hugging Face format"
        )
        yield problem(key, f"{url} is no model directory: it has no {missing}", fix)


async def _probe(url: str) -> list[KeyProblemView]:
    try:
        await asked_once(url, "probe", ANSWER_S)
    except StoreProblem as found:
        return [problem("store.url", found.reason, found.fix)]
    return []


async def remote_origin(url: str, key: str) -> Origin:
    """A run whose checkpoints a store has, as the one that a spec forks. Raises `Impossible`."""
    try:
        live: list[dict[str, Any]] = await asked_once(url, "live", ANSWER_S)
        if not live:
            reason = f"{url} holds no whole checkpoint of a run"
            raise Impossible(
                [problem(key, reason, "name URL/RUN, which the address of a checkpoint begins with")]
            )
        said = await asked_once(url, "description", ANSWER_S)
    except StoreProblem as found:
        raise Impossible([problem(key, found.reason, found.fix)]) from found
    run = RunView.model_construct(id=said["run"], state="SUCCEEDED", spec=said["spec"])
    checkpoints = [
        CheckpointView(
            name=each["name"],
            version=PolicyView(number=each["number"], parent=0, ordinal=each["step"], digest=""),
            step=each["step"],
            size_bytes=sum(facts["size"] for facts in each["files"].values()),
        )
        for each in live
    ]
    return Origin(url, run, checkpoints=checkpoints)
