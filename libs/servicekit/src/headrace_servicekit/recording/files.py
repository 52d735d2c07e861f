"""The file of a recording: `recording.proto`'s parts, each behind its size, in gzip members that may be appended."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from google.protobuf import proto
from google.protobuf.message import DecodeError
from headrace.common.v1 import recording_pb2

from headrace_servicekit.folders import new_below, read_below, replace_below

FORMAT = 2
SUFFIX = ".recording"
LEVEL = 1
"""Compression level: higher ones take five times as long for a tenth less."""
Part = recording_pb2.RecordedPart


class BadRecording(Exception):
    """A file that cannot be replayed; one sentence that names it and says why."""


@dataclass
class Message:
    """A message of a call: `data` is encoded, `is_request` says who sent it, `place` where it stands in the file."""

    place: int
    at: float
    is_request: bool
    data: bytes


@dataclass
class Call:
    """One call: its messages in order, and how it ended; `ended_at` is None where the recording ended before it."""

    id: int
    kind: str
    incarnation: str
    method: str
    step: int
    place: int
    began_at: float
    messages: list[Message] = field(default_factory=list)
    reason: str = ""
    detail: str = ""
    ended_at: float | None = None
    end_place: int = -1

    @property
    def succeeded(self) -> bool:
        """Whether it ended, and without a refusal."""
        return self.ended_at is not None and not self.reason


@dataclass
class Recording:
    """A whole file: its header, and its calls in the order in which they began."""

    path: Path
    header: recording_pb2.RecordingHeader
    calls: list[Call]

    def of_kind(self, kind: str) -> list[Call]:
        """The calls to instances of a kind."""
        return [call for call in self.calls if call.kind == kind]

    def incarnations(self, kind: str) -> list[str]:
        """The instances of a kind that were called, in the order of their first calls."""
        return list(dict.fromkeys(call.incarnation for call in self.of_kind(kind)))

    def name_of(self, incarnation: str) -> str:
        """The instance's stable name; its incarnation where nobody knows it."""
        names = {each.incarnation: each.name for each in self.header.instances}
        return names.get(incarnation, incarnation)


class Member:
    """A gzip member of a recording, in a file of its own below `root`. One thread calls its methods."""

    def __init__(self, root: Path, path: Path) -> None:
        self.root, self.path = root, path
        self.parts = 0
        self.size = 0
        self._file: IO[bytes] | None = None
        self._packer = zlib.compressobj(LEVEL, wbits=31)

    def add(self, part: recording_pb2.RecordedPart) -> None:
        """Appends a part. Raises OSError."""
        self._write(self._packer.compress(framed(part)))
        self.parts += 1

    def close(self) -> None:
        """Ends the member; repeated calls do nothing. Raises OSError."""
        if self._file is not None:
            self._write(self._packer.flush())
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Closes and deletes it. Raises OSError."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._file = new_below(self.root, self.path)
        self._file.write(data)
        self.size += len(data)


def framed(part: recording_pb2.RecordedPart) -> bytes:
    """A part behind its size, a varint."""
    buffer = io.BytesIO()
    proto.serialize_length_prefixed(part, buffer)
    return buffer.getvalue()


def new_header(**fields: Any) -> recording_pb2.RecordingHeader:
    """A header with this format and version."""
    return recording_pb2.RecordingHeader(
        format=FORMAT, headrace_version=version("headrace-servicekit"), **fields
    )


def write_recording(
    root: Path,
    path: Path,
    header: recording_pb2.RecordingHeader,
    opening: Iterable[recording_pb2.RecordedPart],
    members: Iterable[Member],
) -> int:
    """Puts closed members behind the header and the parts of `opening`, below `root`; its bytes. Whole or not at all.

    Raises OSError.
    """
    parts = 1
    with replace_below(root, path, synced=True) as file:
        head = [framed(Part(header=header))]
        for part in opening:
            head.append(framed(part))
            parts += 1
        file.write(gzip.compress(b"".join(head), LEVEL, mtime=0))
        for member in members:
            with read_below(root, member.path) as source:
                while piece := source.read(1 << 20):
                    file.write(piece)
            parts += member.parts
        end = Part(end=recording_pb2.RecordingEnd(parts=parts))
        file.write(gzip.compress(framed(end), LEVEL, mtime=0))
        size = file.tell()
    return size


def read_header(path: Path) -> recording_pb2.RecordingHeader:
    """What a recording is of. Raises BadRecording."""
    return _header(path, next(_parts(path), None))


def read_recording(path: Path) -> Recording:
    """A whole recording. Raises BadRecording for another format, for a file that is damaged, and for one cut short."""
    parts = _parts(path)
    header = _header(path, next(parts, None))
    calls: dict[int, Call] = {}
    place, ended = 0, False
    for place, part in enumerate(parts, 1):
        if part.HasField("end"):
            ended = part.end.parts == place
            break
        _take(path, calls, place, part)
    if not ended:
        raise BadRecording(
            f"{path} is truncated after {place} parts; copy it anew, or take an older recording"
        )
    return Recording(path, header, sorted(calls.values(), key=lambda call: call.place))


def _take(path: Path, calls: dict[int, Call], place: int, part: recording_pb2.RecordedPart) -> None:
    """A call that goes on in another segment is begun there again."""
    if part.HasField("begun"):
        begun = part.begun
        if part.call not in calls:
            opening = [Message(place, part.at, True, begun.opening)] if begun.opening else []
            calls[part.call] = Call(
                part.call, begun.kind, begun.incarnation, begun.method, begun.step, place, part.at, opening
            )
        return
    call = calls.get(part.call)
    if call is None:
        raise BadRecording(f"{path} is damaged: part {place} is of call {part.call}, which never began")
    if call.ended_at is not None:
        return  # Among the openings, and in its segment too.
    if part.HasField("ended"):
        call.reason, call.detail = part.ended.reason, part.ended.detail
        call.ended_at, call.end_place = part.at, place
        return
    is_request = part.HasField("request")
    data = part.request if is_request else part.response
    call.messages.append(Message(place, part.at, is_request, data))


def _header(path: Path, part: recording_pb2.RecordedPart | None) -> recording_pb2.RecordingHeader:
    if part is None or not part.HasField("header"):
        raise BadRecording(f"{path} is no recording of Headrace: it does not begin with a recording's header")
    if part.header.format != FORMAT:
        raise BadRecording(
            f"{path} was written by Headrace {part.header.headrace_version} in format {part.header.format}, and this "
            f"Headrace reads format {FORMAT}; install headrace {part.header.headrace_version} to replay it"
        )
    return part.header


def _parts(path: Path) -> Iterator[recording_pb2.RecordedPart]:
    try:
        with gzip.open(path, "rb") as file:
            try:
                while part := proto.parse_length_prefixed(Part, file):  # type: ignore[arg-type]
                    yield part
            except (EOFError, zlib.error, DecodeError, ValueError, gzip.BadGzipFile) as error:
                if isinstance(error, gzip.BadGzipFile) and not file.tell():
                    raise BadRecording(f"{path} is no recording of Headrace: it is no gzip file") from error
                raise BadRecording(
                    f"{path} is truncated or damaged ({error}); copy it anew, or take an older recording"
                ) from error
    except OSError as error:
        raise BadRecording(f"{path}: {error.strerror or error}") from error
