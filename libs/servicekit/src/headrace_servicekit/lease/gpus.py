"""The GPUs that this process can use, by maker: of those that the kernel shows, what the container and variables leave.

The kernel shows all of a machine's GPUs in every container. A container has the device nodes of only its GPUs, and a
variable such as CUDA_VISIBLE_DEVICES narrows that for one process. Knows no lease and imports no maker's library.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ROOT = Path("/")
ASK_S = 30
GPU_MEMORY = "gpu_memory"
"""Facet of an instance's capabilities: "GPU-8f2a…/gpu:0=85520809984", bytes of each GPU that it may be given."""
_OF_WSL = "/usr/lib/wsl/lib/nvidia-smi"
"""Windows puts it there, which not every shell has on its path."""
_PARAVIRTUAL = "dev/dxg"
"""WSL2's one device node for all GPUs: there is none a GPU."""
_MIG = re.compile(r"MIG (\S+).*Device\s+(\d+):.*\(UUID:\s*(MIG-[^)]+)\)")
_PROFILE = re.compile(r"\.(\d+)gb")
_DIVIDED = "proc/driver/nvidia/capabilities/gpu*/mig/gi*"
_WHOLE = re.compile(r"GPU \d+:.*\(UUID:\s*(GPU-[^)]+)\)")


@dataclass(frozen=True)
class Gpu:
    """`uuid` is the maker's name of it; `number` what people write: "0", of a MIG device "0.1"."""

    uuid: str
    number: str

    @property
    def name(self) -> str:
        """The name that leases use."""
        return f"{self.uuid}/gpu:{self.number}"


@dataclass(frozen=True)
class GpuUse:
    """How busy a GPU is, whoever uses it: the share of time in which it computed, and memory."""

    busy: float
    used_memory_bytes: int


class Maker(Protocol):
    """One maker's GPUs on this machine."""

    def gpus(self) -> Sequence[Gpu]:
        """Those whose device nodes this container has, as the maker's libraries number them."""

    def variables(self, environ: Mapping[str, str]) -> Sequence[str]:
        """Values that narrow what a process sees, each of what the one before left."""

    def use(self) -> dict[str, GpuUse]:
        """Use of this machine's GPUs by UUID; may take a tenth of a second."""

    def memory(self) -> dict[str, int]:
        """Bytes that each of this machine's GPUs has, by UUID, where that is known; may take as long."""


def gpu_memory(devices: Sequence[str], makers: Sequence[Maker] | None = None) -> list[str]:
    """The facet GPU_MEMORY of an instance with these devices; of those whose memory is not known, nothing."""
    gpus = {name.partition("/")[0]: name for name in devices if "/gpu:" in name}
    sizes = (
        {uuid: size for maker in makers or MAKERS for uuid, size in maker.memory().items()} if gpus else {}
    )
    return [f"{name}={sizes[uuid]}" for uuid, name in gpus.items() if uuid in sizes]


def read_gpu_memory(listed: Iterable[str]) -> dict[str, int]:
    """Bytes by device, of what `gpu_memory` wrote; what is of another form is left out."""
    pairs = (text.rpartition("=") for text in listed)
    return {name: int(size) for name, _, size in pairs if name and size.isdigit()}


def find_gpus(environ: Mapping[str, str], makers: Sequence[Maker]) -> list[Gpu]:
    """What a process with these variables can use: of the first maker that has any GPU here."""
    for maker in makers:
        if left := list(maker.gpus()):
            for value in maker.variables(environ):
                left = chosen(left, value)
            return left
    return []


def chosen(gpus: Sequence[Gpu], value: str) -> list[Gpu]:
    """Those that a value of CUDA_VISIBLE_DEVICES leaves, in its order: indices, UUIDs or beginnings of them.

    As CUDA reads it, the first entry that names none ends the list: an empty value or -1 leaves nothing.
    """
    found: list[Gpu] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.isdigit():
            named = list(gpus[int(entry) : int(entry) + 1])
        else:
            named = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(named) != 1:
            break
        found += [gpu for gpu in named if gpu not in found]
    return found


