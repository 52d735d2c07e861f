"""Makes a policy directory of a published OpenVLA checkpoint: `python -m headrace_modelkit.robot.convert --help`.

A run reads the result as `model.path`: `policy.json`, `model.safetensors`, and the checkpoint's tokenizer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.robot.directory import save_policy, tokenizer_files
from headrace_modelkit.robot.openvla.model import OpenVlaConfig, OpenVlaPolicy
from headrace_modelkit.robot.openvla.vit import PUBLISHED, VitShape
from headrace_modelkit.robot.scaling import ActionBounds
from headrace_modelkit.weights import load_weights, state_tensors

OWN = ("value_head.weight", "value_head.bias", "log_std")
"""What reinforcement learning adds; it keeps its start where a checkpoint has none."""

_PARTS = {"action_head": "action_head.", "proprio_projector": "proprio_projector."}


def published_config(
    directory: Path | str,
    unnorm_key: str | None = None,
    *,
    shapes: Mapping[str, VitShape] = PUBLISHED,
    **chosen: Any,
) -> OpenVlaConfig:
    """The configuration of a published checkpoint; `chosen` are fields that it does not state (cameras, kind, head).

    `unnorm_key` names the data set whose action statistics un-normalise; None where there is only one. OFT's
    `dataset_statistics.json` counts before `norm_stats`. Raises ModelNotReadable.
    """
    path = Path(directory)
    stated = _json(path / "config.json")
    try:
        names = [str(name) for name in stated["timm_model_ids"]]
        text = dict(stated["text_config"])
        padding, bins = int(stated["pad_to_multiple_of"]), int(stated["n_action_bins"])
    except KeyError as error:
        raise ModelNotReadable(
            f"{path / 'config.json'} states no {error}; is it an OpenVLA checkpoint?"
        ) from error
    if missing := [name for name in names if name not in shapes]:
        raise ModelNotReadable(f"{missing[0]} is no known vision encoder; these are: {', '.join(shapes)}")
    statistics = path / "dataset_statistics.json"
    norms = _json(statistics) if statistics.is_file() else stated.get("norm_stats") or {}
    action = _of_data_set(norms, unnorm_key)["action"]
    return OpenVlaConfig(
        **{
            "kind": "openvla",
            "cameras": ("image",),
            **chosen,
            "featurizers": tuple(shapes[name] for name in names),
            "text": text,
            "action_vocabulary": int(text["vocab_size"]) - padding,
            "bins": bins,
            "bounds": ActionBounds.of_statistics(action["q01"], action["q99"], action.get("mask")),
        }
    )


def load_published(config: OpenVlaConfig, directory: Path | str) -> OpenVlaPolicy:
    """The policy with a checkpoint's weights, in fp32 and eval mode.

    Strict: every weight but `OWN` must be there, in its shape, and no other. Raises ModelNotReadable.
    """
    path = Path(directory)
    policy = config.build(seed=0)
    own = dict(state_tensors(policy))
    try:
        found = _tensors(path)
        load_weights(policy, {**{name: own[name] for name in OWN if name in own}, **found})
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelNotReadable(f"cannot read an OpenVLA checkpoint from {str(path)!r}: {error}") from error
    return policy.eval()


def _tensors(path: Path) -> dict[str, Tensor]:
    index = path / "model.safetensors.index.json"
    files = sorted(set(_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    found: dict[str, Tensor] = {}
    for name in files:
        found |= load_file(path / name)
    for name, prefix in _PARTS.items():
        if (file := path / f"{name}.safetensors").is_file():
            found |= {prefix + key: tensor for key, tensor in load_file(file).items()}
    return found


def _of_data_set(norms: Mapping[str, Any], key: str | None) -> Mapping[str, Any]:
    if key is None and len(norms) == 1:
        key = next(iter(norms))
    if key is None or key not in norms:
        raise ModelNotReadable(
            f"unnorm_key {key!r} names no data set of this checkpoint: {', '.join(sorted(norms))}"
        )
    chosen: Mapping[str, Any] = norms[key]
    return chosen


def _json(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelNotReadable(f"{file} cannot be read: {error}") from error
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 and a sentence when the checkpoint cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m headrace_modelkit.robot.convert", description=__doc__)
    parser.add_argument("published", type=Path, help="directory of the checkpoint, as the hub serves it")
    parser.add_argument("policy", type=Path, help="directory to write; one that is there is replaced")
    parser.add_argument("--kind", choices=("openvla", "openvla_oft"), default="openvla")
    parser.add_argument("--unnorm-key", help="data set whose statistics un-normalise; default: the only one")
    parser.add_argument(
        "--cameras", nargs="+", default=["image"], help="names of the cameras, in the order of their patches"
    )
    parser.add_argument("--chunk-length", type=int, default=1, help="actions drawn at once (openvla_oft)")
    parser.add_argument(
        "--head", choices=("tokens", "l1"), default="tokens", help="openvla_oft's action head"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of drawing and of scoring")
    asked = parser.parse_args(arguments)
    chosen: dict[str, Any] = {
        "kind": asked.kind,
        "cameras": tuple(asked.cameras),
        "chunk_length": asked.chunk_length,
        "head": asked.head,
        "temperature": asked.temperature,
    }
    try:
        convert(asked.published, asked.policy, asked.unnorm_key, **chosen)
    except (ModelNotReadable, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def convert(published: Path, target: Path, unnorm_key: str | None = None, **chosen: Any) -> None:
    """Writes `target`; `chosen` as in `published_config`. Raises ModelNotReadable, or ValueError for impossible
    choices.
    """
    if not tokenizer_files(published):
        raise ModelNotReadable(
            f"{published} holds no tokenizer (tokenizer.json or tokenizer.model): a policy that reads language needs it"
        )
    policy = load_published(published_config(published, unnorm_key, **chosen), published)
    save_policy(policy, target, tokenizer=published)


if __name__ == "__main__":
    sys.exit(main())
