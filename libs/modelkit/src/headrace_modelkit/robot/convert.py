"""Makes a policy directory of a published OpenVLA checkpoint: `python -m headrace_modelkit.robot.convert --help`.

A run reads the result as `model.path`: `policy.json`, `model.safetensors`, and the checkpoint's tokenizer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.robot.directory import save_policy, tokenizer_files
from headrace_modelkit.robot.openvla.published import load_published, published_config


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
