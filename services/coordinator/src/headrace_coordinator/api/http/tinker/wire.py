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
NUMPY: dict[Any, np.dtype[Any]] = {pb.DATA_TYPE_FLOAT32: np.dtype("<f4"), pb.DATA_TYPE_INT64: np.dtype("<i8")}
Array = np.ndarray[Any, np.dtype[Any]]
MOST = 32 << 20
"""Elements of a matrix whose zeros are not sent."""
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


def operation(request: pb.ForwardBackwardRequest) -> tuple[Forward | ForwardBackward, int]:
    """The call of a body, and how many targets it has at each position."""
    options, widths = _options(request), set[int]()
    data = [_datum(datum, f"data[{at}]", widths) for at, datum in enumerate(request.data)]
    if len(widths) > 1:
        raise wrong(
            "data", "its sequences have different numbers of targets at a position", "send them apart"
        )
    kind = Forward if request.forward_only else ForwardBackward
    try:
        made = kind.model_validate({"data": data, "loss": request.loss_fn, "options": options})
    except ValidationError as error:
        found = explain(error, kind)[0]
        raise wrong(found.key, found.problem, found.fix) from error
    return made, max(widths, default=1)


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


def _datum(datum: pb.Datum, key: str, widths: set[int]) -> dict[str, list[Any]]:
    tokens = [token for chunk in datum.model_input for token in _tokens(chunk, f"{key}.model_input")]
    given: dict[str, list[Any]] = {"tokens": tokens}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in datum.loss_fn_inputs.items():
        where = f"{key}.loss_fn_inputs.{name}"
        if name not in INPUTS:
            raise wrong(where, "no loss of this fleet takes it", f"losses take {', '.join(INPUTS)}")
        found = _array(tensor, where)
        if found.ndim > 2 or len(found) != len(tokens):
            reason = f"it has the shape {found.shape}, and model_input has {len(tokens)} tokens"
            raise wrong(where, reason, "give one value, or a row, for each token")
        given[INPUTS[name]], shapes[name] = found.ravel().tolist(), found.shape
    if "targets" not in given:
        raise wrong(
            f"{key}.loss_fn_inputs.target_tokens", "it is missing", "give the target of each position"
        )
    for name, shape in shapes.items():
        if shape != shapes["target_tokens"]:
            reason = f"it has the shape {shape}, and target_tokens {shapes['target_tokens']}"
            raise wrong(f"{key}.loss_fn_inputs.{name}", reason, "give one for each target")
    widths.add((*shapes["target_tokens"], 1)[1])
    return given


def _tokens(chunk: pb.Chunk, key: str) -> list[int]:
    if chunk.WhichOneof("chunk") != "encoded_text":
        raise wrong(key, NO_IMAGES, "leave them out")
    found: list[int] = _numbers(chunk.encoded_text.tokens, np.dtype("<i4"), key).tolist()
    return found


def _array(tensor: pb.Tensor, key: str) -> Array:
    if (dtype := NUMPY.get(tensor.dtype)) is None:
        raise wrong(key, f"its elements have the type {tensor.dtype}", "send float32 or int64")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return _dense(tensor, dtype, key)
    found = _numbers(tensor.dense, dtype, key)
    try:
        return found.reshape(tuple(tensor.shape) or (-1,))
    except ValueError as error:
        raise wrong(
            key, f"{found.size} values have no shape {list(tensor.shape)}", "use the package tinker"
        ) from error


def _dense(tensor: pb.Tensor, dtype: np.dtype[Any], key: str) -> Array:
    values = _numbers(tensor.sparse_csr.values, dtype, key)
    begins = _numbers(tensor.sparse_csr.crow_indices, np.dtype("<i8"), key)
    columns = _numbers(tensor.sparse_csr.col_indices, np.dtype("<i8"), key)
    rows, width = tensor.shape if len(tensor.shape) == 2 else (0, 0)
    counts = np.diff(begins)
    fits = len(counts) == rows and begins[0] == 0 and begins[-1] == len(values) == len(columns)
    if not fits or (counts < 0).any() or rows * width > MOST or ((columns < 0) | (columns >= width)).any():
        raise wrong(key, "its rows and columns do not fit its shape", "use the package tinker")
    found = np.zeros((rows, width), dtype)
    found[np.repeat(np.arange(rows), counts), columns] = values
    return found


def _numbers(data: bytes, dtype: np.dtype[Any], key: str) -> Array:
    if len(data) % dtype.itemsize:
        raise wrong(key, f"{len(data)} bytes hold no whole number of {dtype.name}", "use the package tinker")
    return np.frombuffer(data, dtype)


def forward_output(result: ForwardResult, width: int) -> bytes:
    """The result of forward and forward_backward, with `width` log-probs at each position.

    The client adds up the figures of its chunks by their names.
    """
    lengths = np.array([0, *(len(each) for each in result.log_probs)], np.int64)
    record = pb.ArrayRecord(
        type_tag="ArrayRecord",
        num_datums=len(result.log_probs),
        fields={
            "logprobs": pb.BatchedTensor(
                data=_floats(value for each in result.log_probs for value in each),
                offsets=(np.cumsum(lengths) * 4).astype("<i8").tobytes(),
                dtype=pb.DATA_TYPE_FLOAT32,
                trailing_shape=[width] if width > 1 else [],
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
                stop_reason=pb.STOP_REASON_LENGTH
                if each.stop_reason == "length"
                else pb.STOP_REASON_UNSPECIFIED,
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
