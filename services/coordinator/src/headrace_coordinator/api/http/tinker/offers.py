"""Which models clients of Tinker may ask for by name, from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace_schema.yaml_text import YamlProblem, read_yaml

FORM = "write NAME: {model: {path: …}}, with other keys of a run spec as you like"


def read_models(path: Path | None) -> dict[str, dict[str, Any]]:
    """Specs of the runs of models, by the models' names; none without a file. Raises ValueError."""
    if path is None:
        return {}
    try:
        found = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YamlProblem) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path} names no models; {FORM}")
    for name, spec in found.items():
        model = spec.get("model") if isinstance(spec, dict) else None
        if not isinstance(model, dict) or not isinstance(model.get("path"), str):
            raise ValueError(f"{path}: {name} has no model.path; {FORM}")
        if wrong := {"name", "workflow"} & spec.keys():
            raise ValueError(f"{path}: {name}.{min(wrong)} is set by the fleet; remove it")
    return found
