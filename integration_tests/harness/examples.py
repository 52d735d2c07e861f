"""The examples of algorithms as their page has them: a spec's file, and what `--set` changes in it."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "examples" / "algorithms" / "README.md"
SUBMIT = "$ headrace run submit "


def algorithm_examples() -> dict[str, tuple[Path, list[str]]]:
    """File and overrides of each example, by the algorithm's name, or the file's where it is no base."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith(SUBMIT):
            file, *options = shlex.split(line.removeprefix(SUBMIT))
            changes = [text for flag, text in pairwise(options) if flag == "--set"]
            named = [text.partition("=")[2] for text in changes if text.startswith("algorithm.name=")]
            alone = "grpo" if Path(file).stem == "base" else Path(file).stem
            found[(*named, alone)[0]] = (ROOT / file, changes)
    return found
