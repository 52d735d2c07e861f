"""Both ends of a stream over a socket, without a server between them."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from headrace_servicekit.process.local import LocalCall, LocalStream, LocalStreams
from headrace_servicekit.process.worker_pipes import LENGTH
from headrace_servicekit.rpc.client import MAX_MESSAGE_BYTES
from headrace_servicekit.rpc.errors import ServiceError, reason_of

MIB = 1024 * 1024


async def ends() -> tuple[LocalStream, LocalStream]:
    made = []
    for end in socket.socketpair():
        stream = LocalStream(*await asyncio.open_connection(sock=end))
        stream.frames.most = MAX_MESSAGE_BYTES
        made.append(stream)
    return made[0], made[1]


class Call:
    """The gRPC call beside a stream."""

    cancelled = False

    def add_done_callback(self, callback):
        pass

    async def read(self):
        return grpc.aio.EOF

    def cancel(self):
        self.cancelled = True
        return True


async def test_a_reader_that_is_slow_holds_its_writer():
    near, far = await ends()
    bodies = [bytes([place]) * MIB for place in range(24)]

    async def send():
        for body in bodies:
            await near.write(body)
        near.end()

    sending = asyncio.create_task(send())
    for body in bodies:
        assert near._writer.transport.get_write_buffer_size() < 2 * MIB
        assert await far.read() == body
    assert await far.read() is None
    await sending
    near.close()
    far.close()


async def test_a_server_that_dies_inside_a_frame_is_told_from_one_that_ends():
    near, far = await ends()
    call = LocalCall(beside := Call(), near, BytesValue.FromString)
    await far.write(BytesValue(value=b"whole").SerializeToString())
    assert (await call.read()).value == b"whole"
    far._writer.write(LENGTH.pack(100) + b"half")
    far.close()
    with pytest.raises(ServiceError, match="inside a frame, after 8 bytes") as caught:
        await call.read()
    assert reason_of(caught.value) == "BROKEN_FRAME" and beside.cancelled
    near, far = await ends()
    far.close()
    assert await LocalCall(Call(), near, BytesValue.FromString).read() is grpc.aio.EOF
    near.close()


async def test_a_directory_without_room_for_a_socket_says_so(tmp_path):
    streams = LocalStreams(tmp_path / "gone")
    await streams.listen()
    assert "no socket can be made" in streams.why_not and "No such file" in streams.why_not
    streams.close()
