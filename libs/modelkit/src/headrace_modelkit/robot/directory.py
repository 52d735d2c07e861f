"""Robot policies as directories: `policy.json`, which names the kind, and `model.safetensors`.

Executes nothing that they hold. Knows no transport.
"""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import replace_directory, sync_directory
from headrace_modelkit.robot.actor_critic import CnnConfig, CnnPolicy, MlpConfig, MlpPolicy
from headrace_modelkit.weights import load_weights, state_tensors

CONFIG, WEIGHTS = "policy.json", "model.safetensors"

SmallConfig = Annotated[MlpConfig | CnnConfig, Field(discriminator="kind")]
SmallPolicy = MlpPolicy | CnnPolicy

_CONFIGS: TypeAdapter[MlpConfig | CnnConfig] = TypeAdapter(SmallConfig)


def save_policy(policy: SmallPolicy, directory: Path | str) -> None:
    """Writes the directory aside and renames it into place; an existing one is replaced."""
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        aside.mkdir()
        (aside / CONFIG).write_text(policy.config.model_dump_json(indent=2) + "\n")
        tensors = {name: tensor.detach().contiguous() for name, tensor in state_tensors(policy)}
        save_file(tensors, aside / WEIGHTS)
        sync_directory(aside)
        replace_directory(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load_policy(directory: Path | str) -> SmallPolicy:
    """The policy that `save_policy` wrote, in fp32 and eval mode. Raises ModelNotReadable."""
    path = Path(directory)
    try:
        policy = _CONFIGS.validate_python(json.loads((path / CONFIG).read_text())).build(seed=0)
        load_weights(policy, load_file(path / WEIGHTS))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "it"
        raise ModelNotReadable(f"{path / CONFIG}: {place}: {first['msg']}; {_ADVICE}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelNotReadable(
            f"cannot read a robot policy from {str(path)!r}: {error}; {_ADVICE}"
        ) from error
    return policy.eval()


_ADVICE = "give a directory that save_policy wrote"
