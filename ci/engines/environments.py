"""Makes .envs/ENGINE with the build of an engine for the devices of this machine: `make engines ENGINE=vllm`.

`python -m ci.engines.environments vllm|sglang`, from the root of the checkout, by any Python of 3.11 or newer. The
device is what the machine has, or what `--device` says. On the CPU it is a test arrangement, whose pins are the whole
environment, so that nothing is resolved. For GPUs pip resolves the engine with our own dists, below the pins that
`ci.engines.resolution` has checked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "libs" / "servicekit" / "src"))  # no environment is needed to look for GPUs

from headrace_servicekit.lease.gpus import Amd, Maker, Nvidia, find_gpus  # noqa: E402

AUTO = "auto"
MAKERS: Mapping[str, Maker] = {"cuda": Nvidia(), "rocm": Amd()}
NAMES = {"cuda": "NVIDIA GPU", "rocm": "AMD GPU"}
_OWN = ("proto", "libs/servicekit", "libs/schema", "libs/modelkit")
_SHIMS = "integration_tests/engines"
_BUILT = "import torch; print('cuda' if torch.version.cuda else 'rocm' if torch.version.hip else 'cpu')"


class Refused(Exception):
    """What cannot be made; the message names the key and the fix."""


@dataclass(frozen=True)
class Source:
    """Where torch comes from (on AMD's GPUs the engine too), when not from pip's own index."""

    index_url: str = ""
    find_links: str = ""

    def options(self, index: str = "--index-url") -> list[str]:
        """For pip."""
        found = [index, self.index_url] if self.index_url else []
        return [*found, *(("--find-links", self.find_links) if self.find_links else ())]


@dataclass(frozen=True)
class Engine:
    """An engine's release, and what it is installed with. `own`: our dists, of which the last one's extra names it."""

    name: str
    version: str
    own: tuple[str, ...]
    shims: tuple[str, ...]
    """Folders of modules that its CPU arrangement needs at the start of every process."""
    devices: tuple[str, ...]

    @property
    def requirement(self) -> str:
        """As pip reads it."""
        return f"{self.name}=={self.version}"

    def pins(self, device: str) -> Path:
        """The constraints of its environment on a kind of device."""
        return ROOT / "constraints" / f"{self.name}-{device}.txt"


ENGINES = {
    "vllm": Engine(
        name="vllm",
        version="0.32.0",
        own=(*_OWN, "plugins/robots", "services/rollout[vllm]"),
        shims=(f"{_SHIMS}/torchvision_cpu",),
        devices=("cpu", "cuda", "rocm"),
    ),
    "sglang": Engine(
        name="sglang",
        version="0.5.23",
        own=(*_OWN, "plugins/robots", "services/rollout", "plugins/sglang[engine]"),
        shims=(f"{_SHIMS}/sglang_cpu", f"{_SHIMS}/torchvision_cpu"),
        devices=("cpu", "cuda"),
    ),
}


def device_of(
    engine: Engine,
    asked: str,
    source: Source = Source(),
    *,
    elsewhere: bool = False,
    makers: Mapping[str, Maker] = MAKERS,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """The kind of device that an environment is made for; `elsewhere`: on another machine. Raises Refused."""
    here = [name for name, maker in makers.items() if find_gpus(environ, (maker,))]
    device = (here or ["cpu"])[0] if asked == AUTO else asked
    if device not in ("cpu", *NAMES):
        raise Refused(f"DEVICE: {device!r} is no kind of device: write cpu, cuda or rocm, or leave it out")
    if device not in engine.devices:
        raise Refused(
            f"DEVICE={device}: {engine.name} publishes no build for an {NAMES[device]}: take ENGINE=vllm, or "
            "DEVICE=cpu for its test arrangement on the CPU"
        )
    if device in NAMES and device not in here and not elsewhere:
        raise Refused(
            f"DEVICE={device}: this machine shows no {NAMES[device]} (of those that its variables leave): leave "
            "DEVICE out for the build that fits it, or say ELSEWHERE=1 where the environment is for another machine"
        )
    if device == "rocm" and source == Source():
        raise Refused(
            f"DEVICE=rocm: the package index has no build of {engine.requirement} for an AMD GPU: name the index "
            "(TORCH_INDEX_URL=) or the page or folder of wheels (TORCH_FIND_LINKS=) that has it with its torch; "
            "DEVICE=cpu makes the test arrangement on the CPU"
        )
    return device


def commands(engine: Engine, device: str, source: Source, pip: Sequence[str]) -> list[list[str]]:
    """What fills an empty environment, one command after the other."""
    install, pins = [*pip, "install", "-q", "--no-compile"], engine.pins(device)
    if device == "cpu":
        # Without what nothing of the contract imports: the pins hold all the rest. torch brings what its build needs: a
        # CUDA build, which pip's own index has, is not imported without its libraries.
        own = [_folder(each) for each in engine.own if each != "plugins/robots"]
        return [
            [*install, *source.options(), pin(pins, "torch")],
            [*install, "--no-deps", "-r", str(pins)],
            [*install, "--no-deps", "--no-build-isolation", *_editable(own)],
        ]
    tools = [*install, "-c", "constraints/base.txt", "hatchling", "editables"]
    if device == "rocm":
        more = source.options("--extra-index-url")
        return [tools, [*install, "--no-build-isolation", *more, engine.requirement, *_editable(engine.own)]]
    below = [*install, "-c", str(pins)]
    return [
        tools,
        [*below, "--no-deps", *source.options(), pin(pins, "torch")],
        [*below, "--no-build-isolation", engine.requirement, *_editable(engine.own)],
        [*pip, "check"],
    ]


def make(engine: Engine, device: str, source: Source, python: str, folder: Path) -> None:
    """Makes an environment anew where it is not there, not whole, older than its pins or for another device.

    Raises Refused where torch turns out to be of another build, CalledProcessError where pip fails.
    """
    stamp = folder / ".complete"
    if is_made(engine, device, stamp):
        return
    print(f"engines: making {folder} for {device} takes some minutes the first time", flush=True)
    if stamp.exists() and (before := stamp.read_text(encoding="utf-8").strip()) != device:
        print(f"engines: it was for {before or 'an earlier arrangement'}, which is removed", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    inside = str(folder / "bin" / "python")
    for command in commands(engine, device, source, [inside, "-m", "pip"]):
        subprocess.run(command, check=True, cwd=ROOT)
    if device == "cpu":
        _write_shims(engine, inside)
    else:
        require_build(device, inside)
    stamp.write_text(f"{device}\n", encoding="utf-8")


def is_made(engine: Engine, device: str, stamp: Path) -> bool:
    """Whether an environment is whole, for a device, and made after what it is made from."""
    if not stamp.exists() or stamp.read_text(encoding="utf-8").strip() != device:
        return False
    made_from = [Path(__file__), *(file for file in (engine.pins(device),) if file.exists())]
    return all(file.stat().st_mtime < stamp.stat().st_mtime for file in made_from)


def require_build(device: str, python: str) -> None:
    """Raises Refused where an environment's torch was built for other devices, as a folder of CPU wheels makes it."""
    built = subprocess.run([python, "-c", _BUILT], capture_output=True, text=True, check=True).stdout.strip()
    if built != device:
        raise Refused(
            f"DEVICE={device}: pip took a torch that was built for {built}: name where one for {device} comes from "
            "(TORCH_INDEX_URL= or TORCH_FIND_LINKS=), and take folders of other wheels out of pip's configuration "
            "(pip config list)"
        )


def pin(pins: Path, name: str) -> str:
    """A package's line of a file of constraints."""
    lines = pins.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def _folder(dist: str) -> str:
    return dist.partition("[")[0]


def _editable(dists: Sequence[str]) -> list[str]:
    return [word for dist in dists for word in ("-e", f"./{dist}")]


def _write_shims(engine: Engine, python: str) -> None:
    """Lines for the path, and one that runs at the start of every process, also of those that the engine starts."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    lines = [*(str(ROOT / shim) for shim in engine.shims), "import torchvision_cpu_shim"]
    (Path(site) / f"headrace_{engine.name}_cpu.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 2 where it is refused, 1 where pip failed."""
    parser = argparse.ArgumentParser(prog="python -m ci.engines.environments", description=__doc__)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--device", default=AUTO, metavar="cpu|cuda|rocm", help="default: what is here")
    parser.add_argument("--elsewhere", action="store_true", help="it is for another machine than this")
    parser.add_argument("--python", default=sys.executable, help="the Python of the environment")
    given = parser.parse_args(arguments)
    engine = ENGINES[given.engine]
    source = Source(os.environ.get("TORCH_INDEX_URL", ""), os.environ.get("TORCH_FIND_LINKS", ""))
    try:
        device = device_of(engine, given.device or AUTO, source, elsewhere=given.elsewhere)
        make(engine, device, source, given.python, Path(".envs") / engine.name)
    except Refused as refusal:
        print(f"make engines: {refusal}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(
            f"make engines: {' '.join(map(str, error.cmd[:5]))} … failed; its words are above",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
