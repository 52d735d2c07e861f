"""A version with a value that is no number is named, and leaves nothing behind."""

from __future__ import annotations

import math

import pytest
import torch
from headrace_modelkit.weights import CheckpointNames
from headrace_servicekit.rpc import digests
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.versions import check_body
from headrace_trainer.backends.fsdp.loading import HostCopies
from headrace_trainer.backends.shared.casting import CAST_ELEMENTS
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.step import Version
from headrace_trainer.versions.parts import RankPart, owners_of, staged_parts
from headrace_trainer.versions.publishing import Publisher, Unread

LAYOUT = [("embed", "bfloat16", (3, CAST_ELEMENTS)), ("head", "bfloat16", (7,)), ("seen", "int64", ())]


def weights(**changed):
    found = {"embed": torch.ones(3, CAST_ELEMENTS), "head": torch.ones(7), "seen": torch.tensor(1)}
    return iter({**found, **changed}.items())


@pytest.fixture
def store(tmp_path):
    made = WeightStore(tmp_path / "shm", "trainer")
    yield made
    made.close()


def test_a_tensor_with_nan_is_named_and_the_version_before_stays(store):
    publisher = Publisher(store, "runs/r", LAYOUT)
    publisher.stage(1, weights())
    publisher.publish(Version(1, 0, 0, ""))
    spoilt = torch.ones(3, CAST_ELEMENTS)
    spoilt[2, 5] = spoilt[2, 6] = math.nan
    with pytest.raises(Refusal, match=r"tensor embed has 2 NaN") as caught:
        publisher.stage(2, weights(embed=spoilt))
    assert caught.value.reason == "NONFINITE_WEIGHTS"
    assert store.find("runs/r", 1) and store.find("runs/r", 2) is None
    assert len(list(store.directory.glob("*.weights"))) == 1
    publisher.stage(3, weights(head=torch.tensor([math.inf, -math.inf, 1, 1, 1, 1, 1])))
    publisher.publish(Version(3, 1, 1, ""))
    assert store.find("runs/r", 3)


def test_several_threads_write_the_bytes_and_digests_that_one_does(store, monkeypatch):
    wide = torch.randn(3, 5 * CAST_ELEMENTS + 7)
    layout = [("wide", "bfloat16", tuple(wide.shape)), ("head", "float32", (7,)), ("empty", "float32", (0,))]
    found, before = [], torch.get_num_threads()
    for number, threads in enumerate((1, 3), 1):
        monkeypatch.setattr(digests, "own_threads", lambda threads=threads: threads)
        publisher = Publisher(store, f"runs/{threads}", layout)
        given = {"wide": wide, "head": torch.arange(7.0), "empty": torch.empty(0)}
        publisher.stage(number, iter(given.items()))
        stored = publisher.publish(Version(number, 0, 0, ""))
        check_body(stored.body, stored.manifest)
        assert torch.frombuffer(bytearray(stored.body[: 2 * wide.numel()]), dtype=torch.bfloat16).equal(
            wide.bfloat16().flatten()
        )
        found.append([entry.digest for entry in stored.manifest.entries])
    assert found[0] == found[1] and torch.get_num_threads() == before


def test_a_version_that_nobody_takes_has_its_digest_and_no_bytes(store):
    wide = torch.randn(3, 5 * CAST_ELEMENTS + 7)
    layout = [("wide", "bfloat16", tuple(wide.shape)), ("head", "float32", (7,)), ("empty", "float32", (0,))]
    given = {"wide": wide, "head": torch.arange(7.0), "empty": torch.empty(0)}
    publisher, unread = Publisher(store, "runs/r", layout), Unread(layout, CheckpointNames({}))
    digest = publisher.stage(1, iter(given.items()))
    manifest = publisher.publish(Version(1, 0, 0, "")).manifest
    before = len(list(store.directory.glob("*.weights")))
    assert unread.stage(1, iter(given.items())) == digest
    assert unread.publish(Version(1, 0, 0, "")) == manifest
    with pytest.raises(Refusal, match="version 2 is not staged"):
        unread.publish(Version(2, 1, 1, ""))
    with pytest.raises(Refusal, match=r"tensor head has 1 NaN"):
        unread.stage(2, iter({**given, "head": torch.full((7,), math.nan)[:1]}.items()))
    assert len(list(store.directory.glob("*.weights"))) == before


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
async def test_a_run_whose_versions_nobody_takes_keeps_none(client, make_config, tmp_path, lora):
    configs = {each: make_config(installed=each, trainer={"lora": lora}) for each in (True, False)}

    async def held(version):
        published = await client.publish(version.number)
        assert published.version.digest == published.manifest.digest == version.digest
        return sum(file.stat().st_size for file in (tmp_path / "shm").rglob("*.weights"))

    taken = (await client.open(configs[True])).version
    assert await held(taken) > 0
    unread = await client.reopen_with(configs[False])
    assert unread.digest == taken.digest and await held(unread) == 0


