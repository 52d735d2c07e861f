"""One start of each engine for all tests: it takes up to a minute."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_schema.generating import ModelSection

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from rig import CONTEXT, ENGINES_HERE, Rig, build, make_model, write_model  # noqa: E402


@pytest.fixture(scope="session", params=ENGINES_HERE)
def shared_rig(request, tmp_path_factory) -> Iterator[Rig]:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("engine-model")
    model_a = write_model(directory, 1)
    section = ModelSection(path=str(directory), dtype="float32", max_context=CONTEXT)
    engine = build(request.param, section, load_tokenizer(section))
    yield Rig(request.param, engine, model_a, make_model(2))
    asyncio.run(engine.close())


@pytest.fixture
async def rig(shared_rig) -> Rig:
    await shared_rig.ready()
    return shared_rig
