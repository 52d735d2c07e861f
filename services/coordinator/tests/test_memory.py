"""What the coordinator keeps of a run that has ended: a line in the list of ended runs, and nothing else."""

import gc
import types

from headrace_coordinator.data import dataset
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.domain import events as ev
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.serving import give_back_memory
from headrace_schema.sections.generating import DataSection
from scene import Scene, ends

PASSED_BY = (type, types.ModuleType, types.FunctionType, types.CodeType, types.BuiltinFunctionType)


def holders(root, text: str, *beside: object) -> list[str]:
    """Where `text` is below an object, but not below those `beside` it: the types on the way to each string with it."""
    found, seen = [], {id(each) for each in (root, *beside)}
    places = [(root, type(root).__name__)]
    for place, way in places:  # grows while it is walked
        for each in gc.get_referents(place):
            if isinstance(each, str) and text in each:
                found.append(f"{way} > {each[:80]}")
            elif id(each) not in seen and not isinstance(each, PASSED_BY):
                seen.add(id(each))
                places.append((each, f"{way} > {type(each).__name__}"))
    return found


class OneAfterTheOther(Scene):
    """Runs that follow each other; when all have been archived, looks at what is kept of the first."""

    async def watch(self, scene):
        self.name = await self.first()
        for number in range(2):
            await self.another(f"another {number}")

    async def _settle(self):
        await super()._settle()
        state = self.coordinator.event_log.state
        await self.until(lambda: len(state.ended) == 3 and not state.runs)
        await self.coordinator.event_log.flush()
        gc.collect()
        self.contexts = sum(isinstance(each, RunContext) for each in gc.get_objects())
        ended = state.ended.pop(self.name)
        # An Idempotency-Key is known for a day. What imaginary processes and their disk keep is not the coordinator's.
        imaginary = [*self.instances.values(), self.disk]
        self.kept = holders(self.coordinator, self.name, self, self.store, self.users, state.keys, *imaginary)
        state.ended[self.name] = ended


def test_nothing_of_a_run_stays_once_it_has_been_archived():
    scene = OneAfterTheOther(lambda scene: scene.watch(scene), steps=2)
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    assert len(scene.log(ev.RunArchived)) == 3
    assert not scene.contexts
    assert not scene.kept, "\n".join(scene.kept)


def test_what_ended_runs_had_is_freed_at_once_though_cycles_are_walked_seldom(monkeypatch):
    """The collector does not come by itself: `give_back_memory` is called when a run has ended, and frees it all."""
    scene = OneAfterTheOther(lambda scene: scene.watch(scene), steps=2)
    start, alive = scene.start_coordinator, []

    def given_back():
        give_back_memory()
        busy = len(scene.coordinator.scheduler.tasks)
        alive.append(sum(isinstance(each, RunContext) for each in gc.get_objects()) - busy)

    async def started():
        await start()
        scene.coordinator.scheduler.after_run = given_back

    monkeypatch.setattr(scene, "start_coordinator", started)
    gc.collect()
    gc.disable()
    try:
        ends(scene)
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_items_of_ended_runs_are_read_again(tmp_path):
    """They are kept between a run's check and its start, and not for ever."""
    file = tmp_path / "items.jsonl"
    file.write_text("".join(f'{{"question": "{n}=", "answer": "{n}"}}\n' for n in range(20)))
    dataset.forget_items()
    section = DataSection.model_validate({"source": "jsonl", "options": {"path": str(file)}, "heldout": 2})
    Dataset.open(section, 0)
    Dataset.open(section, 0)
    found = dataset._read.cache_info()
    assert (found.hits, found.currsize) == (1, 1)
    give_back_memory()
    assert not dataset._read.cache_info().currsize