def ask_nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints; nothing where there is none, or it does not answer."""
    tool = shutil.which("nvidia-smi") or shutil.which(_OF_WSL)
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=ASK_S, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout


class Nvidia:
    """The driver's files, and nvidia-smi for what they lack: UUIDs that were not asked for yet, and MIG devices."""

    def __init__(self, root: Path = ROOT, ask: Callable[..., str] = ask_nvidia_smi) -> None:
        self._root, self._ask = root, ask

    def gpus(self) -> Sequence[Gpu]:
        """In the order of their places on the bus, as CUDA and nvidia-smi number equal ones."""
        files = sorted(self._root.glob("proc/driver/nvidia/gpus/*/information"))
        found = parse_gpus("\n".join(file.read_text() for file in files))
        if not files or len(found) < len(files):
            found = parse_gpus(self._ask("-q")) or found
        seen = _with_nodes(self._root, found, lambda gpu: f"dev/nvidia{gpu.number}", "dev/nvidia[0-9]*")
        divided = self._root.glob(_DIVIDED)
        return _divided(seen, self._ask("-L")) if seen and any(divided) else seen

    def variables(self, environ: Mapping[str, str]) -> Sequence[str]:
        """NVIDIA_VISIBLE_DEVICES says with these words that a container is to have none."""
        if environ.get("NVIDIA_VISIBLE_DEVICES") in ("none", "void"):
            return [""]
        return [environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in environ]

    def use(self) -> dict[str, GpuUse]:
        """By nvidia-smi. A part of a divided GPU has no figures of its own."""
        return parse_use(
            self._ask("--query-gpu=uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
        )

    def memory(self) -> dict[str, int]:
        """By nvidia-smi; of a MIG device by its profile, "3g.20gb"."""
        whole = self._ask("--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits")
        rows = (line.partition(",") for line in whole.splitlines())
        found = {uuid.strip(): int(mib) << 20 for uuid, _, mib in rows if mib.strip().isdigit()}
        if any(self._root.glob(_DIVIDED)):
            parts = filter(None, map(_MIG.match, map(str.strip, self._ask("-L").splitlines())))
            sized = ((part[3], _PROFILE.search(part[1])) for part in parts)
            found |= {uuid: int(size[1]) << 30 for uuid, size in sized if size}
        return found


class Amd:
    """The kernel's topology of compute devices."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def gpus(self) -> Sequence[Gpu]:
        """In the order of the topology's nodes, as ROCm numbers them."""
        renders = dict(self._nodes())
        return _with_nodes(
            self._root, list(renders), lambda gpu: f"dev/dri/renderD{renders[gpu]}", "dev/dri/renderD*"
        )

    def variables(self, environ: Mapping[str, str]) -> Sequence[str]:
        """ROCm's runtime reads the first; HIP reads of what is left its own, or else CUDA's."""
        of_hip = next(
            (name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in environ), ""
        )
        return [environ[name] for name in ("ROCR_VISIBLE_DEVICES", of_hip) if name in environ]

    def use(self) -> dict[str, GpuUse]:
        """By the files of the kernel's driver."""
        found = {}
        for gpu, render in self._nodes():
            folder = self._root / f"sys/class/drm/renderD{render}/device"
            with suppress(OSError, ValueError):
                busy = int((folder / "gpu_busy_percent").read_text()) / 100
                found[gpu.uuid] = GpuUse(busy, int((folder / "mem_info_vram_used").read_text()))
        return found

    def memory(self) -> dict[str, int]:
        """By the files of the kernel's driver."""
        found = {}
        for gpu, render in self._nodes():
            with suppress(OSError, ValueError):
                file = self._root / f"sys/class/drm/renderD{render}/device/mem_info_vram_total"
                found[gpu.uuid] = int(file.read_text())
        return found

    def _nodes(self) -> list[tuple[Gpu, str]]:
        """Each GPU of the topology with the number of its render node."""
        nodes = self._root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")
        found: list[tuple[Gpu, str]] = []
        for file in sorted(nodes, key=lambda file: int(file.parent.name)):
            facts = dict(line.split(maxsplit=1) for line in file.read_text().splitlines() if " " in line)
            if int(facts.get("simd_count", "0")):  # a node without is a CPU
                found.append((Gpu(_amd_uuid(facts), str(len(found))), facts.get("drm_render_minor", "")))
        return found


MAKERS: tuple[Maker, ...] = (Nvidia(), Amd())


def parse_gpus(text: str) -> list[Gpu]:
    """GPUs in the order of `nvidia-smi -q` or of the driver's files in /proc.

    GPUs whose UUID the driver does not know yet are left out. WSL2's have no minor number ("N/A"): they are numbered in
    their order, as CUDA numbers them.
    """
    found: list[Gpu] = []
    uuid = ""
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "GPU UUID":
            uuid = value
        elif key in ("Minor Number", "Device Minor") and uuid and "?" not in uuid:
            found.append(Gpu(uuid, value if value.isdigit() else str(len(found))))
    return found


def parse_use(text: str) -> dict[str, GpuUse]:
    """Lines `UUID, percent, MiB` of nvidia-smi; a GPU that does not tell both is left out."""
    found = {}
    for line in text.splitlines():
        uuid, _, figures = line.partition(",")
        with suppress(ValueError):
            percent, used = map(int, figures.split(","))
            found[uuid.strip()] = GpuUse(percent / 100, used << 20)
    return found


def _divided(gpus: Sequence[Gpu], listing: str) -> list[Gpu]:
    """The MIG devices of `nvidia-smi -L` in place of GPUs that are divided into such."""
    parts: dict[str, list[Gpu]] = {gpu.uuid: [] for gpu in gpus}
    numbers, owner = {gpu.uuid: gpu.number for gpu in gpus}, ""
    for line in map(str.strip, listing.splitlines()):
        if whole := _WHOLE.match(line):
            owner = whole[1]
        elif (part := _MIG.match(line)) and owner in parts:
            parts[owner].append(Gpu(part[3], f"{numbers[owner]}.{part[2]}"))
    return [each for gpu in gpus for each in (parts[gpu.uuid] or [gpu])]


def _with_nodes(root: Path, gpus: Sequence[Gpu], node: Callable[[Gpu], str], every: str) -> list[Gpu]:
    """Those whose device nodes are here. On a host itself nodes may be made when they are first used."""
    contained = (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
    if (root / _PARAVIRTUAL).exists() or (not contained and not any(root.glob(every))):
        return list(gpus)
    return [gpu for gpu in gpus if (root / node(gpu)).exists()]


def _amd_uuid(facts: Mapping[str, str]) -> str:
    unique = int(facts.get("unique_id", "0"))
    if unique:
        return f"GPU-{unique:016x}"
    return f"GPU-{int(facts.get('domain', '0')):04x}-{int(facts.get('location_id', '0')):04x}"  # by its place
