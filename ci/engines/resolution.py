"""What pip resolves for GPUs, recorded and checked: `python -m ci.engines.resolution [--write]`.

A target is what one environment or image installs: an engine with our dists, or the trainers' own environment. Its file
of constraints has a line a package and below it, as comments, what that package wants on 64-bit Linux. pip alone is
asked, so no GPU is needed and nothing is downloaded but metadata. `resolve_recorded` asks pip the same without an
index, of empty wheels that want what was recorded: so `make test` sees a requirement of ours that an engine refuses.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.engines.environments import ENGINES, ROOT

RESOLVE_S = 600
_HERE = {"python_version": "3.11", "python_full_version": "3.11.0"}
"""The Python of the images. The pins hold for others where an engine wants no more there."""
_OFFLINE = ("NewConnectionError", "ConnectTimeout", "Name or service not known", "Temporary failure in name")
_BESIDE_TORCH = {"torchaudio", "torchcodec", "torchvision", "triton"}
"""Each release of these is for one of torch, which only their own metadata says."""
_HEAD = """\
# {title}
# Made by `python -m ci.engines.resolution --write`; below each package what it wants, from which `make test` resolves
# again without an index.
"""


class Unresolved(Exception):
    """What pip cannot resolve, in its words."""


class Offline(Exception):
    """No index answers."""


@dataclass(frozen=True)
class Target:
    """What is installed together. `preferred`: a file of constraints whose pins it shares where it can."""

    name: str
    image: str
    """Of `deploy/requirements.py`, whose list it installs."""
    pinned: str
    preferred: str
    title: str

    @property
    def file(self) -> Path:
        """Its constraints."""
        return ROOT / "constraints" / f"{self.name}.txt"

    @property
    def requirements(self) -> list[str]:
        """What our dists want of others, and the release that is tested."""
        lists = runpy.run_path(str(ROOT / "deploy" / "requirements.py"))
        dists = lists["IMAGES"][self.image]
        return [*sorted(set[str]().union(*map(lists["third_party"], dists))), self.pinned]


TARGETS = (
    Target(
        "vllm-cuda",
        "rollout-vllm",
        ENGINES["vllm"].requirement,
        "vllm-cpu.txt",
        "vLLM on NVIDIA GPUs: .envs/vllm (make engines ENGINE=vllm) and the image rollout-vllm.",
    ),
    Target(
        "sglang-cuda",
        "rollout-sglang",
        ENGINES["sglang"].requirement,
        "sglang-cpu.txt",
        "SGLang on NVIDIA GPUs: .envs/sglang (make engines ENGINE=sglang) and the image rollout-sglang.",
    ),
    Target(
        "torch-cuda",
        "torch",
        "torch==2.13.0",
        "base.txt",
        "Trainers and the built-in engine on NVIDIA GPUs: what .venv and the images trainer and rollout hold there.",
    ),
)


@dataclass(frozen=True)
class Package:
    """One that was resolved: its release, and what it wants here."""

    name: str
    version: str
    wants: tuple[str, ...]


def resolve(
    requirements: Sequence[str], *options: str, environ: Mapping[str, str] | None = None
) -> list[Package]:
    """What pip would install into an empty environment. Raises Unresolved and Offline with its words."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", str(report), *options, *requirements]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RESOLVE_S, env=environ, cwd=folder, check=False
        )
        if done.returncode:
            words = done.stderr.strip()
            raise (Offline if any(sign in words for sign in _OFFLINE) else Unresolved)(words[-3000:])
        installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    return sorted(
        _with_extras(requirements, [each["metadata"] for each in installed]), key=lambda package: package.name
    )


