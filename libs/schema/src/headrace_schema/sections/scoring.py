"""Sections of what answers are worth."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from headrace_schema.sections.base import FEW, Seconds, Section, VariableName


class ScorerSection(Section):
    """One scorer with its weight."""

    name: str = Field(description="a built-in scorer, or path/to/file.py:function")
    weight: float = Field(default=1.0, description="factor of its score; 0: shown, not counted")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the scorer")


class RewardSection(Section):
    """What answers are worth."""

    scorers: list[ScorerSection] = Field(
        max_length=FEW, description="the reward is the sum of weights times scores; at least one"
    )
    evaluation: list[ScorerSection] = Field(
        default_factory=list,
        max_length=FEW,
        description="scorers of held-out answers; default: the same scorers",
    )
    stages: dict[str, Annotated[list[ScorerSection], Field(min_length=1, max_length=FEW)]] = Field(
        default_factory=dict,
        max_length=FEW,
        description="scorers of further reward stages of the workflow, by the stage's name",
    )
    give: list[Literal["tokens", "group"]] = Field(
        max_length=FEW,
        default_factory=list,
        description="what scorers get beside text. tokens: ids, and prompt and answer with special tokens; group: all "
        "answers to the prompt, in stages behind an edge of granularity group",
    )
    pictures: Annotated[int, Field(strict=True, ge=0, le=FEW)] = Field(
        default=0,
        description="pictures of each camera that scorers of an embodied run get of a training episode: the last one, "
        "and others evenly before it",
    )
    env: list[VariableName] = Field(
        max_length=FEW,
        default_factory=list,
        description="variables of the reward service's environment that scorers get, such as HF_TOKEN; without it they "
        "get none that holds a secret",
    )
    timeout_s: Seconds = Field(default=5.0, description="limit of one answer; beyond it the answer failed")
    load_timeout_s: PositiveFloat = Field(
        default=120.0, le=3600.0, description="limit of a scorer's import, such as that of a reward model"
    )
    failed_reward: float = Field(
        default=0.0, description="reward of an answer that makes a scorer fail or run out of time"
    )
    truncated_reward: float | None = Field(
        default=None,
        description="reward of answers cut by the length limit, which no further stage scores; none: scored",
    )

    @property
    def opening_s(self) -> float:
        """The longest that loading all scorers and trying them with a blank answer may take, in seconds."""
        count = sum(map(len, self.sets().values()))
        return count * (self.load_timeout_s + self.timeout_s)

    @property
    def judges_success_alone(self) -> bool:
        """Whether all that an evaluation asks of an episode is whether it succeeded."""
        return all(figure_of(each) in ("success", "outcome") for each in self.judges)

    @property
    def measure(self) -> str:
        """The figure of an episode that an evaluation's score is, as the scorer `episode` calls it; "" for another."""
        if not self.judges:  # of given answers
            return ""
        first, *others = self.judges
        plain = not others and first.weight == first.options.get("scale", 1.0) == 1.0
        return figure_of(first) if plain else ""

    @property
    def judges(self) -> list[ScorerSection]:
        """The scorers of held-out answers."""
        return self.evaluation or self.scorers

    def sets(self) -> dict[str, list[ScorerSection]]:
        """The scorers by the key of their set; `evaluation` only where it has scorers of its own."""
        own = {"evaluation": self.evaluation} if self.evaluation else {}
        return {
            "scorers": self.scorers,
            **own,
            **{set_of(name): found for name, found in self.stages.items()},
        }


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Scorers of files by their file's name, with the folders that tell two of one name apart; others as they are.

    >>> short_names(["/home/me/rewards/judge.py:score", "exact"])
    {'/home/me/rewards/judge.py:score': 'judge.py:score', 'exact': 'exact'}
    """
    alike: dict[str, set[str]] = {}
    for name in (names := list(names)):
        alike.setdefault(_end(name, 0), set()).add(name)

    def short(name: str) -> str:
        others = alike[_end(name, 0)]
        most = max(each.count("/") for each in others)
        apart = (n for n in range(most) if len({_end(each, n) for each in others}) == len(others))
        return _end(name, next(apart, most))

    return {name: short(name) for name in names}


def _end(name: str, folders: int) -> str:
    """A file's name and function with so many of its folders."""
    return "/".join(name.split("/")[-folders - 1 :]) if ".py:" in name else name


def figure_of(scorer: ScorerSection) -> str:
    """The figure of an episode that a scorer gives; "" for a scorer that is not `episode`."""
    return str(scorer.options.get("of", "return")) if scorer.name == "episode" else ""


def set_of(stage: str) -> str:
    """The set of a stage's scorers, as RewardSection.sets() and keys of problems name it; empty: the run's."""
    return f"stages.{stage}" if stage else "scorers"
