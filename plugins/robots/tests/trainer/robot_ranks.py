"""One rank of a large robot policy that goes through a list of cases: `python robot_ranks.py JOB.json RANK`.

What rank 0 finds is written to FOLDER/NAME.json and .safetensors, which a later case may resume.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from headrace_robots.policies.directory import initial_policy
from headrace_robots.policies.policy import ACTIONS, Observation
from headrace_robots.trainer.backend.episodes import Chunks
from headrace_robots.trainer.backend.whole import WholeRobot
from headrace_schema.openings import TrainerConfig
from headrace_trainer.group.forming import join_trainer_group
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.samples import (
    CreditData,
    EpisodeData,
    EpisodeScores,
    LentPictures,
    Packed,
    packed,
)
from headrace_trainer.workloads import run_kind
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "services" / "trainer" / "tests"))

from backend_ranks import MEET_S, SavedState, meeting_place, same
from state_parts import whole_state

LENGTHS = (3, 1, 2)
"""Chunks of the episodes: with two ranks, one has four and the other has one."""
PICTURE, DENOMINATOR, RATE = 20, 5.0, 1e-3


class Saved(SavedState):
    """A checkpoint in one file, with adapters."""

    def tensor(self, name: str) -> torch.Tensor:
        return self._file.read(name)

    def adapter(self, name: str, box: Any = None) -> torch.Tensor:
        return self._file.read(f"moments/adapter/{name}", box)

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        names = [name for name in self._file.names() if name.startswith("moments/adapter/")]
        return {name.removeprefix("moments/adapter/"): self._file.shape(name) for name in names}

    def moment_kinds(self) -> set[str]:
        return super().moment_kinds() - {"adapter"}


class Walk:
    """One case on one rank."""

    def __init__(self, case: dict[str, Any], group: TrainerGroup) -> None:
        config = TrainerConfig.model_validate(case["config"])
        kind = run_kind(config)
        algorithm = kind.check()
        self.group = group
        self.backend: Any = (
            WholeRobot(config, algorithm, group) if case["whole"] else kind.backend(algorithm, group)
        )
        self.policy: Any = initial_policy(config.model, config.seed)
        self.tensors: dict[str, torch.Tensor] = {}
        self.figures: dict[str, Any] = {"norms": [], "log_probs": {}}

    def chunks(self, count: int, seed: int) -> Chunks:
        generator = torch.Generator().manual_seed(seed)
        pictures = torch.randint(0, 256, (count, PICTURE, PICTURE, 3), generator=generator, dtype=torch.uint8)
        states = torch.randn(count, 2, generator=generator)
        images = {camera: pictures.flip(place) for place, camera in enumerate(self.policy.config.cameras)}
        seen = Observation(states, images, ((1, 5, 6),) * count)
        drawn = self.policy.act(seen, range(seed * 100, seed * 100 + count))
        return Chunks(seen, drawn.sampled, drawn.valid_BC)

    def episodes(self) -> list[EpisodeData]:
        found = []
        for key, count in enumerate(LENGTHS):
            own = self.chunks(count, key)
            seen = {"state": own.observation.state_BS}
            seen |= {f"image/{name}": image for name, image in own.observation.images.items()}
            arrays = {name: value.numpy() for name, value in seen.items()}
            final = {name: value[-1] for name, value in arrays.items()} if key == 0 else {}
            sampled = {name: value.numpy() for name, value in own.sampled.items()}
            valid = Packed.of(own.valid_NC.numpy())
            prompt = list(own.observation.prompts[0])
            found.append(EpisodeData((0, key), prompt, packed(arrays), packed(sampled), valid, packed(final)))
        return found

    def learn(self) -> None:
        backend, episodes, ranks = self.backend, self.episodes(), self.group.world_size
        own = [*range(self.group.rank, len(episodes), ranks)]
        given = [data if key in own else data.without_pictures() for key, data in enumerate(episodes)]
        scores = backend.read(given, own)
        bodies = self.group.gather(msgspec.msgpack.encode(scores))
        each = [own for body in bodies for own in msgspec.msgpack.decode(body, type=list[EpisodeScores])]
        by_key = {own.key: own for own in each}
        self.figures["finals"] = [by_key[data.key].final_value for data in episodes]
        count, shape = sum(LENGTHS), (sum(LENGTHS), self.policy.chunk_length, self.policy.action_size)
        rng = np.random.default_rng(0)
        old = np.concatenate([by_key[data.key].log_probs_TCA.array() for data in episodes])
        self.figures["log_probs"] = old.tolist()
        numbers = {
            "old_log_probs_NCA": old.reshape(shape),
            "engine_log_probs_NCA": old.reshape(shape),
            "values_N": np.zeros(count),
            "advantages": rng.standard_normal(shape[:2]),
            "mask_NC": np.ones(shape[:2], np.bool_),
            "weights_N": np.ones(count),
            "returns_N": rng.standard_normal(count),
        }
        backend.credit(
            CreditData(
                [data.key for data in episodes], **{name: Packed.of(value) for name, value in numbers.items()}
            )
        )
        # The second rank has fewer passes than the first, of a micro-batch of one or two chunks; 5 is not its own.
        shares = [[0, 1, 2, 4], [3, 5]] if ranks == 2 else [list(range(count))]
        places = [(key, place) for key, length in enumerate(LENGTHS) for place in range(length)]
        lent = [chunk for chunk in shares[backend.replica] if places[chunk][0] not in own]
        seen = [(episodes[places[chunk][0]].observation, places[chunk][1]) for chunk in lent]
        cameras = [f"image/{camera}" for camera in self.policy.config.cameras] if lent else []
        pictures = {name: np.stack([one[name].array()[place] for one, place in seen]) for name in cameras}
        assert backend.learn(shares[backend.replica], LentPictures(lent, packed(pictures)))

    def commit(self) -> None:
        self.learn()
        assert self.backend.gradient_is_finite()
        self.figures["norms"].append(self.backend.commit(DENOMINATOR, RATE).grad_norm)
        self.backend.end_episodes(learned=True)

    def state(self) -> dict[str, torch.Tensor]:
        saved = whole_state(self.group, self.backend.weight_parts())
        weights = {name: value.clone() for name, value in self.backend.weights()}
        assert not self.group.leads or same(saved, weights)
        moments = whole_state(self.group, self.backend.moment_parts())
        named = {f"weights/{name}": value for name, value in saved.items()}
        return named | {f"moments/{name}": value for name, value in moments.items()}

    def imitate(self) -> None:
        shown = self.chunks(sum(LENGTHS), 7)
        torch.manual_seed(0)
        actions = torch.rand((sum(LENGTHS), self.policy.horizon, self.policy.action_size)) * 2 - 1
        everywhere = torch.ones(actions.shape[:2], dtype=torch.bool)
        chunks = Chunks(shown.observation, {ACTIONS: actions}, everywhere)
        self.figures["imitated"] = [self.backend._imitate(chunks, step) for step in range(2)]

    def go(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.backend.load_initial()
        if case.get("resumes"):
            reader = Saved(Path(case["resumes"]))
            self.backend.check_state(reader)
            self.backend.load_state(reader if self.group.leads else None)
            before = self.state()
            self.figures["resumed"] = [name for name in before if not before[name].equal(reader.tensor(name))]
            self.commit()
            self.tensors = {f"third/{name}": value for name, value in self.backend.weights()}
            return
        self.learn()
        gradient = self.backend.reduced_gradient(DENOMINATOR)
        self.tensors |= {f"gradient/{name}": value.clone() for name, value in gradient.items()}
        self.backend.end_episodes(learned=False)
        self.commit()
        self.commit()
        self.tensors |= self.state()
        self.backend.hold()
        self.commit()
        third = {f"third/{name}": value.clone() for name, value in self.backend.weights()}
        self.tensors |= third
        self.backend.end_hold(back=True)
        back = self.state()
        self.figures["held"] = same(back, {name: self.tensors[name] for name in back})
        self.imitate()


def main() -> None:
    """Goes through the cases of a job, each in a trainer group of its own."""
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.set_num_threads(1)
    for generation, case in enumerate(job["cases"], 1):
        place = meeting_place(Path(job["folder"]) / f"{case['name']}.port", leads=rank == 0)
        group = join_trainer_group(generation, rank, job["ranks"], place, MEET_S, torch.device("cpu"))
        walk = Walk(case, group)
        walk.go(case)
        if group.leads:
            target = Path(job["folder"]) / case["name"]
            own = {name: value.contiguous() for name, value in walk.tensors.items()}
            save_file(own, f"{target}.safetensors")
            Path(f"{target}.json").write_text(json.dumps(walk.figures))
        group.leave()


if __name__ == "__main__":
    main()
