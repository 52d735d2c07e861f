"""A model's chat template that never ends: its run FAILS by name, and the instances go on for others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GOOD = "{% for m in messages %}{{ m.content }}{% endfor %}"
LIMIT_S = 120.0


def with_template(model: Path, folder: Path, template: str) -> str:
    """A copy of the model with another chat template."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


@pytest.mark.parametrize(("renders", "warmup_steps"), [("the trainer", 2), ("the rollout", 0)])
def test_a_template_without_an_end_fails_its_run_and_no_other(
    fleet, spec_of, tiny_model, tmp_path_factory, renders, warmup_steps
):
    """At the trainer it was a bug of the trainer's, from which the run recovered again and again."""
    folder = tmp_path_factory.mktemp("templates")

    def spec(name: str, template: str) -> dict[str, Any]:
        made = spec_of(name=name, data__prompt={"template": "{question}", "chat": True, "system": "s"})
        made["trainer"]["warmup"]["steps"] = warmup_steps
        return json.loads(json.dumps(made)) | {
            "model": {"path": with_template(tiny_model, folder / name, template), "dtype": "float32"}
        }

    before = {name: fleet.pid_of(name) for name in ("rollout-0", "coordinator")}
    ended = fleet.client.wait(fleet.submit(spec("endless", ENDLESS)).id, LIMIT_S)
    assert ended.state == "FAILED", ended.reason
    assert "chat template" in ended.reason and "2 s of a core" in ended.reason, ended.reason
    fleet.succeed(fleet.submit(spec("good", GOOD)))
    assert {name: fleet.pid_of(name) for name in before} == before
