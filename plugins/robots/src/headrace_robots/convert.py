"""Makes a policy directory of a published checkpoint: `python -m headrace_robots.convert --help`.

OpenVLA and OpenVLA-OFT; π0 and π0.5 of LeRobot and openpi; SmolVLA, ACT and diffusion policies of LeRobot; GR00T N1.7
of NVIDIA and LeRobot; WALL-OSS of X-Square and LeRobot. A run reads the result as `model.path`: `policy.json`,
`model.safetensors`, and a tokenizer.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file

from headrace_robots.policies import peft
from headrace_robots.policies.directory import load_policy, save_policy, tokenizer_files, written_aside
from headrace_robots.policies.policy import RobotPolicy
from headrace_robots.policies.published import Checkpoint, Wanted, read_json

_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
BASE_FILES = ("*.json", "*.jinja", "*.model")
"""Of a language model: its sizes and its tokenizer, not its weights."""
FAMILIES = ("openvla", "pi", "smolvla", "groot", "wall", "act", "diffusion")
"""Packages whose `published` module reads checkpoints: `recognises` a config.json, and `read` the policy."""


def convert(published: Path, target: Path, wanted: Wanted) -> None:
    """Writes `target`. Raises ModelNotReadable, which says what is missing or does not fit."""
    published, wanted = with_adapter(published, wanted)
    policy = load_published(published, wanted)
    source = wanted.base or published
    if policy.config.reads and not tokenizer_files(source):
        raise ModelNotReadable(
            f"{source} holds no tokenizer (tokenizer.json or tokenizer.model): a policy that reads language needs it; "
            "give the directory of the language model that it began with by --base"
        )
    save_policy(policy, target, tokenizer=source if policy.config.reads else None)


def deploy(published: Path, trained: Path, target: Path, wanted: Wanted) -> None:
    """Writes `target` as the checkpoint is, with the weights of a policy directory that was trained from it.

    LeRobot and openpi read it as they read `published`. Raises ModelNotReadable.
    """
    if target.exists():
        raise ModelNotReadable(f"{target} is there already; name a directory that is not")
    policy = load_policy(trained)
    own = policy.config.model_dump(include={"cameras", "embodiment"})
    wanted = replace(wanted, base=wanted.base or trained, chosen={**own, **wanted.chosen})
    published, wanted = with_adapter(published, wanted)
    weights = read_published(published, wanted).with_weights(policy)
    weight_files = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "adapter_*")
    left_out = shutil.ignore_patterns(*weight_files, ".cache", ".git")
    with written_aside(target) as aside:
        shutil.copytree(published, aside, ignore=left_out, dirs_exist_ok=True)
        if (stated := read_json(aside / "config.json")).get("use_peft"):  # its weights have the adapter now
            (aside / "config.json").write_text(json.dumps({**stated, "use_peft": False}, indent=4))
        name = "model.safetensors"
        # LeRobot tells GR00Ts of NVIDIA from its own by the file's name.
        if (published / f"{name}.index.json").is_file():
            name = "model-00001-of-00001.safetensors"
            index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
            (aside / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file(weights, aside / name, metadata={"format": "pt"})


def load_published(published: Path, wanted: Wanted) -> RobotPolicy:
    """The policy of a checkpoint. Raises ModelNotReadable."""
    checkpoint = read_published(published, wanted)
    try:
        return checkpoint.policy()
    except ValueError as error:
        raise ModelNotReadable(f"cannot read a checkpoint from {str(published)!r}: {error}") from error


def read_published(published: Path, wanted: Wanted) -> Checkpoint:
    """A checkpoint, by the family that its config.json is of. Raises ModelNotReadable."""
    published, wanted = with_adapter(published, wanted)
    stated = read_json(published / "config.json")
    modules: list[Any] = [
        import_module(f"headrace_robots.policies.{family}.published") for family in FAMILIES
    ]
    family = next((module for module in modules if module.recognises(stated)), None)
    if family is None:
        raise ModelNotReadable(
            f"{published / 'config.json'} is of no family that is read: {', '.join(FAMILIES)}"
        )
    try:
        found: Checkpoint = family.read(published, wanted)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ModelNotReadable(f"{place}: {first['msg']}".removeprefix(": ")) from error
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelNotReadable(f"cannot read a checkpoint from {str(published)!r}: {error}") from error
    return found


def with_adapter(published: Path, wanted: Wanted) -> tuple[Path, Wanted]:
    """Of adapters alone (peft's) where what they do not say is read: their directory, or the one of the checkpoint that
    they were trained beside. Raises ModelNotReadable.
    """
    if wanted.adapter is not None or not (published / peft.CONFIG).is_file():
        return published, wanted
    stated = read_json(published / peft.CONFIG)
    base = wanted.beside or directory_of(str(stated.get("base_model_name_or_path")))
    if not base.is_dir():
        raise ModelNotReadable(
            f"{peft.CONFIG}: base_model_name_or_path {str(base)!r} is no directory: name the checkpoint that the "
            "adapter was trained beside by --beside"
        )
    whole = published if (published / "config.json").is_file() else base
    return whole, replace(wanted, adapter=peft.Adapter(published, stated, base))


def directory_of(given: str, patterns: Sequence[str] | None = None) -> Path:
    """A directory, or the hub's copy of ORG/NAME or ORG/NAME@REVISION on this host. Raises ModelNotReadable."""
    if Path(given).exists() or not (named := _HUB.fullmatch(given)):
        return Path(given)
    try:
        allowed = None if patterns is None else list(patterns)
        return Path(snapshot_download(named["name"], revision=named["revision"], allow_patterns=allowed))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotReadable(f"{given} is no directory, and the hub does not give it: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 and a sentence when the checkpoint cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m headrace_robots.convert", description=__doc__)
    parser.add_argument(
        "published",
        help="the checkpoint as the hub has it: its directory, or ORG/NAME[@REVISION], which is fetched",
    )
    parser.add_argument("policy", type=Path, help="directory to write; one that is there is replaced")
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="TRAINED",
        help="a policy directory that was trained from the checkpoint, such as a run's export: POLICY is then written "
        "as the checkpoint is, with its weights, for LeRobot or openpi to deploy",
    )
    parser.add_argument(
        "--base",
        help="directory (or ORG/NAME) of the language model that it began with: tokenizer, sizes of SmolVLA, GR00T and "
        "WALL-OSS (of which it is X-Square's own)",
    )
    parser.add_argument(
        "--beside",
        help="of adapters (peft's LoRA): the checkpoint that they were trained beside, a directory or ORG/NAME; "
        "default: the one that adapter_config.json names",
    )
    parser.add_argument(
        "--statistics",
        type=Path,
        help="LeRobot's meta/stats.json or openpi's norm_stats.json, in place of its own",
    )
    parser.add_argument(
        "--clip",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="bounds of the environment's actions, in its units",
    )
    parser.add_argument("--unnorm-key", help="data set whose statistics un-normalise; default: the only one")
    parser.add_argument(
        "--cameras",
        nargs="+",
        help="names of the cameras, in their order; of LeRobot's: those that there are",
    )
    parser.add_argument(
        "--embodiment",
        help="GR00T of NVIDIA: the robot whose encoders and statistics are read; default: the only one",
    )
    parser.add_argument("--kind", choices=("openvla", "openvla_oft"), help="of OpenVLA; default: openvla")
    parser.add_argument("--chunk-length", type=int, help="actions executed of those drawn at once")
    parser.add_argument(
        "--head", choices=("tokens", "l1", "diffusion"), help="openvla_oft's action head; default: tokens"
    )
    parser.add_argument("--temperature", type=float, help="OpenVLA: of drawing and of scoring; default: 1")
    parser.add_argument(
        "--crop",
        type=float,
        help="OpenVLA: share of a picture that is read; 0.9 for those fine-tuned for LIBERO; default: 1",
    )
    parser.add_argument(
        "--flow",
        type=json.loads,
        help='π, SmolVLA, GR00T and WALL-OSS, in JSON: how actions are drawn, {"noise": "learned"}',
    )
    parser.add_argument(
        "--denoising",
        type=json.loads,
        help='diffusion and OFT, in JSON: how actions are drawn, {"steps": 10}',
    )
    parser.add_argument(
        "--log-std", type=float, help="log-width of a Gaussian around an action (OFT's l1, ACT)"
    )
    asked = parser.parse_args(arguments)
    fields = (
        "cameras",
        "embodiment",
        "kind",
        "chunk_length",
        "head",
        "temperature",
        "crop",
        "flow",
        "denoising",
        "log_std",
    )
    chosen = {name: value for name in fields if (value := getattr(asked, name)) is not None}
    try:
        clip = None if asked.clip is None else (asked.clip[0], asked.clip[1])
        published = directory_of(asked.published)
        base = directory_of(asked.base, BASE_FILES) if asked.base else None
        beside = directory_of(asked.beside) if asked.beside else None
        wanted = Wanted(chosen, base, asked.statistics, asked.unnorm_key, clip, beside)
        if asked.weights:
            deploy(published, asked.weights, asked.policy, wanted)
        else:
            convert(published, asked.policy, wanted)
    except (ModelNotReadable, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
