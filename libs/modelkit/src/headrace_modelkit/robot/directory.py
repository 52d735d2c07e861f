"""Robot policies as directories: `policy.json`, which names the kind, and `model.safetensors`.

Executes nothing that they hold. Knows no transport. A kind's module loads when a policy of the kind is read.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import replace_directory, sync_directory
from headrace_modelkit.weights import load_weights, state_tensors

if TYPE_CHECKING:
    from headrace_schema.sections.generating import ModelSection

    from headrace_modelkit.robot.actor_critic import CnnConfig, CnnPolicy, MlpConfig, MlpPolicy
    from headrace_modelkit.robot.openvla.model import OpenVlaConfig, OpenVlaPolicy
    from headrace_modelkit.robot.pi import PiConfig, PiPolicy

    AnyConfig = MlpConfig | CnnConfig | OpenVlaConfig | PiConfig
    AnyPolicy = MlpPolicy | CnnPolicy | OpenVlaPolicy | PiPolicy

CONFIG, WEIGHTS = "policy.json", "model.safetensors"
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")

KINDS = {
    "mlp": ("actor_critic", "MlpConfig"),
    "cnn": ("actor_critic", "CnnConfig"),
    "openvla": ("openvla.model", "OpenVlaConfig"),
    "openvla_oft": ("openvla.model", "OpenVlaConfig"),
    "pi0": ("pi", "PiConfig"),
    "pi05": ("pi", "PiConfig"),
}
"""Where the configuration of each kind is."""


def policy_config(fields: Mapping[str, Any]) -> AnyConfig:
    """The configuration that `fields` state, by their `kind`. Raises ModelNotReadable, which names the wrong one."""
    kind = fields.get("kind")
    if kind not in KINDS:
        near = get_close_matches(str(kind), KINDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ModelNotReadable(f"kind: {kind!r} is no robot policy, these are: {', '.join(KINDS)}{hint}")
    module, name = KINDS[kind]
    try:
        config: AnyConfig = getattr(import_module(f"headrace_modelkit.robot.{module}"), name)(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or kind
        raise ModelNotReadable(f"{place}: {first['msg']}") from error
    return config


def policy_of(section: ModelSection) -> AnyConfig | None:
    """The robot policy that a run's `model` names: a new one, or a directory's; None for a language model.

    Raises ModelNotReadable, which names the wrong field.
    """
    if section.policy is not None:
        return policy_config(section.policy)
    path = Path(section.path) / CONFIG
    if not section.path or not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelNotReadable(
            f"cannot read {str(path)!r}: {error}; give a policy that save_policy wrote"
        ) from error
    return policy_config(fields)


def initial_policy(section: ModelSection, seed: int) -> AnyPolicy:
    """The policy that a run begins with: a directory's weights, or new ones drawn from the seed.

    Raises ModelNotReadable, also where `section` names no robot policy.
    """
    if section.policy is not None:
        return policy_config(section.policy).build(seed).eval()
    return load_policy(section.path)


def tokenizer_files(directory: Path | str) -> list[Path]:
    """The files of a directory that are its tokenizer; none where it has none."""
    return [file for pattern in TOKENIZER for file in sorted(Path(directory).glob(pattern)) if file.is_file()]


def save_policy(policy: AnyPolicy, directory: Path | str, *, tokenizer: Path | str | None = None) -> None:
    """Writes the directory aside and renames it into place; an existing one is replaced.

    The tokenizer of the directory `tokenizer`, if it holds one, comes along.
    """
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        aside.mkdir()
        (aside / CONFIG).write_text(policy.config.model_dump_json(indent=2) + "\n")
        tensors = {name: tensor.detach().contiguous() for name, tensor in state_tensors(policy)}
        save_file(tensors, aside / WEIGHTS)
        for file in tokenizer_files(tokenizer) if tokenizer else []:
            shutil.copy2(file, aside / file.name)
        sync_directory(aside)
        replace_directory(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load_policy(directory: Path | str) -> AnyPolicy:
    """The policy that `save_policy` wrote, in fp32 and eval mode. Raises ModelNotReadable."""
    path = Path(directory)
    try:
        policy = policy_config(json.loads((path / CONFIG).read_text())).build(seed=0)
        load_weights(policy, load_file(path / WEIGHTS))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelNotReadable(
            f"cannot read a robot policy from {str(path)!r}: {error}; give a directory that save_policy wrote"
        ) from error
    return policy.eval()
