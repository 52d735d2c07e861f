"""What runs inside SGLang's schedulers: takes a version from a file of this host, by SGLang's own loader of the model.

SGLang imports `load_version` by name (`custom_weight_loader`). Names and fused layouts are mapped by the model's
`load_weights`. Knows no run and no version numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from headrace_modelkit.broadcasting import Broadcasts
from headrace_rollout.engines.hosted.files import LOADER_ERRORS, Ranks, Row, read_tensors, taken
from headrace_rollout.engines.hosted.relaying import listen
from torch import Tensor


def request_tensor(
    path: Path, rows: Sequence[Row], answers: Path, adapter: Mapping[str, Any] | None = None
) -> Tensor:
    """What travels in place of weights: where the file is, what lies in it, and where each process answers."""
    request = {"path": str(path), "entries": list(rows), "adapter": adapter, "answers": str(answers)}
    return torch.frombuffer(bytearray(json.dumps(request).encode()), dtype=torch.uint8)


def load_version(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Takes every tensor and writes {"problem"} to a file of this process.

    SGLang ends the whole engine on what a loader raises, so a problem is an answer, not an error.
    """
    request = json.loads(bytes(named_tensors[0][1].cpu().numpy()))
    problem = ""
    try:
        place = next(model.parameters()).device
        _listen(place)
        ranks = _ranks() if place.type == "cuda" else None
        _load(model, read_tensors(request["path"], request["entries"], request["adapter"], place, ranks))
    except LOADER_ERRORS as error:
        problem = f"{type(error).__name__}: {error}"
    answer = Path(request["answers"]) / f"{os.getpid()}.json"
    answer.write_text(json.dumps({"problem": problem}))


@cache
def _listen(place: torch.device) -> None:
    """Takes part in broadcasts from the second version on: SGLang imports this module with the first."""
    listen(Broadcasts(lambda: place))


def _ranks() -> Ranks:
    """The schedulers that divide the model's tensors."""
    from sglang.srt.distributed import get_tp_group

    found: Ranks = get_tp_group()
    return found


@torch.no_grad()
def _load(model: torch.nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    # SGLang's loaders skip names that they do not know and say nothing of parameters that got no tensor: what is not
    # a number afterwards was not taken.
    marked = {name: each for name, each in model.named_parameters() if each.is_floating_point()}
    for parameter in marked.values():
        parameter.fill_(float("nan"))
    load: Any = model.load_weights
    taken(load, tensors)
    missing = [name for name, parameter in marked.items() if bool(parameter.isnan().any())]
    if missing:
        raise ValueError(f"{len(missing)} parameters of the engine's model got no tensor, first {missing[0]}")
