"""Builds the engine of a run whose policy is answered by a second one. Checks that both read the same ids.

Where other instances reply, the second model is not loaded here: of it the tokenizer alone is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.tokenizer import TextCodec, load_tokenizer
from headrace_schema.openings import RolloutConfig, reply_model
from headrace_schema.sections.replying import ReplySection

from headrace_rollout.engines.base import Engine, EngineConfig, Weights
from headrace_rollout.engines.conversing import ConversingEngine
from headrace_rollout.engines.exchange import Rules
from headrace_rollout.engines.samples import Distribution
from headrace_rollout.runs.policy_files import read_policy
from headrace_rollout.wire import weights_of


def conversing(
    config: RolloutConfig,
    reply: ReplySection,
    settings: EngineConfig,
    build: Callable[[EngineConfig], Engine],
) -> ConversingEngine:
    """Both policies' engines, as one. Raises ModelNotReadable where the second model or its tokenizer does not fit."""
    frozen = reply_model(config.model, reply)
    replier: Engine | None = None
    if frozen is not None:
        with _naming_reply():
            _same_tokens(settings.codec, reply, load_tokenizer(frozen))
            if not config.replies_elsewhere:
                replier = build(replace(settings, model=frozen))
    speaker = build(settings)
    limits = [engine.max_context_tokens for engine in (speaker, replier) if engine is not None]
    rules = Rules(
        turns=reply.turns,
        before=_glue(settings.codec, reply.before),
        after=_glue(settings.codec, reply.after),
        distribution=Distribution(temperature=reply.temperature),
        max_new_tokens=reply.max_new_tokens,
        stop=tuple(reply.stop),
        context_limit=min(limits),
        last_alone=reply.scored == "last",
    )

    def read() -> tuple[str, Weights]:
        assert frozen is not None
        manifest, body = read_policy(config.model_copy(update={"model": frozen}), "", "")
        return manifest.digest, weights_of(manifest, body)

    return ConversingEngine(speaker, replier, rules, read)


@contextmanager
def _naming_reply() -> Iterator[None]:
    """Whoever reads a model speaks of `model.path`; this one is the reply's."""
    try:
        yield
    except ModelNotReadable as error:
        raise ModelNotReadable(str(error).replace("model.path", "reply.path")) from error


def _glue(codec: TextCodec, text: str) -> tuple[int, ...]:
    """Ids of a text inside an exchange: without what the tokenizer puts before the beginning of one."""
    ids: Sequence[int] = codec.tokenizer.encode(text, add_special_tokens=False) if text else ()
    return tuple(ids)


def _same_tokens(codec: TextCodec, reply: ReplySection, other: TextCodec) -> None:
    if codec.tokenizer.get_vocab() != other.tokenizer.get_vocab():
        raise ModelNotReadable(
            f"reply.path: {reply.path!r} has another tokenizer than the policy, and both read the same ids; give a "
            "model of the same family"
        )
