"""Bytes that nobody wrote: each decoder of what comes from a wire or a disk gives a value or its own error.

Bounded by examples, with seeds that hypothesis derives from the test's name: the same on each machine.
"""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cryptography import x509
from google.protobuf.message import DecodeError
from harness.processes import ROOT
from headrace.common.v1 import common_pb2, recording_pb2, weights_pb2
from headrace_coordinator.domain import events
from headrace_schema.yaml_text import YamlProblem, read_yaml
from headrace_servicekit.image_files import BadImage, check_image, from_base64
from headrace_servicekit.process.worker_pipes import decode_json, read_frame
from headrace_servicekit.recording.files import BadRecording, framed, new_header, read_recording
from headrace_servicekit.rpc.certificates import (
    BadCertificate,
    certify,
    fingerprint,
    make_authority,
    request_certificate,
)
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.joining import answered, asking
from headrace_servicekit.rpc.roles import Identity, identity
from headrace_servicekit.rpc.tensors import decode_tensor, encode_tensor
from headrace_servicekit.rpc.trajectories import pack_routes, unpack_routes
from headrace_servicekit.weights.delta import BadChange, Part, apply, encode
from headrace_servicekit.weights.streaming import split_piece
from headrace_trainer.checkpoints.state import Damaged, read_claim, read_state
from headrace_trainer.errors import Refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = 100
CHECKPOINT = ROOT / "services/trainer/tests/golden/checkpoint"
ANY = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
BASE = np.arange(64, dtype=np.uint16)


@st.composite
def damaged(draw, good):
    """A good body with some bytes changed, cut out or put in; sometimes bytes of no sense at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    found = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(found) - 1, 0)))
        match draw(st.sampled_from(["set", "cut", "put", "end"])):
            case "set" if found:
                found[at] = draw(st.integers(0, 255))
            case "cut":
                del found[at : at + draw(st.integers(1, 8))]
            case "put":
                found[at:at] = draw(st.binary(max_size=8))
            case _:
                del found[at:]
    return bytes(found)


def tensor():
    return encode_tensor(np.arange(6, dtype=np.float32).reshape(2, 3)).SerializeToString()


def change():
    part, new = Part(0, 0, BASE.nbytes, BASE.itemsize), BASE ^ np.uint16(3)
    return encode(part, memoryview(new).cast("B"), memoryview(BASE).cast("B")).SerializeToString()


def applied(data):
    out = bytearray(BASE.nbytes)
    apply(
        weights_pb2.WeightChange.FromString(data), BASE.itemsize, memoryview(BASE).cast("B"), memoryview(out)
    )


def picture():
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (3, 2)).save(out, "PNG")
    return out.getvalue()


def recording():
    head = recording_pb2.RecordedPart(header=new_header(run="r", step=1))
    return gzip.compress(framed(head))


ASKED = asking("s", "b", {"rollout": b"PEM"})
EVENTS = (ROOT / "services/coordinator/tests/golden/events.jsonl").read_bytes().splitlines()
DECODERS = {
    **{
        f"event {json.loads(line)['type']}": (events.decode, line, msgspec.DecodeError, False)
        for line in EVENTS[::18]
    },
    "tensor": (
        lambda data: decode_tensor(common_pb2.Tensor.FromString(data), max_bytes=1 << 20),
        tensor,
        (ServiceError, DecodeError),
        False,
    ),
    "piece of weights": (
        split_piece,
        weights_pb2.FetchWeightsResponse(offset_bytes=9, data=b"abc").SerializeToString,
        DecodeError,
        False,
    ),
    "change of weights": (applied, change, (BadChange, DecodeError), False),
    "routes": (
        lambda data: unpack_routes(data, 64),
        lambda: pack_routes(bytes(range(60))),
        ValueError,
        False,
    ),
    "frame": (lambda data: read_frame(io.BytesIO(data)), b"\0\0\0\3abc", (ValueError, EOFError), False),
    "json of a worker": (decode_json, b'{"a": [1, 2.5, null]}', ValueError, False),
    "image": (check_image, picture, BadImage, False),
    "base64": (lambda data: from_base64(data.decode("latin-1")), b"aGVhZHJhY2U=", ValueError, False),
    "yaml": (
        lambda data: read_yaml(data.decode(errors="replace")),
        (ROOT / "examples/tiny.yaml").read_bytes,
        YamlProblem,
        False,
    ),
    "certificate": (fingerprint, lambda: AUTHORITY, BadCertificate, False),
    "request for a certificate": (lambda data: certify(FOLDER, data), lambda: REQUEST, BadCertificate, False),
    "answer of a head": (
        lambda data: answered("s", ASKED, json.loads(data)),
        b'{"authority": "a", "certificates": {"rollout": "b"}, "proof": "c"}',
        (BadCertificate, ValueError),
        False,
    ),
    "identity": (lambda data: identity([data.decode("latin-1")]), b"spiffe://fleet/rollout/b", (), False),
    "recording": (read_recording, recording, BadRecording, True),
    "state of a checkpoint": (read_state, (CHECKPOINT / "state.json").read_bytes, (Damaged, Refusal), True),
    "claim of a lineage": (read_claim, (CHECKPOINT / "lineage-2.json").read_bytes, (Damaged, Refusal), True),
}
"""What reads, a good body, what it may raise, and whether it reads a file."""
FOLDER, AUTHORITY, REQUEST = Path(), b"", b""


@pytest.fixture(scope="module", autouse=True)
def authority(tmp_path_factory):
    global FOLDER, AUTHORITY, REQUEST
    FOLDER = tmp_path_factory.mktemp("authority")
    make_authority(FOLDER, "head", "fleet")
    AUTHORITY = (FOLDER / "ca.pem").read_bytes()
    names = [Identity("fleet", "rollout", "b").uri, "10.0.0.1"]
    REQUEST = request_certificate(FOLDER / "asks", names)
    assert x509.load_pem_x509_csr(REQUEST).is_signature_valid


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_gives_a_value_or_its_own_error(name, tmp_path):
    read, good, errors, of_file = DECODERS[name]
    body = good() if callable(good) else good

    def decode(data):
        if not of_file:
            return read(data)
        (tmp_path / "file").write_bytes(data)
        return read(tmp_path / "file")

    @ANY
    @given(damaged(body))
    def whatever_comes(data):
        try:
            decode(data)
        except errors:
            pass

    if name not in ("answer of a head", "recording"):  # The one has no proof, the other no end.
        decode(body)
    whatever_comes()
