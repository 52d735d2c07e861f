"""Items in unnamed files: memory has a few bytes of each, whatever its size. Knows no sources and no runs.

The files stand in the folder for temporary files (TMPDIR) and have no name: they go with the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from headrace_schema.images import Kind
from headrace_servicekit.rpc.digests import digest_bytes

from headrace_coordinator.data.items import DataItem

PENDING_BYTES = 1 << 20
RECENT = 512
"""Items that stay unpacked, without their images: each is asked for by every trajectory of its group."""
HASH_BYTES = 16
WORDS = np.dtype([("high", ">u8"), ("low", ">u8")])
"""A hash as two numbers, by which hashes are ordered as bytes are."""


class Records:
    """Byte strings by number, in an unnamed file: all are written, then any thread reads. OSError of the disk."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - it lives as long as the records do
        self._starts = array("Q", [0])
        self._pending: list[bytes] = []
        self._waiting = 0

    def append(self, content: bytes) -> None:
        """Adds the next one."""
        self._pending.append(content)
        self._waiting += len(content)
        self._starts.append(self._starts[-1] + len(content))
        if self._waiting > PENDING_BYTES:
            self.flush()

    def read(self, number: int) -> bytes:
        """One of them, once they are flushed."""
        start = self._starts[number]
        return os.pread(self._file.fileno(), self._starts[number + 1] - start, start)

    def read_all(self, numbers: np.ndarray) -> Iterator[bytes]:
        """Those of ascending numbers, read by PENDING_BYTES and more at once: a call for each takes far longer."""
        starts = np.frombuffer(self._starts, np.uint64)
        begins, ends = starts[numbers].tolist(), starts[numbers + 1].tolist()
        content, first, known = b"", 0, 0
        for begin, end in zip(begins, ends, strict=True):
            if end > known:
                first, known = begin, max(end, begin + PENDING_BYTES)
                content = os.pread(self._file.fileno(), known - first, first)
            yield content[begin - first : end - first]

    def flush(self) -> None:
        """Writes what waits."""
        content = b"".join(self._pending)
        written = 0
        while written < len(content):
            written += self._file.write(memoryview(content)[written:])
        self._pending, self._waiting = [], 0


class PackedItems:
    """Items by number, each unpacked when it is asked for, and what is known of all of them together."""

    def __init__(self, items: Iterable[DataItem]) -> None:
        """Reads all items, once."""
        self.fields: Counter[str] = Counter()
        """How many items have a template field, by its name."""
        self.conversations = 0
        """Items with earlier turns."""
        self.system_messages = 0
        """Items that begin with a system message of their own."""
        self.pictured: Counter[tuple[tuple[Kind, ...], tuple[Kind, ...]]] = Counter()
        """Number of items with images, by (kinds of the marks in their texts, kinds of the images)."""
        parts, answered = array("i"), bytearray()
        shapes: Counter[tuple[str, ...]] = Counter()
        keys, rows = bytearray(), bytearray()
        self._rows, self._keys, self._images = Records(), Records(), Records()
        self._recent: dict[int, DataItem] = {}
        self._places: dict[str, int] = {}
        """Where each image is, by its digest."""
        for item in items:
            row, key = _packed(item, [self._kept(image) for image in item.images]), item.key.encode()
            self._rows.append(row)
            self._keys.append(key)
            keys += hash_of(key)
            rows += hash_of(row)
            part = item.fields.get("part", 0)
            parts.append(part if isinstance(part, int) else 0)
            answered.append(bool(item.answer))
            shapes[tuple(item.fields)] += 1
            if item.images:
                self.pictured[tuple(sorted(item.marks)), tuple(sorted(item.kinds))] += 1
            if item.messages:
                self.conversations += len(item.messages) > 1
                self.system_messages += item.messages[0]["role"] == "system"
        for names, count in shapes.items():
            self.fields.update(dict.fromkeys(names, count))
        self._rows.flush()
        self._keys.flush()
        self._images.flush()
        self.key_hashes = np.frombuffer(bytes(keys), WORDS)
        self.row_hashes = np.frombuffer(bytes(rows), WORDS)
        """Hashes of everything that an item has."""
        self.parts = np.frombuffer(parts.tobytes(), np.int32)
        """The template field `part` of each, where it is a number."""
        self.answered = np.frombuffer(bytes(answered), np.bool_)

    def __len__(self) -> int:
        return len(self.key_hashes)

    def __getitem__(self, number: int) -> DataItem:
        if (found := self._recent.get(number)) is not None:
            return found
        question, answer, fields, metadata, messages, own_id, images, given = json.loads(
            self._rows.read(number)
        )
        files = tuple(self._images.read(self._places[digest]) for digest in images)
        item = DataItem(question, answer, fields, metadata, tuple(messages), own_id, files, given)
        if not files:
            if len(self._recent) >= RECENT:
                self._recent = {}  # A new one: another thread may read the old one.
            self._recent[number] = item
        return item

    def _kept(self, image: bytes) -> str:
        """The digest of an image, which is kept once however many items have it."""
        digest = digest_bytes(image)
        if digest not in self._places:
            self._places[digest] = len(self._places)
            self._images.append(image)
        return digest

    def key(self, number: int) -> bytes:
        """`DataItem.key` of an item, in UTF-8."""
        return self._keys.read(number)

    def keys(self, numbers: np.ndarray) -> Iterator[bytes]:
        """`key` of items of ascending numbers."""
        return self._keys.read_all(numbers)


def hash_of(content: bytes) -> bytes:
    """HASH_BYTES, the same in every process."""
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


def in_order(hashes: np.ndarray) -> np.ndarray:
    """Places of hashes, (N,) of WORDS, in ascending order; equal ones as they stand."""
    return np.lexsort((hashes["low"], hashes["high"]))


def _packed(item: DataItem, images: list[str]) -> bytes:
    row = [
        item.question,
        item.answer,
        item.fields,
        item.metadata,
        item.messages,
        item.id,
        images,
        item.arguments,
    ]
    try:
        return _encode(row)
    except UnicodeEncodeError:  # Halves of surrogate pairs, which a source of one's own may have.
        return json.dumps(row, ensure_ascii=False, default=_mapping).encode("utf-8", "surrogatepass")


def _mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not of JSON's types")


_encode = msgspec.json.Encoder(enc_hook=_mapping).encode
