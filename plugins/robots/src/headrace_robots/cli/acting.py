"""A policy that plays the episodes of a collection, greedily. Knows no simulator.

torch is loaded with the policy: collecting a script's episodes needs none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from headrace_servicekit.rpc.episodes import IMAGE, STATE

Arrays = Mapping[str, np.ndarray]


class PolicyActor:
    """Chooses actions by a policy directory, a chunk at a time."""

    def __init__(self, directory: Path, template: str) -> None:
        """`template` renders a task for a policy that reads language. Raises ModelNotReadable."""
        from headrace_robots.policies.directory import load_policy
        from headrace_robots.policies.language import instruction_encoder

        self._policy = load_policy(directory)
        self._encode, self._template = instruction_encoder(self._policy.config, str(directory)), template
        self._chunks: dict[tuple[int, int], deque[np.ndarray]] = {}

    def actions(
        self, seen: Mapping[int, Arrays], seeds: Mapping[int, int], task: str
    ) -> dict[int, np.ndarray]:
        """The action of each environment: state and cameras are under the names that episodes have on the wire."""
        waits = [place for place in seen if not self._chunks.get((place, seeds[place]))]
        if waits:
            self._act([seen[place] for place in waits], [(place, seeds[place]) for place in waits], task)
        return {place: self._chunks[place, seeds[place]].popleft() for place in seen}

    def _act(self, seen: list[Arrays], keys: list[tuple[int, int]], task: str) -> None:
        import torch

        from headrace_robots.policies.language import rendered
        from headrace_robots.policies.policy import Observation

        cameras = [name for name in seen[0] if name.startswith(IMAGE)]
        prompt = self._encode(rendered(self._template, task))
        observation = Observation(
            torch.from_numpy(np.stack([each[STATE] for each in seen])) if STATE in seen[0] else None,
            {
                name.removeprefix(IMAGE): torch.from_numpy(np.stack([each[name] for each in seen]))
                for name in cameras
            },
            (prompt,) * len(seen) if prompt else (),
        )
        chunk = self._policy.act(observation, [seed for _, seed in keys], deterministic=True)
        for key, actions in zip(keys, chunk.executed_BCA.numpy(), strict=True):
            self._chunks[key] = deque(actions)
