"""Reward models: sequence classifiers of transformers, in the scorer's own process."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from headrace_servicekit.registry import Options, plugin
from pydantic import Field, NonNegativeInt, PositiveInt

from headrace_reward.scorers.base import BLANK, Answer, AnswerFailed, ScorerError

if TYPE_CHECKING:
    from headrace_modelkit.classifier import Classifier

_EXTRA = "reward_model needs its extra: pip install 'headrace-reward[model]'"
_PROBE = Answer(prompt="1 + 1?", completion="2")


class RewardModelOptions(Options):
    """Options of `reward_model`."""

    path: str = Field(description="Hugging Face id or directory of a …ForSequenceClassification model")
    revision: str | None = Field(None, description="commit or tag of the id")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="type of its weights")
    batch_tokens: PositiveInt = Field(16384, description="positions of a batch, padding included")
    threads: PositiveInt = Field(1, description="of the computation on the CPU")
    label: NonNegativeInt | None = Field(
        None, description="of a model with several labels: the one whose probability is the score"
    )
    sigmoid: bool = Field(False, description="of a model with one label: put its logit between 0 and 1")


@plugin(RewardModelOptions, packages=("torch", "transformers"))
class RewardModel:
    """What a reward model (a sequence classifier) says of question and answer, in its chat template."""

    one_process = True

    def __init__(self, options: RewardModelOptions) -> None:
        self._options = options
        self._model = self._load()
        several = self._model.labels > 1
        if several and (options.label is None or options.label >= self._model.labels):
            names = self._model.model.config.id2label
            listed = ", ".join(f"{number}: {names.get(number, '?')}" for number in range(self._model.labels))
            raise ScorerError(
                "options.label", f"the model has the labels {listed}; give one of these numbers"
            )
        if not several and options.label is not None:
            raise ScorerError(
                "options.label", "the model has one label, whose logit is the score; leave it out"
            )
        if several and options.sigmoid:
            raise ScorerError("options.sigmoid", "the model has several labels; leave it out")

    def score_batch(self, answers: Sequence[Answer]) -> list[float]:
        """The logit of each answer, or the probability of its label. Raises ScorerError where memory is short."""
        import torch

        options = self._options
        ids = [self._ids(_PROBE if answer == BLANK else answer) for answer in answers]
        try:
            logits_BL = self._model.logits(ids, options.batch_tokens)
        except (MemoryError, RuntimeError) as error:
            reason = (
                f"the reward model cannot be computed on {_device()}: {str(error)[:200]}; lower batch_tokens"
            )
            raise ScorerError("options.batch_tokens", reason) from error
        if options.label is not None:
            found = torch.softmax(logits_BL, -1)[:, options.label]
        else:
            found = torch.sigmoid(logits_BL[:, 0]) if options.sigmoid else logits_BL[:, 0]
        return [float(each) for each in found]

    def score(self, answer: Answer) -> float:
        """As `score_batch`, of one answer."""
        return self.score_batch([answer])[0]

    def _ids(self, answer: Answer) -> list[int]:
        """Question and answer as the model reads them. Raises AnswerFailed where it has no room for them."""
        tokenizer = self._model.tokenizer
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in answer.messages]
        if answer.episode is None:  # else the messages hold all that was said
            turns = turns or [{"role": "user", "content": answer.prompt}]
            turns.append({"role": "assistant", "content": answer.completion})
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode("".join(turn["content"] for turn in turns))
        if not ids:
            raise ValueError("the answer and its question have no tokens")
        if len(ids) > self._model.longest:
            room = f"{self._model.longest} tokens of the reward model's context"
            raise AnswerFailed(
                f"question and answer have {len(ids)} tokens, and there is room for the {room}"
            )
        return ids

    def _load(self) -> Classifier:
        try:
            import torch
            from headrace_modelkit.classifier import Classifier
            from headrace_modelkit.errors import ModelNotReadable
        except ImportError as error:
            raise ScorerError("name", _EXTRA) from error
        options = self._options
        torch.set_num_threads(options.threads)
        device = _device()
        if device != "cpu" and not torch.cuda.is_available():
            reason = "the reward service has a GPU's lease, and torch reaches none there; install torch with CUDA, or "
            raise ScorerError("name", f"{reason}name CPU slots in placement.reward")
        try:
            return Classifier.load(options.path, options.revision, options.dtype, device)
        except ModelNotReadable as error:
            raise ScorerError("options.path", str(error).removeprefix("model.path: ")) from error
        except (MemoryError, RuntimeError, OSError) as error:
            raise ScorerError("options.path", _no_room(device, str(error))) from error


def _device() -> str:
    """The GPU of the lease that this process was started under; without one, the CPU."""
    return "cuda:0" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu"


def _no_room(device: str, said: str) -> str:
    """What to do where a model does not load."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    held = (
        "" if limit == resource.RLIM_INFINITY else f" (limit of this process: {math.ceil(limit / 2**30)} GiB)"
    )
    fix = (
        "name a larger GPU in placement.reward, or dtype: bfloat16"
        if device != "cpu"
        else "give HEADRACE_REWARD_MEMORY_BYTES more, or dtype: bfloat16"
    )
    return f"the reward model does not load on {device}: {said[:200]}{held}; {fix}"
