"""The scorer `success_classifier`: whether an episode succeeded, by its last picture. Loaded in a scorer's child."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from headrace_reward.scorers.base import BLANK, Answer, AnswerFailed, Score, ScorerError
from headrace_servicekit.registry import Options, plugin
from pydantic import Field, PositiveInt


class SuccessOptions(Options):
    """Options of `success_classifier`."""

    path: str = Field(description="directory that `headrace success train` wrote")
    of: Literal["success", "probability"] = Field(
        default="success",
        description="1 where the probability reaches the threshold, else 0; or the probability",
    )
    threshold: float = Field(default=0.5, gt=0, lt=1, description="least probability of a success")
    batch: PositiveInt = Field(default=64, description="pictures that are computed at once")
    threads: PositiveInt = Field(default=1, description="of the computation on the CPU")


@plugin(SuccessOptions, packages=("torch", "safetensors"))
class SuccessClassifier:
    """Whether the last picture of an episode shows its success, as a trained network says."""

    needs_pictures = one_process = True

    def __init__(self, options: SuccessOptions) -> None:
        self._options = options
        try:
            import torch

            from headrace_robots.reward import network
        except ImportError as error:
            raise ScorerError(
                "name", f"it needs pip install 'headrace-robots[policies]' ({error})"
            ) from error
        torch.set_num_threads(options.threads)
        self._device = "cuda:0" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu"
        if self._device != "cpu" and not torch.cuda.is_available():
            reason = "the reward service has a GPU's lease, and torch reaches none there"
            raise ScorerError(
                "name", f"{reason}; install torch with CUDA, or name CPU slots in placement.reward"
            )
        try:
            self._config, loaded = network.load_success(Path(options.path))
        except network.ClassifierProblem as problem:
            raise ScorerError("options.path", str(problem)) from problem
        self._network = loaded.to(self._device)

    def score_batch(self, answers: Sequence[Answer]) -> list[Score]:
        """A number for each episode. Raises AnswerFailed for one whose pictures are not what the network reads."""
        from headrace_robots.reward.network import probabilities

        frames = [self._last(each) for each in answers]
        seen = [each for each in frames if each is not None]
        found = iter(probabilities(self._network, self._config, seen, self._options.batch))
        scores: list[Score] = []
        for each in frames:
            probability = 0.0 if each is None else next(found)
            reached = float(probability >= self._options.threshold)
            score = reached if self._options.of == "success" else probability
            scores.append({"score": score, "probability": probability})
        return scores

    def score(self, answer: Answer) -> Score:
        """As `score_batch`, of one episode."""
        return self.score_batch([answer])[0]

    def _last(self, answer: Answer) -> np.ndarray | None:
        """The last picture; None of the blank answer that scorers are tried with."""
        if answer == BLANK or (answer.pictures is None and not answer.completion.strip()):
            return None
        pictures, camera = answer.pictures or {}, self._config.camera
        if camera not in pictures:
            has = ", ".join(map(repr, sorted(pictures))) or "none"
            raise AnswerFailed(
                f"the classifier reads camera {camera!r}, and the episode has pictures of {has}"
            )
        last: np.ndarray = pictures[camera][-1]
        if last.shape[-1] != self._config.channels:
            raise AnswerFailed(
                f"pictures of {camera!r} have {last.shape[-1]} channels, and {self._config.channels} are read"
            )
        return last
