"""The call that computes the loss that a loop of the user's own asks for. Decides nothing."""

from __future__ import annotations

import math
import time

from headrace.trainer.v1 import trainer_pb2
from headrace_schema.sections.learning import OptimizerSection
from headrace_schema.sessions import LOSS_OPTIONS
from headrace_servicekit.rpc.requests import check_number, invalid

from headrace_trainer.kinds.answers import AnswersRun
from headrace_trainer.learning.samples import Sample
from headrace_trainer.session.calls import Call, sequence_sample
from headrace_trainer.wire import messages as wire
from headrace_trainer.wire.calls import Calls, Context, check_step


class AskedCalls(Calls):
    """ComputeLoss."""

    async def ComputeLoss(
        self, request: trainer_pb2.ComputeLossRequest, context: Context
    ) -> trainer_pb2.ComputeLossResponse:
        self._check(request.header, lease=True)
        if request.learn:
            check_step(request)
            check_number("prompt_ordinal", request.prompt_ordinal, 0)
        if (known := LOSS_OPTIONS.get(request.loss)) is None:
            raise invalid("loss", f"{request.loss!r} is none; use {', '.join(LOSS_OPTIONS)}")
        if strange := sorted(request.options.keys() - known.keys()):
            raise invalid("options", f"{request.loss} has no option {strange[0]!r}; leave it out")
        samples = self._samples(request)
        call = Call(
            samples,
            request.loss,
            dict(request.options),
            request.step,
            request.attempt,
            (request.prompt_ordinal, 0, request.slot_attempt, request.digest),
            request.learn,
        )
        self._awake()
        started = time.monotonic()
        reply = await self._obey(request.header, lambda session: session.compute(call))
        figures = wire.metrics("learn", time.monotonic() - started, [])
        self._instance.report(figures)
        return trainer_pb2.ComputeLossResponse(
            sequences=[trainer_pb2.InferredSequence(values=own) for own in reply.log_probs],
            loss=reply.loss,
            finite=reply.finite,
            policy_number=reply.policy_number,
            metrics=figures,
        )

    def _samples(self, request: trainer_pb2.ComputeLossRequest) -> list[Sample]:
        if not request.sequences:
            raise invalid("sequences", "there is none; give at least one")
        kind, found = self._trainer.kind.policies[""], list[Sample]()
        if not isinstance(kind, AnswersRun):
            raise invalid("workflow", "a robot policy has no log-probs of ids; submit a session run")
        vocabulary, positions = kind.vocabulary, kind.positions
        for place, given in enumerate(request.sequences):
            ids = (*given.token_ids, *given.targets)
            where = f"data[{place}]"
            if strange := [each for each in ids if not 0 <= each < vocabulary]:
                reason = f"the id {strange[0]} is none of the model's {vocabulary}; encode with its tokenizer"
                raise invalid(where, reason)
            if positions is not None and len(given.token_ids) > positions:
                reason = f"it has {len(given.token_ids)} tokens, and the model reads {positions}; cut it"
                raise invalid(where, reason)
            numbers = [list(given.weights), list(given.advantages), list(given.log_probs)]
            if not all(math.isfinite(value) for values in numbers for value in values):
                raise invalid(where, "a weight, advantage or log-prob is not finite; mend the value")
            if not given.token_ids:
                raise invalid(where, "it has no token; leave it out")
            if request.loss != "cross_entropy" and not given.log_probs:
                raise invalid(where, f"it has no log_probs, of which {request.loss} makes ratios; give them")
            try:
                found.append(sequence_sample(list(given.token_ids), list(given.targets), *numbers))
            except ValueError as error:
                raise invalid(where, str(error)) from error
        return found


def optimizer_of(request: trainer_pb2.CommitStepRequest) -> OptimizerSection | None:
    """The parameters that a commit brings. Raises INVALID."""
    if not request.HasField("adam"):
        return None
    adam = request.adam
    numbers = adam.learning_rate, adam.eps, adam.weight_decay, adam.grad_clip_norm
    if not all(math.isfinite(each) and each >= 0 for each in numbers) or adam.eps == 0:
        raise invalid(
            "adam", "learning_rate, weight_decay and grad_clip_norm are finite, from 0, and eps above 0"
        )
    if not (0 <= adam.beta1 < 1 and 0 <= adam.beta2 < 1):
        raise invalid("adam", "beta1 and beta2 are below 1, from 0")
    return OptimizerSection.model_construct(
        lr=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        grad_clip=adam.grad_clip_norm or 1e30,
    )
