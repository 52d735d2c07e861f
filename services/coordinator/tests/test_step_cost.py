"""What a step of a run costs the coordinator beside what it is for: counted, not timed."""

from headrace_coordinator.data.packed import PackedItems
from headrace_coordinator.domain import events as ev
from scene import Scene, ends

GROUPS, SIZE, STEPS = 3, 16, 4


async def nothing(scene):
    """No trouble."""


def test_an_item_is_unpacked_for_its_group_and_not_for_each_trajectory(monkeypatch):
    """For each part of it that arrives together, as it is handed out, and as it is shown."""
    unpack, unpacked = PackedItems.__getitem__, []

    def counted(items, number):
        unpacked.append(number)
        return unpack(items, number)

    monkeypatch.setattr(PackedItems, "__getitem__", counted)
    scene = Scene(
        nothing,
        steps=STEPS,
        algorithm={"prompts_per_step": GROUPS, "group_size": SIZE, "options": {}},
        placement={"flow": None, "memory": None, "share": False},
    )
    ends(scene)
    steps = len(scene.log(ev.StepCommitted))
    assert steps == STEPS
    assert (
        len(unpacked) / steps / GROUPS < 2 * SIZE
    )  # as its rewards, its length and its line each did: above 5 times
