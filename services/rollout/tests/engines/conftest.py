"""One start of the engine a module: it takes up to a minute."""

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

from rig import CONTEXT, Rig, build, make_model, write_model  # noqa: E402


@pytest.fixture(scope="module")
def module_rig(tmp_path_factory) -> Iterator[Rig]:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("engine-model")
    model_a = write_model(directory, 1)
    section = ModelSection(path=str(directory), dtype="float32", max_context=CONTEXT)
    engine = build(section, load_tokenizer(section))
    yield Rig(engine, model_a, make_model(2))
    asyncio.run(engine.close())


@pytest.fixture
async def rig(module_rig) -> Rig:
    await module_rig.ready()
    return module_rig
