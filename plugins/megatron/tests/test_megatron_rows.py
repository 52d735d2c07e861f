"""Sequences lie one after another in one row, without padding, and each is computed as if it were alone."""

from __future__ import annotations

import itertools
import math
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends import build_backend
from headrace_trainer.learning.samples import Sample
from headrace_trainer.memory import Room, Rooms

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: make test-megatron"
)


def sample(length: int, seed: int) -> Sample:
    """One with an answer of its later half, whose last token is predicted and not read."""
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 16, (length + 1,), generator=made).tolist()
    trained = list(range(1 + length // 2, length + 1))
    return Sample(tokens, trained, [-1.0] * len(trained), [0.5 - seed % 3] * len(trained), 1.0)


UNEVEN = [[sample(length, seed)] for seed, length in enumerate([1, 40, 2, 7, 1, 130, 3])]


@pytest.fixture
def opened(make_config, trainer_group):
    """A backend with the tiny model, in fp32."""

    def build(name: str, **options):
        config = TrainerConfig.model_validate(
            make_config(trainer={"backend": name, "backend_options": options})
        )
        backend = build_backend(config, build_algorithm(config.algorithm), trainer_group)
        backend.load_initial()
        return backend

    return build


def test_rows_of_all_lengths_give_the_gradient_and_log_probs_of_the_fsdp_backend(opened, relative_l2):
    found = []
    for name in ("fsdp", "megatron"):
        backend = opened(name)
        log_probs = [each["old_log_probs"] for each in backend.infer(UNEVEN, ["old_log_probs"])]
        assert backend.micro(UNEVEN)
        found.append((log_probs, backend.reduced_gradient(7.0)))
    (expected, gradient), (log_probs, own) = found
    for one, other in zip(log_probs, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert relative_l2(own, gradient) < 1e-5


def test_no_token_is_computed_that_no_sequence_has(opened):
    backend = opened("megatron", pipeline_micro_batches=3)
    parts = backend._parts(UNEVEN)
    read = sum(len(row[0].tokens) - 1 for row in UNEVEN)
    assert sum(part.tokens_RL.numel() for part in parts) == read
    assert [part.tokens_RL.shape[0] for part in parts] == [1] * len(parts) and len(parts) > 1


def test_a_sequence_is_computed_as_if_it_were_alone(opened):
    backend = opened("megatron")
    together = [each["old_log_probs"] for each in backend.infer(UNEVEN, ["old_log_probs"])]
    for row, own in zip(UNEVEN, together, strict=True):
        [alone] = backend.infer([row], ["old_log_probs"])
        assert own == pytest.approx(alone["old_log_probs"], abs=1e-6)


def test_a_refused_micro_batch_leaves_what_those_before_it_have_added_up(opened, relative_l2):
    backend = opened("megatron", pipeline_micro_batches=4)
    assert backend.micro(UNEVEN[:3])
    expected = backend.reduced_gradient(1.0)
    assert backend.micro(UNEVEN[:3])
    broken = sample(5, 9)
    broken.advantages[0] = math.inf
    assert not backend.micro([*UNEVEN[3:], [broken]])  # four parts have gone backward before it
    found = backend.reduced_gradient(1.0)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert any(bool(value.any()) for value in found.values())


def test_the_planned_activations_are_those_that_are_kept(opened, monkeypatch):
    backend = opened("megatron")
    rows = [[sample(64, seed)] for seed in range(8)]  # the 512 tokens of trainer.micro_batch_tokens
    weights = {value.untyped_storage()._cdata for value in backend._model.shards.values().values()}
    kept: dict[int, torch.Tensor] = {}
    sizes = []

    def keep(tensor):
        if (storage := tensor.untyped_storage())._cdata not in weights:
            kept[storage._cdata] = tensor
        return tensor

    whole = backend._model.log_probs

    def log_probs(*arguments):
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
        return whole(*arguments)

    monkeypatch.setattr(backend._model, "log_probs", log_probs)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        assert backend.micro(rows)
    planned = backend.memory_plan(Rooms(Room("host memory", 0, 0), None)).host["activations"]
    assert planned == pytest.approx(sizes[0], rel=0.25)


@pytest.mark.parametrize(
    ("wanted", "why"), [("auto", "it is not installed"), ("off", "transformer_engine: off")]
)
def test_a_run_says_whose_layers_compute_and_how_ranks_are_divided(opened, wanted, why):
    backend = opened("megatron", transformer_engine=wanted)
    said = f"one rank; layers of Megatron's own, without Transformer Engine: {why}"
    assert backend.layout_chosen == said
    assert backend.memory_plan(Rooms(Room("host memory", 0, 0), None)).reason.startswith(
        f"{said}: a rank needs"
    )


def test_what_an_interrupted_backward_pass_has_left_is_dropped(opened, monkeypatch):
    backend = opened("megatron", pipeline_micro_batches=4)
    assert backend.micro(UNEVEN)
    expected = backend.reduced_gradient(1.0)
    whole, calls = backend._model.log_probs, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise torch.OutOfMemoryError
        return whole(*arguments)

    monkeypatch.setattr(backend._model, "log_probs", interrupted)
    with pytest.raises(torch.OutOfMemoryError):
        backend.micro(UNEVEN)
    monkeypatch.undo()
    backend.recover()
    assert backend.micro(UNEVEN)
    assert all(torch.equal(value, expected[name]) for name, value in backend.reduced_gradient(1.0).items())
    assert backend._pipeline.most_kept == 1


@pytest.mark.parametrize(("length", "ranks"), [(8, 2), (24, 3), (16, 4)])
def test_divided_rows_see_what_whole_ones_see(length, ranks):
    from headrace_megatron.gpt import context_places, divided_segments
    from headrace_trainer.learning.segments import Segment, Segments

    ends = [0, 1, length // 2 + 1, length - 1, length]
    whole = Segments.of([Segment(a, b, a) for a, b in itertools.pairwise(ends)])
    places = context_places(length, ranks).chunk(ranks)
    for rank in range(ranks):
        own = divided_segments(whole, ranks, rank)
        assert torch.equal(own.visible.dense(), whole.visible.dense()[places[rank]])


def test_rows_are_divided_into_parts_of_about_as_many_tokens():
    from headrace_megatron.models import divided_rows

    rows = [[SimpleNamespace(tokens=[0] * count)] for count in (9, 1, 1, 1, 9, 3)]
    assert [[len(row[0].tokens) for row in part] for part in divided_rows(rows, 3)] == [
        [9],
        [1, 1, 1],
        [9, 3],
    ]
    assert divided_rows([], 3) == []
