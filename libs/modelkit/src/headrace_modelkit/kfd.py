"""Memory of AMD GPUs by process, as the kernel's compute driver counts it, in files. Knows no torch and no lease."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
_KFD = "sys/class/kfd/kfd"


def used_by(identifiers: Sequence[str], pids: Iterable[int], root: Path = ROOT) -> int | None:
    """Bytes that processes use on GPUs, which are named by the sixteen digits of their `unique_id`.

    None where the driver does not say: in a container whose process ids are not the host's none of them is listed.
    """
    numbers = {number for number, identifier in _numbers(root).items() if identifier in identifiers}
    counted = [_of_process(root / _KFD / "proc" / str(pid), numbers) for pid in pids]
    listed = [size for size in counted if size is not None]
    return sum(listed) if listed and len(numbers) == len(identifiers) else None


def _of_process(folder: Path, numbers: Iterable[str]) -> int | None:
    if not folder.is_dir():
        return None
    total = 0
    for number in numbers:
        with suppress(OSError, ValueError):  # the process ended meanwhile, or uses none of it
            total += int((folder / f"vram_{number}").read_text())
    return total


def _numbers(root: Path) -> dict[str, str]:
    """The driver's number of each GPU, and its identifier."""
    found = {}
    for node in (root / _KFD / "topology/nodes").glob("*"):
        with suppress(OSError, ValueError):
            lines = (line.split() for line in (node / "properties").read_text().splitlines())
            facts = {line[0]: line[1] for line in lines if len(line) == 2}
            number = (node / "gpu_id").read_text().strip()
            if number != "0":
                found[number] = f"{int(facts.get('unique_id', '0')):016x}"
    return found
