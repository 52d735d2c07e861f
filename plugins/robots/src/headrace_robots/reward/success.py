"""The scorer `success_classifier`: whether an episode succeeded, by its last picture. Loaded in a scorer's child."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from headrace_reward.scorers.base import BLANK, Answer, AnswerFailed, Score, ScorerError
from headrace_reward.scorers.judges.model import compute_device
from headrace_servicekit.registry import Options, plugin
from pydantic import Field, PositiveInt

EXTRA = "it needs pip install 'headrace-robots[policies]'"


class ToldOptions(Options):
    """What scorers take that tell the probability of a success."""

    of: Literal["success", "probability"] = Field(
        default="success",
        description="1 where the probability reaches the threshold, else 0; or the probability",
    )
    threshold: float = Field(default=0.5, gt=0, lt=1, description="least probability of a success")
    threads: PositiveInt = Field(default=1, description="of the computation on the CPU")

    def told(self, probability: float) -> dict[str, float]:
        """The score, and the probability that it is made of."""
        reached = float(probability >= self.threshold)
        return {"score": reached if self.of == "success" else probability, "probability": probability}


class SuccessOptions(ToldOptions):
    """Options of `success_classifier`."""

    path: str = Field(description="directory that `headrace success train` wrote")
    batch: PositiveInt = Field(default=64, description="pictures that are computed at once")


@plugin(SuccessOptions, packages=("torch", "safetensors"))
class SuccessClassifier:
    """Whether the last picture of an episode shows its success, as a trained network says."""

    needs_pictures = one_process = True

    def __init__(self, options: SuccessOptions) -> None:
        self._options = options
        device = compute_device(options.threads, EXTRA)
        from headrace_robots.reward import network

        try:
            self._config, loaded = network.load_success(Path(options.path))
        except network.ClassifierProblem as problem:
            raise ScorerError("options.path", str(problem)) from problem
        self._network = loaded.to(device)

    def score_batch(self, answers: Sequence[Answer]) -> list[Score]:
        """A number for each episode. Raises AnswerFailed for one whose pictures are not what the network reads."""
        from headrace_robots.reward.network import probabilities

        frames = [self._last(each) for each in answers]
        seen = [each for each in frames if each is not None]
        found = iter(probabilities(self._network, self._config, seen, self._options.batch))
        return [self._options.told(0.0 if each is None else next(found)) for each in frames]

    def score(self, answer: Answer) -> Score:
        """As `score_batch`, of one episode."""
        return self.score_batch([answer])[0]

    def _last(self, answer: Answer) -> np.ndarray | None:
        """The last picture; None of the blank answer that scorers are tried with."""
        if is_trial(answer):
            return None
        camera = self._config.camera
        last: np.ndarray = pictures_of(answer, [camera])[camera][-1]
        if last.shape[-1] != self._config.channels:
            raise AnswerFailed(
                f"pictures of {camera!r} have {last.shape[-1]} channels, and {self._config.channels} are read"
            )
        return last


def is_trial(answer: Answer) -> bool:
    """Whether it is the blank answer that scorers are tried with, which has no pictures."""
    return answer == BLANK or (answer.pictures is None and not answer.completion.strip())


def pictures_of(answer: Answer, cameras: Sequence[str]) -> Mapping[str, np.ndarray]:
    """An episode's pictures by camera, of all cameras where none is named. Raises AnswerFailed where it has none."""
    pictures = answer.pictures or {}
    wanted = [*cameras] or sorted(pictures)
    missing = [f"camera {camera!r}" for camera in wanted if camera not in pictures]
    if missing or not wanted:
        has = ", ".join(map(repr, sorted(pictures))) or "none"
        raise AnswerFailed(
            f"the scorer reads {(*missing, 'a camera')[0]}, and the episode has pictures of {has}"
        )
    return {camera: pictures[camera] for camera in wanted}
