"""Where measured profiles lie, and of which spec each is: one file for all specs whose stages cost alike.

Knows no fleet and no planner.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import yaml
from headrace_schema.spec import RunSpec

COST_NOTHING = {
    *(
        "name",
        "steps",
        "seed",
        "deterministic",
        "export",
        "optimizer",
        "placement",
        "evaluation",
        "checkpoint",
    ),
    *("tracking", "scheduling", "limits", "from_checkpoint"),
}
"""Sections that do not change what an answer costs in any stage."""
STARTED_FROM = {"algorithm": {"prompts_per_step"}, "trainer": {"warmup"}, "data": {"heldout", "heldout_seed"}}
"""Keys that may differ too: the batch is what points are measured over."""


def costs_alike(spec: RunSpec) -> str:
    """A digest of everything in a spec that decides what its stages cost."""
    document = spec.model_dump(mode="json", exclude={**dict.fromkeys(COST_NOTHING, True), **STARTED_FROM})
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]


def profile_file(folder: Path, spec: RunSpec, kind: str) -> Path:
    """The file of a spec's profile on devices of a kind."""
    model = re.sub(r"[^A-Za-z0-9.]+", "-", spec.model.path).strip("-.").rpartition("-")[2] or "model"
    return folder / f"{model}-{kind}-{costs_alike(spec)}.yaml"


def stored_profile(folder: Path, document: dict[str, Any]) -> Path | None:
    """The newest stored profile of a valid run spec; None where there is none."""
    digest = costs_alike(RunSpec.model_validate(document))
    found = sorted(folder.glob(f"*-{digest}.yaml"), key=lambda file: file.stat().st_mtime)
    return found[-1] if found else None


def text_of(document: dict[str, Any]) -> str:
    """A profile as YAML that a person can edit."""
    text: str = yaml.safe_dump(document, sort_keys=False, width=110)
    return text


def store(file: Path, document: dict[str, Any]) -> None:
    """Writes a profile in one piece."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}")
    aside.write_text(text_of(document), encoding="utf-8")
    aside.replace(file)