def _with_extras(requirements: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[Package]:
    """Packages with what they want here, that of the extras included by which others want them."""
    from packaging.requirements import Requirement

    extras = {plain(asked.name): set(asked.extras) for asked in map(Requirement, requirements)}
    while True:
        before = {name: set(chosen) for name, chosen in extras.items()}
        found = [_package(each, extras) for each in metadata]
        if extras == before:
            return found


def _package(metadata: Mapping[str, Any], extras: dict[str, set[str]]) -> Package:
    """One package; the extras of which it wants others are added to `extras`."""
    from packaging.requirements import Requirement

    name, wants = plain(metadata["name"]), set[str]()
    for wanted in map(Requirement, metadata.get("requires_dist", [])):
        chosen = ("", *extras.get(name, ()))
        if wanted.marker is None or any(wanted.marker.evaluate({**_HERE, "extra": each}) for each in chosen):
            wants.add(f"{plain(wanted.name)}{wanted.specifier}")
            extras.setdefault(plain(wanted.name), set()).update(wanted.extras)
    return Package(name, metadata["version"], tuple(sorted(wants)))


def plain(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def from_index(target: Target, *options: str) -> list[Package]:
    """What pip resolves of a target from its index, whatever folders of wheels this machine has beside."""
    with tempfile.TemporaryDirectory() as empty:
        environ = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": empty}
        # Where an extra index has torch's CPU build, pip takes that before the CUDA build.
        environ.pop("PIP_EXTRA_INDEX_URL", None)
        asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
        index = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        if index:
            environ.setdefault("PIP_INDEX_URL", index)
        return resolve(target.requirements, *options, environ=environ)


def record(target: Target) -> None:
    """Resolves a target and writes its file: pins of `preferred` where nothing of the target wants another release."""
    free = from_index(target)
    held = {plain(name) for package in free for name in map(_exactly, package.wants) if name} | _BESIDE_TORCH
    lines = (ROOT / "constraints" / target.preferred).read_text(encoding="utf-8").splitlines()
    shared = [
        line
        for line in lines
        if "==" in line and line[0] != "#" and plain(line.partition("==")[0]) not in held
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(shared))
        constraints.flush()
        try:
            found = from_index(target, "-c", constraints.name)
        except Unresolved as error:
            print(f"{target.name}: not with the pins of {target.preferred}: {error}", file=sys.stderr)
            found = free
    target.file.write_text(_written(target, found), encoding="utf-8")


def _exactly(wanted: str) -> str:
    """The name of a package of which an exact or an older release is wanted; empty for any other wish."""
    found = re.match(r"([a-z0-9-]+).*(==|<|~=)", wanted)
    return found[1] if found else ""


def _written(target: Target, packages: Sequence[Package]) -> str:
    lines = [_HEAD.format(title=target.title)]
    for package in packages:
        lines += [f"{package.name}=={package.version}\n", *(f"#   {wanted}\n" for wanted in package.wants)]
    return "".join(lines)


def recorded(target: Target) -> list[Package]:
    """What a target's file says."""
    found: list[Package] = []
    for line in target.file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#   "):
            last = found.pop()
            found.append(Package(last.name, last.version, (*last.wants, line[4:])))
        elif "==" in line and line[0] != "#":
            name, _, version = line.partition("==")
            found.append(Package(name, version, ()))
    return found


def resolve_recorded(target: Target, requirements: Sequence[str], folder: Path) -> list[Package]:
    """What pip resolves below a target's pins with no index, of empty wheels made in `folder`. Raises Unresolved."""
    for package in recorded(target):
        write_wheel(folder, package)
    environ = {
        **os.environ,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(folder),
        "PIP_NO_INDEX": "1",
    }
    return resolve(requirements, "-c", str(target.file), environ=environ)


def write_wheel(folder: Path, package: Package) -> Path:
    """A wheel with nothing but what it is called and wants."""
    name = package.name.replace("-", "_")
    info = f"{name}-{package.version}.dist-info"
    file = folder / f"{name}-{package.version}-py3-none-any.whl"
    head = f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", head + "".join(f"Requires-Dist: {each}\n" for each in package.wants)
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return file


def differences(target: Target, found: Sequence[Package]) -> list[str]:
    """What an index says otherwise than a target's file, a line a package."""
    said = {package.name: package for package in recorded(target)}
    now = {package.name: package for package in found}
    lines = [f"{name}=={now[name].version} is missing" for name in now.keys() - said.keys()]
    lines += [f"{name}=={said[name].version} is not wanted" for name in said.keys() - now.keys()]
    for name in now.keys() & said.keys():
        if now[name] != said[name]:
            lines.append(f"{name}: {said[name]} is {now[name]} now")
    return sorted(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 where a target cannot be resolved or is recorded otherwise; without an index 1 in CI alone."""
    parser = argparse.ArgumentParser(prog="python -m ci.engines.resolution", description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="resolve anew, and write the files of constraints"
    )
    names = [target.name for target in TARGETS]
    parser.add_argument("targets", nargs="*", choices=[*names, []], metavar="TARGET", help=", ".join(names))
    given = parser.parse_args(arguments)
    status = 0
    for target in TARGETS:
        if given.targets and target.name not in given.targets:
            continue
        try:
            if given.write:
                record(target)
            wrong = differences(target, from_index(target, "-c", str(target.file)))
        except Offline as error:
            required = os.environ.get("CI") == "true"
            print(
                f"{target.name}: no package index answers{'' if required else ', so it is left out'}: {error}"
            )
            status = max(status, int(required))
            continue
        except Unresolved as error:
            wrong = [f"pip does not resolve it:\n{error}"]
        for line in wrong:
            print(f"constraints/{target.name}.txt: {line}")
        if wrong:
            status = 1
            print("python -m ci.engines.resolution --write resolves it anew")
        else:
            print(f"{target.name}: pip resolves {len(recorded(target))} packages, as recorded", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
