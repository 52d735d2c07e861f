"""Bodies of Tinker's client as calls of a session run, and results as it reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from headrace.tinker.v1 import tinker_pb2 as pb
from headrace_coordinator.api.http.tinker.wire import forward_output, operation, sample_output
from headrace_coordinator.api.refusal import Refused
from headrace_schema.sessions import ForwardResult, SampledSequence, SampleResult

FLOAT, INT = pb.DATA_TYPE_FLOAT32, pb.DATA_TYPE_INT64


def ids(*tokens: int) -> pb.Chunk:
    return pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array(tokens, "<i4").tobytes()))


def vector(values: list[float], dtype: Any = FLOAT, shape: list[int] | None = None) -> pb.Tensor:
    data = np.array(values, "<f4" if dtype == FLOAT else "<i8").tobytes()
    return pb.Tensor(dense=data, dtype=dtype, shape=shape or [len(values)])


def request(
    loss: str = "cross_entropy", chunks: Any = None, **inputs: pb.Tensor
) -> pb.ForwardBackwardRequest:
    datum = pb.Datum(
        model_input=chunks or [ids(5, 6), ids(7)],
        loss_fn_inputs={"target_tokens": vector([6, 7, 8], INT), **inputs},
    )
    return pb.ForwardBackwardRequest(model_id="m", seq_id=1, data=[datum], loss_fn=loss)


def test_a_body_is_read_as_the_call_that_it_is():
    asked = request("ppo", advantages=vector([0, 1, -1]), logprobs=vector([-0.5, -1, -2]))
    asked.loss_fn_config["clip_low_threshold"] = 0.5
    asked.loss_fn_config_v2["clip_low_threshold"] = b"\x09\x00\x00\x00\x00\x00\x00\xe0\x3f"
    found, width = operation(asked)
    assert (found.kind, found.loss, found.options) == ("forward_backward", "ppo", {"clip_low_threshold": 0.5})
    (datum,) = found.data
    assert (datum.tokens, datum.targets) == ([5, 6, 7], [6, 7, 8])
    assert (datum.advantages, datum.log_probs, datum.weights) == ([0, 1, -1], [-0.5, -1, -2], [])
    asked.forward_only = True
    assert operation(asked)[0].kind == "forward" and width == 1


def sparse(begins: list[int], columns: list[int], width: int = 2) -> pb.Tensor:
    as_bytes = [np.array(each, "<i8").tobytes() for each in ([7, 9], begins, columns)]
    names = ("values", "crow_indices", "col_indices")
    matrix = pb.SparseCsr(**dict(zip(names, as_bytes, strict=True)))
    return pb.Tensor(sparse_csr=matrix, dtype=INT, shape=[3, width])


def test_several_targets_at_a_position_are_read_with_and_without_their_zeros():
    weights = vector([0.5, 0, 0, 0, 0, 0.25], shape=[3, 2])
    made, width = operation(request(target_tokens=sparse([0, 1, 1, 2], [0, 1]), weights=weights))
    assert width == 2
    assert made.data[0].targets == [7, 0, 0, 0, 0, 9] and made.data[0].weights == [0.5, 0, 0, 0, 0, 0.25]
    several = request(target_tokens=vector([1] * 6, INT, [3, 2]))
    several.data.append(request().data[0])
    with pytest.raises(Refused, match="different numbers of targets"):
        operation(several)
    result = ForwardResult(kind="forward", log_probs=[[-1, -2, -3, -4]], metrics={})
    (record,) = pb.ForwardBackwardOutput.FromString(forward_output(result, 2)).loss_fn_outputs
    assert list(record.fields["logprobs"].trailing_shape) == [2]


def with_text(option: str) -> pb.ForwardBackwardRequest:
    found = request("ppo")
    found.loss_fn_config_v2[option] = b"\x12\x03low"
    return found


def with_number(option: str) -> pb.ForwardBackwardRequest:
    found = request()
    found.loss_fn_config[option] = 1.0
    return found


@pytest.mark.parametrize(
    ("asked", "key", "words"),
    [
        (request("gspo"), "loss_fn", "use one of cross_entropy, "),
        (request("stable_reinforce"), "loss_fn", "'stable_reinforce' is not one"),
        (with_number("beta"), "loss_fn_config.beta", "cross_entropy has no such option"),
        (with_text("clip_low_threshold"), "loss_fn_config.clip_low_threshold", "this is a text"),
        (request(mask=vector([1, 1, 1])), "data[0].loss_fn_inputs.mask", "no loss of this fleet takes it"),
        (
            request(weights=vector([1, 1])),
            "data[0].loss_fn_inputs.weights",
            "the shape (2,), and model_input has 3",
        ),
        (request(weights=vector([1, float("nan"), 1])), "weights", "finite"),
        (request(weights=vector([0] * 6, shape=[3, 2])), "weights", "and target_tokens (3,)"),
        (request(weights=vector([1, 1, 1], shape=[2, 2])), "weights", "3 values have no shape [2, 2]"),
        (request(target_tokens=sparse([0, 1, 2], [0, 1])), "target_tokens", "rows and columns do not fit"),
        (request(target_tokens=sparse([0, 2, 1, 2], [0, 1])), "target_tokens", "rows and columns do not fit"),
        (request(target_tokens=sparse([0, 1, 2, 2], [0, 2])), "target_tokens", "rows and columns do not fit"),
        (request(weights=pb.Tensor(dense=b"123", dtype=FLOAT)), "data[0].loss_fn_inputs.weights", "3 bytes"),
        (request(chunks=[pb.Chunk(image=b"png")]), "data[0].model_input", "images and sound"),
        (request(chunks=[ids()], target_tokens=vector([], INT)), "data[0].tokens", "at least 1"),
        (pb.ForwardBackwardRequest(loss_fn="cross_entropy"), "data", "at least 1"),
    ],
)
def test_what_no_session_can_do_is_refused_by_the_name_that_the_client_gave(asked, key, words):
    with pytest.raises(Refused) as caught:
        operation(asked)
    (problem,) = caught.value.problems
    assert caught.value.reason == "INVALID" and words in caught.value.message
    assert key in problem.key


def test_log_probs_are_written_one_sequence_after_the_other_with_where_each_begins():
    figures = {"loss:sum": 2.5, "without": 1.0}
    made = forward_output(ForwardResult(kind="forward", log_probs=[[-1, -2], [], [-3]], metrics=figures), 1)
    found = pb.ForwardBackwardOutput.FromString(made)
    (record,) = found.loss_fn_outputs
    field = record.fields["logprobs"]
    assert np.frombuffer(field.data, "<f4").tolist() == [-1, -2, -3]
    assert np.frombuffer(field.offsets, "<i8").tolist() == [0, 8, 8, 12]
    assert record.num_datums == 3 and field.dtype == FLOAT
    assert dict(found.metrics) == {"loss:sum": 2.5}, "the client adds up only what says how"


def test_samples_have_nan_where_a_prompt_has_no_log_prob_and_only_the_last_ones_that_were_asked_for():
    sequences = [SampledSequence(tokens=[3, 4], log_probs=[-1, -2], stop_reason="length")]
    sequences += [SampledSequence(tokens=[], log_probs=[], stop_reason="stop")]
    result = SampleResult(
        version=1,
        sequences=sequences,
        prompt_log_probs=[None, -0.5, -0.25],
        top_prompt_log_probs=[None, [(7, -0.5), (8, -1)], [(9, -2)]],
    )
    found = pb.SampleResponse.FromString(sample_output(result, 0))
    assert [each.stop_reason for each in found.sequences] == [
        pb.STOP_REASON_LENGTH,
        pb.STOP_REASON_UNSPECIFIED,
    ]
    assert np.frombuffer(found.sequences[0].tokens, "<i4").tolist() == [3, 4]
    assert np.frombuffer(found.sequences[0].logprobs, "<f4").tolist() == [-1, -2]
    assert np.array_equal(np.frombuffer(found.prompt_logprobs, "<f4"), [np.nan, -0.5, -0.25], equal_nan=True)
    top = found.topk_prompt_logprobs
    assert (top.k, top.length) == (2, 3)
    assert np.frombuffer(top.token_ids, "<i4").tolist() == [0, 0, 7, 8, 9, 0]
    assert np.frombuffer(top.logprobs, "<f4").tolist() == [-99999, -99999, -0.5, -1, -2, -99999]
    last = pb.SampleResponse.FromString(sample_output(result, 1))
    assert np.array_equal(np.frombuffer(last.prompt_logprobs, "<f4"), [np.nan, np.nan, -0.25], equal_nan=True)
    assert np.frombuffer(last.topk_prompt_logprobs.token_ids, "<i4").tolist() == [0, 0, 0, 0, 9, 0]
