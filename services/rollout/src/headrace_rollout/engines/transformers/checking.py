"""Whether the engine computes a model as the model's class does: tried with the first version, on a few tokens."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from headrace_modelkit.invariant import OnlyInvariant, Varies
from headrace_modelkit.probing import BROKEN, OFF, breaks, distance, in_words, probe_tokens, wrong
from torch import Tensor

from headrace_rollout.engines.base import Refused
from headrace_rollout.engines.transformers.cache import PrefillPlan, PromptKeys
from headrace_rollout.engines.transformers.policy_model import PolicyModel

ENGINE = "rollout.engine: transformers"
SHORT, LONG, DECODED = 3, 48, 3
"""Tokens of two prompts, and of what is decoded behind them: rows that lie apart in the cache, as long and short ones
do in a batch.
"""


@torch.inference_mode()
def check_model(model: PolicyModel) -> None:
    """Raises Refused INVALID where log-probs along a decode are not those of the class. The cache is empty.

    Rows are kept in one tensor for a model that cannot compute with several. Of a deterministic run, what a model
    computes must be known not to hang on the batch.
    """
    try:
        problem = _problem(model)
    except Varies as error:
        reason = f"the model at {model.path!r} has bits that hang on its batch: {error}"
        raise Refused("INVALID", f"deterministic: {reason}; set deterministic: false") from error
    if problem and model.cache.split and not model.cache.reaches:
        model.cache.split = False
        problem = _problem(model)
    if problem:
        raise Refused("INVALID", problem)
    model.continues = not _problem(model, extended=True)
    model.takes_back = not model.cache.stateful or not _problem(model, guessed=True)
    if model.drafts is not None and not model.takes_back:
        reason = (
            f"the states of layers of the model at {model.path!r} cannot be taken back behind a wrong draft"
        )
        raise Refused("INVALID", f"trainer.draft: {reason}; leave it out")


def _problem(model: PolicyModel, *, extended: bool = False, guessed: bool = False) -> str:
    """What is wrong with a decode behind two prompts; with `extended`, behind prompts that were kept and go on; with
    `guessed`, each token beside wrong guesses of the next ones.
    """
    decoded = max(1, min(DECODED, model.context_limit - LONG))
    long = max(1, min(LONG, model.context_limit - decoded))
    contexts = [min(SHORT, long), long]
    tokens = probe_tokens(model.architecture, sum(contexts) + 2 * (decoded + 1))
    rows = [tokens[: contexts[0] + decoded + 1], tokens[-(long + decoded + 1) :]]
    try:
        with OnlyInvariant() if model.deterministic else nullcontext():  # type: ignore[no-untyped-call]
            found = _decoded(model, rows, contexts, decoded, extended=extended, guessed=guessed)
    except torch.OutOfMemoryError:
        raise
    except BROKEN as error:
        return breaks(model.path, model.architecture.model_type, in_words(error), by=ENGINE)
    off = max(
        distance(own, _plain(model, row, first), model.dtype)
        for own, row, first in zip(found, rows, contexts, strict=True)
    )
    kind = model.architecture.model_type
    return wrong(model.path, kind, off, by=ENGINE) if off > OFF[model.dtype] else ""


def _decoded(
    model: PolicyModel,
    rows: list[list[int]],
    contexts: list[int],
    decoded: int,
    *,
    extended: bool,
    guessed: bool,
) -> list[Tensor]:
    """Log-probs of each row's tokens behind its context, as the engine samples them."""
    cache = model.cache
    model.learn_token_size()
    cache.clear()
    free, cache.free_bytes = cache.free_bytes, 0
    cache.join([], contexts)
    cache.free_bytes = free
    given = [row[:first] for row, first in zip(rows, contexts, strict=True)]
    if extended:
        known = [PromptKeys(max(1, first // 2)) for first in contexts]
        plan = PrefillPlan(0, [0, 1], list(enumerate(known)))
        cache.prefill(plan, model.device)
        model.prefill([each[: keys.length] for each, keys in zip(given, known, strict=True)])
        hidden_ND, whole = model.extend(given, known)
        cache.place(0, whole)
        hidden = [hidden_ND]
    else:
        cache.prefill(PrefillPlan(0, [0, 1], []), model.device)
        hidden = [model.prefill(given)]
    for step in range(decoded):
        lengths = np.array(contexts) + step
        newest = np.array([[row[at]] for row, at in zip(rows, lengths, strict=True)])
        given_NT = np.concatenate([newest, newest, newest], 1) if guessed else newest
        hidden.append(model.decode(given_NT, lengths)[:, 0])
        cache.states.stand(np.ones(len(rows), dtype=np.int64))
    cache.free()
    log_probs_TNV = torch.stack([model.logits(each).log_softmax(-1) for each in hidden])
    return [
        _of(log_probs_TNV[:, row], tokens[first : first + decoded + 1])
        for row, (tokens, first) in enumerate(zip(rows, contexts, strict=True))
    ]


def _plain(model: PolicyModel, row: list[int], first: int) -> Tensor:
    return _of(model.plain(row[:-1])[first - 1 :], row[first:])


def _of(log_probs_TV: Tensor, tokens: list[int]) -> Tensor:
    tokens_T = torch.tensor(tokens, device=log_probs_TV.device)
    return log_probs_TV.gather(1, tokens_T[:, None])[:, 0]
