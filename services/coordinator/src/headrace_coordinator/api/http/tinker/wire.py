"""Bodies of Tinker's client as calls of a session run, and results as the client reads them. Pure.

Raises Refused INVALID for what no session run can do, naming it as the client does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from headrace.tinker.v1 import tinker_pb2 as pb
from headrace_schema.problems import explain, problem
from headrace_schema.sessions import (
    LOSS_OPTIONS,
    Forward,
    ForwardBackward,
    ForwardResult,
    SampleResult,
)
from pydantic import ValidationError

from headrace_coordinator.api.refusal import Refused

if TYPE_CHECKING:
    from google.protobuf.message import Message

INPUTS = {
    "target_tokens": "targets",
    "weights": "weights",
    "advantages": "advantages",
    "logprobs": "log_probs",
}
"""What the losses take, and how a session run calls it."""
NUMPY = {pb.DATA_TYPE_FLOAT32: np.dtype("<f4"), pb.DATA_TYPE_INT64: np.dtype("<i8")}
NO_LOG_PROB = -99999.0
NO_IMAGES = "images and sound are not read by a loop of one's own; only tokens are"


def wrong(key: str, reason: str, fix: str) -> Refused:
    """A refusal that names one key of the client's call."""
    return Refused("INVALID", f"{key}: {reason}; {fix}", [problem(key, reason, fix)])


def parsed(message: type[Message], body: bytes) -> Any:
    """The message of a body. Raises Refused."""
    try:
        return message.FromString(body)
    except ValueError as error:
        raise wrong("body", "this is no protobuf of forward_backward", "use the package tinker") from error


def operation(request: pb.ForwardBackwardRequest) -> Forward | ForwardBackward:
    """The call of a body."""
    options = _options(request)
    data = [_datum(datum, f"data[{at}]") for at, datum in enumerate(request.data)]
    kind = Forward if request.forward_only else ForwardBackward
    try:
        return kind.model_validate({"data": data, "loss": request.loss_fn, "options": options})
    except ValidationError as error:
        found = explain(error, kind)[0]
        raise wrong(found.key, found.problem, found.fix) from error


def _options(request: pb.ForwardBackwardRequest) -> dict[str, float]:
    known = LOSS_OPTIONS.get(request.loss_fn)
    if known is None:
        reason = f"the loss {request.loss_fn[:40]!r} is not one of this fleet"
        fix = f"use one of {', '.join(LOSS_OPTIONS)}, or forward_backward_custom"
        raise wrong("loss_fn", reason, fix)
    given = dict(request.loss_fn_config)
    for name in {*given, *request.loss_fn_config_v2}:
        if name not in known:
            fix = f"it has {', '.join(known)}" if known else "it has none"
            raise wrong(f"loss_fn_config.{name}", f"{request.loss_fn} has no such option", fix)
        if name not in given:
            raise wrong(f"loss_fn_config.{name}", "this is a text", "give a number")
    return given


def _datum(datum: pb.Datum, key: str) -> dict[str, list[Any]]:
    given = {}
    for name, tensor in datum.loss_fn_inputs.items():
        if name not in INPUTS:
            fix = f"losses take {', '.join(INPUTS)}"
            raise wrong(f"{key}.loss_fn_inputs.{name}", "no loss of this fleet takes it", fix)
        given[INPUTS[name]] = _vector(tensor, f"{key}.loss_fn_inputs.{name}")
    if "targets" not in given:
        raise wrong(
            f"{key}.loss_fn_inputs.target_tokens", "it is missing", "give the target of each position"
        )
    tokens = [token for chunk in datum.model_input for token in _tokens(chunk, f"{key}.model_input")]
    for name, ours in INPUTS.items():
        if ours in given and len(given[ours]) != len(tokens):
            reason = f"it has {len(given[ours])} values, and model_input has {len(tokens)} tokens"
            raise wrong(f"{key}.loss_fn_inputs.{name}", reason, "give one for each token")
    return {"tokens": tokens, **given}


def _tokens(chunk: pb.Chunk, key: str) -> list[int]:
    if chunk.WhichOneof("chunk") != "encoded_text":
        raise wrong(key, NO_IMAGES, "leave them out")
    return _numbers(chunk.encoded_text.tokens, np.dtype("<i4"), key)


def _vector(tensor: pb.Tensor, key: str) -> list[Any]:
    if len(tensor.shape) > 1 or tensor.WhichOneof("encoding") == "sparse_csr":
        raise wrong(
            key, "several targets at a position are not supported", "give a vector, one value for each token"
        )
    if (dtype := NUMPY.get(tensor.dtype)) is None:
        raise wrong(key, f"its elements have the type {tensor.dtype}", "send float32 or int64")
    return _numbers(tensor.dense, dtype, key)


def _numbers(data: bytes, dtype: np.dtype[Any], key: str) -> list[Any]:
    if len(data) % dtype.itemsize:
        raise wrong(key, f"{len(data)} bytes hold no whole number of {dtype.name}", "use the package tinker")
    found: list[Any] = np.frombuffer(data, dtype).tolist()
    return found


def forward_output(result: ForwardResult) -> bytes:
    """The result of forward and forward_backward; the client adds up the figures of its chunks by their names."""
    lengths = np.array([0, *(len(each) for each in result.log_probs)], np.int64)
    record = pb.ArrayRecord(
        type_tag="ArrayRecord",
        num_datums=len(result.log_probs),
        fields={
            "logprobs": pb.BatchedTensor(
                data=_floats(value for each in result.log_probs for value in each),
                offsets=(np.cumsum(lengths) * 4).astype("<i8").tobytes(),
                dtype=pb.DATA_TYPE_FLOAT32,
            )
        },
    )
    metrics = {name: value for name, value in result.metrics.items() if ":" in name}
    return pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics
    ).SerializeToString()


def sample_output(result: SampleResult, last: int) -> bytes:
    """The result of a request for samples; log-probs of the prompt only of its `last` tokens, 0: of all."""
    response = pb.SampleResponse(
        sequences=[
            pb.SampledSequence(
                stop_reason=pb.STOP_REASON_LENGTH if each.stop_reason == "length" else pb.STOP_REASON_STOP,
                tokens=np.array(each.tokens, "<i4").tobytes(),
                logprobs=_floats(each.log_probs),
            )
            for each in result.sequences
        ]
    )
    if result.prompt_log_probs:
        values = np.array([np.nan if each is None else each for each in result.prompt_log_probs], "<f4")
        values[: len(values) - last if last else 0] = np.nan
        response.prompt_logprobs = values.tobytes()
    if result.top_prompt_log_probs:
        response.topk_prompt_logprobs.CopyFrom(_top(result.top_prompt_log_probs, last))
    return response.SerializeToString()


def _top(rows: list[list[tuple[int, float]] | None], last: int) -> pb.TopkLogprobs:
    width = max(len(row or ()) for row in rows)
    ids = np.zeros((len(rows), width), "<i4")
    log_probs = np.full((len(rows), width), NO_LOG_PROB, "<f4")
    for at, row in enumerate(rows):
        if row and (not last or at >= len(rows) - last):
            ids[at, : len(row)] = [token for token, _ in row]
            log_probs[at, : len(row)] = [value for _, value in row]
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=log_probs.tobytes(), k=width, length=len(rows))


def _floats(values: Iterable[float]) -> bytes:
    return np.fromiter(values, "<f4").tobytes()


def figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those figures that JSON can say."""
    return {name: value for name, value in metrics.items() if np.isfinite(value)}
