r"""The state of `pi05` as words of its prompt: `Task: pick up the cube, State: 0 128 255;\nAction: `.

An episode has one prompt, up to `State:`; the numbers change with each chunk. So a policy knows the ids of each of
them, by its tokenizer, and puts them behind the prompt itself.
Facts: openpi `models/tokenizer.py` at 27b8a01. Shapes: B environments, S numbers of a state, T ids.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from headrace_schema.sections.base import Section
from pydantic import Field
from torch import Tensor, nn

BINS = 256
LEAST = -1
"""The number of what is below -1, which is normalised."""
ENDING = ";\nAction: "

Ids = tuple[int, ...]


def cleaned(instruction: str) -> str:
    """An instruction in one line, without underscores."""
    return instruction.strip().replace("_", " ").replace("\n", " ")


def framed(instruction: str) -> str:
    """What stands before the numbers."""
    return f"Task: {cleaned(instruction)}, State:"


def bins_of(state: Tensor) -> Tensor:
    """-1 to 255 for each number of a normalised state: its bin of 256 between -1 and 1; -1 below."""
    edges = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64, device=state.device)[:-1]
    return torch.bucketize(state.double().contiguous(), edges, right=True) - 1


def pi05_prompt(instruction: str, state_S: Tensor) -> str:
    """The whole text that pi05 reads for an instruction and a normalised state, as openpi writes it."""
    return f"{framed(instruction)} {' '.join(str(int(place)) for place in bins_of(state_S))}{ENDING}"


class StateWords(Section):
    """Ids of what stands behind `State:`."""

    numbers: tuple[Ids, ...] = Field(
        min_length=BINS + 1, max_length=BINS + 1, description="of -1 to 255, with the space before each"
    )
    ending: Ids = Field(min_length=1, description="of what stands behind the last number")

    @classmethod
    def of(cls, tokenizer: Any) -> StateWords:
        """Those of a tokenizer of transformers. Raises ValueError for one to which a text is more than its parts."""

        def encode(text: str) -> Ids:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        def behind(before: str, text: str) -> Ids:
            whole, part = encode(before + text), encode(before)
            if whole[: len(part)] != part:
                raise ValueError(f"its ids of {before + text!r} do not begin with those of {before!r}")
            return whole[len(part) :]

        found = cls(
            numbers=tuple(behind("State:", f" {number}") for number in range(LEAST, BINS)),
            ending=behind("State: 1", ENDING),
        )
        for state in ([LEAST, 0, 7, 10], [255, 128, 99, 100]):
            text = f"State: {' '.join(map(str, state))}{ENDING}"
            parts = chain(
                encode("State:"), *(found.numbers[number - LEAST] for number in state), found.ending
            )
            if encode(text) != tuple(parts):
                raise ValueError(f"its ids of {text!r} are not those of its words, one after the other")
        return found


class WordsOfStates(nn.Module):
    """Ids of states. Not among the weights."""

    ids_VL: Tensor
    lengths_V: Tensor
    ending_E: Tensor

    def __init__(self, words: StateWords) -> None:
        super().__init__()
        self.longest = max(map(len, words.numbers))
        rows = [[*ids, *[0] * (self.longest - len(ids))] for ids in words.numbers]
        self.register_buffer("ids_VL", torch.tensor(rows), persistent=False)
        self.register_buffer("lengths_V", torch.tensor([len(ids) for ids in words.numbers]), persistent=False)
        self.register_buffer("ending_E", torch.tensor(words.ending), persistent=False)

    def count(self, size: int) -> int:
        """T, of a state of so many numbers."""
        return size * self.longest + len(self.ending_E)

    def forward(self, state_BS: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) ids of normalised states, and which of them there are: a number with fewer ids leaves places free."""
        chosen_BS = bins_of(state_BS) - LEAST
        ids_BSL = self.ids_VL[chosen_BS]
        kept_BSL = torch.arange(self.longest, device=ids_BSL.device) < self.lengths_V[chosen_BS][..., None]
        ending_BE = self.ending_E.expand(len(state_BS), -1)
        whole = torch.ones_like(ending_BE, dtype=torch.bool)
        return torch.cat([ids_BSL.flatten(1), ending_BE], 1), torch.cat([kept_BSL.flatten(1), whole], 1)
