"""Robot policies as directories: `policy.json`, which names the kind, and `model.safetensors`.

Executes nothing that they hold. Knows no transport. A kind's module loads when a policy of the kind is read.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import DTYPES, replace_directory, sync_directory
from headrace_modelkit.lora import add_adapters, targets_problem
from headrace_modelkit.model_files import parameters_on_meta
from headrace_modelkit.tensor_files import TensorFiles, Tensors, TensorsInMemory, TornTensor
from headrace_modelkit.weights import load_weights, state_tensors
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headrace_robots.policies.policy import PolicyConfig, RobotPolicy

if TYPE_CHECKING:
    from headrace_schema.sections.generating import ModelSection
    from headrace_schema.sections.learning import LoraSection

CONFIG, WEIGHTS = "policy.json", "model.safetensors"
TOKENIZER = (
    "tokenizer*",
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)

KINDS = {
    "mlp": ("actor_critic", "MlpConfig"),
    "cnn": ("actor_critic", "CnnConfig"),
    "openvla": ("openvla.model", "OpenVlaConfig"),
    "openvla_oft": ("openvla.model", "OpenVlaConfig"),
    "pi0": ("pi.model", "PiConfig"),
    "pi05": ("pi.model", "PiConfig"),
    "smolvla": ("smolvla.model", "SmolVlaConfig"),
    "groot": ("groot.model", "GrootConfig"),
    "wall": ("wall.model", "WallConfig"),
    "act": ("act.model", "ActConfig"),
    "diffusion": ("diffusion.model", "DiffusionConfig"),
}
"""Where the configuration of each kind is: a PolicyConfig, whose `build` gives the policy."""


def policy_config(fields: Mapping[str, Any]) -> PolicyConfig:
    """The configuration that `fields` state, by their `kind`. Raises ModelNotReadable, which names the wrong one."""
    kind = fields.get("kind")
    if kind not in KINDS:
        near = get_close_matches(str(kind), KINDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ModelNotReadable(f"kind: {kind!r} is no robot policy, these are: {', '.join(KINDS)}{hint}")
    module, name = KINDS[kind]
    try:
        config: PolicyConfig = getattr(import_module(f"headrace_robots.policies.{module}"), name)(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or kind
        raise ModelNotReadable(f"{place}: {first['msg']}") from error
    return config


def policy_of(section: ModelSection) -> PolicyConfig | None:
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


def initial_policy(section: ModelSection, seed: int) -> RobotPolicy:
    """The policy that a run begins with, in its type: a directory's weights, or new ones drawn from the seed.

    Raises ModelNotReadable, also where `section` names no robot policy.
    """
    named = section.policy
    policy = policy_config(named).build(seed) if named is not None else load_policy(section.path)
    return in_type(policy, policy_type(policy.config, section))


def policy_type(config: PolicyConfig, section: ModelSection) -> torch.dtype:
    """What a run's policy computes in, and is published in."""
    return DTYPES[section.dtype] if config.large else torch.float32


def in_type(policy: RobotPolicy, dtype: torch.dtype) -> RobotPolicy:
    """The policy with its parameters in a type; buffers stay as they are."""
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    return policy


def empty_policy(section: ModelSection) -> RobotPolicy:
    """A run's policy in its type, with its parameters on meta. Raises ModelNotReadable."""
    config = policy_of(section)
    if config is None:
        raise ModelNotReadable(f"path: {section.path!r} holds no robot policy")
    with parameters_on_meta():
        policy = config.build(seed=0)
    return in_type(policy, policy_type(config, section))


def open_policy(section: ModelSection, seed: int) -> Tensors:
    """The weights that a run's policy begins with, of which parts are read. Raises ModelNotReadable."""
    if section.policy is not None:
        return TensorsInMemory(dict(state_tensors(policy_config(section.policy).build(seed))))
    try:
        found = TensorFiles([Path(section.path) / WEIGHTS])
    except (OSError, TornTensor) as error:
        raise _unreadable(section.path, error) from error
    own = {name: tuple(tensor.shape) for name, tensor in state_tensors(empty_policy(section))}
    given = {name: found.shape(name) for name in found.names()}
    if own != given:
        name = min(dict(own.items() ^ given.items()))
        raise _unreadable(
            section.path, f"{name} has shape {given.get(name, 'none')}, and {own.get(name, 'none')} is wanted"
        )
    return found


