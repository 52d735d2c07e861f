"""The tensor codec: a round trip for every type, and no corruption that gets past the checks."""

import math

import ml_dtypes
import numpy as np
import pytest
from headrace.common.v1 import common_pb2
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.tensors import MAX_TENSOR_BYTES, NUMPY_TYPES, decode_tensor, encode_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

DTYPES = sorted(NUMPY_TYPES.values(), key=str)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
LIMIT = 1 << 20


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(SHAPES)
    if dtype == np.bool_:
        return draw(hnp.arrays(np.bool_, shape))
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)


def refusal(tensor, max_bytes=LIMIT):
    with pytest.raises(ServiceError) as caught:
        decode_tensor(tensor, max_bytes=max_bytes)
    assert caught.value.reason == "INVALID"
    return caught.value.message


@settings(deadline=None)
@given(arrays())
def test_every_array_comes_back_bit_for_bit(array):
    decoded = decode_tensor(
        common_pb2.Tensor.FromString(encode_tensor(array).SerializeToString()), max_bytes=LIMIT
    )
    assert decoded.dtype == array.dtype and decoded.shape == array.shape
    assert decoded.tobytes() == array.tobytes()
    assert decoded.flags.writeable and decoded.flags.c_contiguous


@settings(deadline=None)
@given(arrays(), st.integers(-9, 9).filter(bool))
def test_a_body_of_the_wrong_length_is_refused(array, extra):
    tensor = encode_tensor(array)
    data = bytes(tensor.data)
    tensor.data = data + bytes(extra) if extra > 0 else data[:extra]
    if len(tensor.data) != len(data):
        assert "needs" in refusal(tensor)


@settings(deadline=None)
@given(arrays(), st.data())
def test_a_changed_shape_of_another_size_is_refused(array, data):
    tensor = encode_tensor(array)
    shape = data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=20))
    elements = 1
    for extent in shape:
        elements *= extent
    if all(extent >= 0 for extent in shape) and len(shape) <= 16 and elements == array.size:
        return
    del tensor.shape[:]
    tensor.shape.extend(shape)
    refusal(tensor)


def test_a_huge_shape_is_refused_before_memory_is_taken():
    tensor = common_pb2.Tensor(data_type=common_pb2.DATA_TYPE_FLOAT32, shape=[2**62, 2**62], data=b"1234")
    assert "limit" in refusal(tensor)


def test_unknown_types_are_refused():
    for data_type in (0, 11, 99):
        assert "data_type" in refusal(common_pb2.Tensor(data_type=data_type, shape=[0], data=b""))


def test_a_tensor_above_the_limit_is_refused_although_it_is_sound():
    tensor = encode_tensor(np.zeros(100, np.float32))
    assert decode_tensor(tensor, max_bytes=400).size == 100
    assert "limit of 399" in refusal(tensor, 399)


def test_a_bool_is_0_or_1():
    assert "bool" in refusal(
        common_pb2.Tensor(data_type=common_pb2.DATA_TYPE_BOOL, shape=[2], data=b"\x01\x02")
    )


def test_a_blob_is_not_taken_for_an_empty_body():
    blob = common_pb2.BlobRef(blob_id="x")
    assert "blob" in refusal(common_pb2.Tensor(data_type=common_pb2.DATA_TYPE_UINT8, shape=[0], blob=blob))


def test_big_endian_and_strided_arrays_travel_by_value():
    array = np.arange(12, dtype=">i4").reshape(3, 4).T
    assert np.array_equal(decode_tensor(encode_tensor(array), max_bytes=LIMIT), array)


def test_bfloat16_keeps_its_type():
    array = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    assert encode_tensor(array).data_type == common_pb2.DATA_TYPE_BFLOAT16


def test_arrays_without_a_wire_form_are_refused():
    for array in (np.array(["a"]), np.array([1j]), np.array([object()])):
        with pytest.raises(ServiceError, match="cannot travel"):
            encode_tensor(array)


@settings(deadline=None)
@given(st.lists(st.integers(2**40, 2**63 - 1), min_size=1, max_size=15), st.sampled_from(sorted(NUMPY_TYPES)))
def test_extents_beyond_any_memory_are_refused_beside_a_zero_too(extents, data_type):
    if math.prod(extents) * NUMPY_TYPES[data_type].itemsize > MAX_TENSOR_BYTES:
        for place in range(len(extents) + 1):
            shape = [*extents[:place], 0, *extents[place:]]
            assert "limit" in refusal(common_pb2.Tensor(data_type=data_type, shape=shape))


@settings(deadline=None)
@given(
    st.integers(-(2**31), 2**31 - 1),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40),
    st.binary(max_size=64),
)
def test_whatever_comes_is_decoded_or_refused(data_type, shape, data):
    try:
        decoded = decode_tensor(
            common_pb2.Tensor(data_type=data_type, shape=shape, data=data), max_bytes=LIMIT
        )
    except ServiceError as error:
        assert error.reason == "INVALID"
    else:
        assert decoded.shape == tuple(shape) and decoded.nbytes == len(data)
