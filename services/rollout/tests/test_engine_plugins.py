"""Engines of other packages: what one may leave out, and what it is refused for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from headrace.rollout.v1 import rollout_pb2
from headrace_rollout.engines.base import Engine
from headrace_rollout.engines.contract import OPTIONAL, check_engine, missing_members
from headrace_rollout.engines.plugins import TRANSFORMERS
from rollout_calls import HEADER, refused


class Older:
    """The built-in engine as a release before some member existed had it."""

    def __init__(self, inner, lacks):
        self._inner, self._lacks = inner, lacks

    def __getattr__(self, name):
        if name in self._lacks:
            raise AttributeError(name)
        return getattr(self._inner, name)


@pytest.fixture
def engine_without(monkeypatch):
    """Lets the built-in engine be built without some of its members."""
    build = TRANSFORMERS.factory()

    def older(*lacks):
        other = replace(TRANSFORMERS, build=lambda *given: Older(build(*given), lacks))
        monkeypatch.setattr("headrace_rollout.engines.plugins.TRANSFORMERS", other)

    return older


async def test_an_engine_made_before_prefills_answers_without_them(
    engine_without, new_rollout, tiny_directory, publish, reference, assignments
):
    engine_without("prefills")
    rollout = await new_rollout()
    await rollout.open(tiny_directory, max_concurrency=16)
    await rollout.install(publish(reference, 1))
    call = await rollout.generate(assignments).start()
    assert len(await call.read_all()) == 12 and not call.prefills


async def test_an_engine_that_lacks_more_is_refused_as_the_run_opens(
    engine_without, new_rollout, tiny_directory
):
    engine_without("waiting_samples", "score")
    rollout = await new_rollout()
    config = {"model": {"path": str(tiny_directory), "dtype": "float32"}}
    request = rollout_pb2.OpenRunRequest(header=HEADER, config_json=json.dumps(config))
    words = ("rollout.engine", "no score, waiting_samples", "engines.contract.check_engine")
    await refused(rollout.stub.OpenRun(request), "INVALID", *words)


def test_a_plug_ins_test_hears_what_its_engine_lacks():
    assert missing_members(object()) == missing_members(Older(object(), ()))
    assert {"submit", "install", "capabilities", "max_context_tokens"} <= {*missing_members(object())}
    assert {*dir(Engine)} >= OPTIONAL and not OPTIONAL & {*missing_members(object())}
    with pytest.raises(AssertionError, match="object lacks abort, "):
        check_engine(object())


async def test_the_built_in_engine_lacks_nothing(engine):
    check_engine(engine)