def freeze(policy: RobotPolicy, parts: Iterable[str]) -> None:
    """Takes the gradient from whole parts of a large policy."""
    names = tuple(name for part in parts for name in policy.shape.parts[part])
    for name, parameter in policy.named_parameters():
        if name.startswith(names):
            parameter.requires_grad_(False)


def parts_problem(policy: RobotPolicy, parts: Iterable[str]) -> str:
    """What is wrong with the names of parts to be frozen, with the fix; empty: nothing."""
    for part in parts:
        if part not in policy.shape.parts:
            near = get_close_matches(part, policy.shape.parts, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            known = ", ".join(policy.shape.parts)
            return f"{policy.config.kind} has no part {part!r}, its parts are {known}{hint}"
    return ""


def adapt(policy: RobotPolicy, lora: LoraSection, seed: int, device: torch.device | None = None) -> None:
    """As `add_adapters`, of a large policy: what is frozen gets no adapter, and what is no part of the published model
    learns whole. Raises ValueError for a target that the policy has not.
    """
    added = [
        parameter for name, parameter in policy.named_parameters() if name.startswith(policy.shape.added)
    ]
    for parameter in added:
        parameter.requires_grad_(False)
    problem = targets_problem(policy, lora)
    if not problem:
        add_adapters(policy, lora, seed, device)
    for parameter in added:
        parameter.requires_grad_(True)
    if problem:
        raise ValueError(problem)


def learning_policy(
    section: ModelSection, frozen: Iterable[str], lora: LoraSection | None, seed: int
) -> RobotPolicy:
    """`empty_policy`, a large one, with these parts frozen, and its adapters on the CPU.

    Raises ModelNotReadable, and ValueError for a target that the policy has not.
    """
    policy = empty_policy(section)
    freeze(policy, frozen)
    if lora is not None:
        adapt(policy, lora, seed, torch.device("cpu"))
    return policy


def layers_of_policy(policy: RobotPolicy) -> list[nn.Module]:
    """The layers of a large policy, each of which is gathered alone; one that no pass goes through is none of them."""
    return [
        module
        for module in policy.modules()
        if type(module).__name__ in policy.shape.layers and not getattr(module, "unused", False)
    ]


def tokenizer_files(directory: Path | str) -> list[Path]:
    """The files of a directory that are its tokenizer; none where it has none."""
    return [file for pattern in TOKENIZER for file in sorted(Path(directory).glob(pattern)) if file.is_file()]


def save_policy(policy: RobotPolicy, directory: Path | str, *, tokenizer: Path | str | None = None) -> None:
    """Writes the directory aside and renames it into place; an existing one is replaced.

    The tokenizer of the directory `tokenizer`, if it holds one, comes along.
    """
    write_policy(policy.config, dict(state_tensors(policy)), directory, tokenizer=tokenizer)


def write_policy(
    config: PolicyConfig,
    weights: Mapping[str, Tensor],
    directory: Path | str,
    *,
    tokenizer: Path | str | None = None,
    beside: Callable[[Path], None] = lambda directory: None,
) -> None:
    """As `save_policy`, of a policy's weights by name; `beside` writes more into the directory."""
    with written_aside(Path(directory)) as aside:
        (aside / CONFIG).write_text(config.model_dump_json(indent=2) + "\n")
        tensors = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
        save_file(tensors, aside / WEIGHTS)
        for file in tokenizer_files(tokenizer) if tokenizer else []:
            shutil.copy2(file, aside / file.name)
        beside(aside)


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A new directory beside `target`, which takes its place once all is written, and is gone where that failed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        aside.mkdir()
        yield aside
        sync_directory(aside)
        replace_directory(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load_policy(directory: Path | str) -> RobotPolicy:
    """The policy that `save_policy` wrote, in fp32 and eval mode. Raises ModelNotReadable."""
    path = Path(directory)
    try:
        policy = policy_config(json.loads((path / CONFIG).read_text())).build(seed=0)
        load_weights(policy, load_file(path / WEIGHTS))
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    return policy


def _unreadable(path: Path | str, problem: object) -> ModelNotReadable:
    return ModelNotReadable(
        f"cannot read a robot policy from {str(path)!r}: {problem}; give a directory that save_policy wrote"
    )