def test_a_part_with_nan_is_named_with_its_rank_once_the_others_have_theirs(store):
    class Gathering:
        def weight_layout(self):
            return LAYOUT

        def weights(self, *, published, owners):
            assert published and owners == {"embed": 0, "head": 1, "seen": 1}
            yield "embed", torch.full((3, CAST_ELEMENTS), math.nan)
            asked.append("the rest")

    asked, part = [], RankPart(store, "runs/r", 0, 2)
    with pytest.raises(Refusal, match="tensor embed") as caught:
        part.stage(Gathering(), lambda: CheckpointNames({}), 1)
    assert asked == ["the rest"]
    answers = [("", "", b""), (caught.value.reason, caught.value.message, b"")]
    with pytest.raises(Refusal, match="rank 1: tensor embed") as told:
        staged_parts(answers)
    assert told.value.reason == "NONFINITE_WEIGHTS" and not list(store.directory.glob("*.weights"))


def test_ranks_own_tensors_that_follow_each_other_and_take_turns():
    sizes = [7, 1, 1, 9, 4, 4, 4, 2]
    layout = [(f"w{index}", "bfloat16", (size, 3)) for index, size in enumerate(sizes)]
    owners = owners_of(layout, 3)
    in_body = [owners[name] for name, _, _ in layout]
    assert in_body == sorted(in_body) and set(in_body) == {0, 1, 2}
    assert list(owners.values())[:3] == [0, 1, 2]
    assert set(owners_of(layout[:2], 4).values()) < {0, 1, 2, 3}, "a rank may have none"


def test_a_copy_on_the_host_holds_while_the_next_one_comes():
    """On the CPU: a GPU's events and pinned memory have not run."""
    tensors = [(str(i), torch.full((10 - i, 3), i, dtype=torch.bfloat16)) for i in range(6)]
    tensors.append(("last", torch.tensor(7)))
    copies, asked = HostCopies(torch.device("cpu")), []
    for repetition in range(2):
        before = None
        watched = ((asked.append(name) or name, tensor) for name, tensor in tensors)
        for (name, copy), (wanted, tensor) in zip(copies.of(watched), tensors, strict=True):
            assert name == wanted and torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr()
            assert name == "last" or len(asked) - repetition * len(tensors) == int(name) + 2
            assert before is None or before.data_ptr() != copy.data_ptr()
            before = copy
    assert list(copies.of([])) == []


def test_two_versions_are_in_memory_at_most_also_while_the_next_one_is_cast(store):
    """A third one's room is a 30B model's 61 GB; what a reader still maps stays as it is."""
    publisher, body = Publisher(store, "runs/r", LAYOUT), 2 * (3 * CAST_ELEMENTS + 7) + 8

    def in_memory():
        return sum(file.stat().st_size for file in store.directory.iterdir() if file.stat().st_size >= body)

    def watched(number):
        for name, tensor in weights(head=torch.full((7,), float(number))):
            most.append(in_memory())
            yield name, tensor

    most: list[int] = []
    for number in range(1, 6):
        publisher.stage(number, watched(number))
        assert number == 1 or store.find("runs/r", number - 1), (
            "the current one is there until it is replaced"
        )
        publisher.publish(Version(number, number - 1, number, ""))
        most.append(in_memory())
    assert body <= max(most) < 2.1 * body
    mapped = store.get("runs/r", 5).body
    before = bytes(mapped[:64])
    publisher.stage(6, watched(6))
    publisher.publish(Version(6, 5, 6, ""))
    publisher.stage(7, watched(7))
    assert store.find("runs/r", 5) is None and bytes(mapped[:64]) == before
