"""`headrace run export --to hf://ORG/NAME` and `--to s3://…`: an exported model with a card of its run's facts."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from headrace_schema.stores import is_remote

from headrace_cli.errors import CommandError, user_error

HUB = "hf://"
CARD = "README.md"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def is_elsewhere(to: str) -> bool:
    """Whether an export goes to a hub or a store, and not to a directory here."""
    return to.startswith(HUB) or is_remote(to)


def check(to: str) -> None:
    """Raises CommandError for a place that no model can go to, before one is read."""
    from headrace_servicekit.stores.checkpoints import probe
    from headrace_servicekit.stores.problems import StoreProblem

    if not to.startswith(HUB):
        try:
            probe(to)
        except StoreProblem as problem:
            raise user_error("--to", problem.reason, problem.fix) from problem
        return
    if not _REPOSITORY.fullmatch(to.removeprefix(HUB)):
        raise user_error("--to", f"{to!r} names no repository of a hub", "write hf://ORG/NAME")
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise user_error("--to", "huggingface_hub is not installed", "pip install huggingface_hub") from error


def publish(folder: Path, to: str, message: str) -> str:
    """Uploads an exported model; where it is. Raises CommandError."""
    return _to_hub(folder, to.removeprefix(HUB), message) if to.startswith(HUB) else _to_store(folder, to)


def _to_hub(folder: Path, repository: str, message: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi()
    try:
        made = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except LocalTokenNotFoundError as error:
        raise user_error(
            "--to", "there is no token for the hub", "run: hf auth login, or set HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        said = str(error).strip().splitlines()[0]
        refused = error.response is not None and error.response.status_code in (401, 403)
        fix = (
            "give HF_TOKEN the right to write there" if refused else "try again, or look at the hub's status"
        )
        raise CommandError(f"hf://{repository}: {said}; {fix}") from error
    except OSError as error:
        raise CommandError(
            f"hf://{repository}: the hub cannot be reached: {error}; check HF_ENDPOINT and the network"
        ) from error
    return str(made)


def _to_store(folder: Path, to: str) -> str:
    from headrace_servicekit.stores.checkpoints import RemoteRun
    from headrace_servicekit.stores.problems import StoreProblem

    try:
        place = RemoteRun(to)
        place.copy(folder, "", {})
    except StoreProblem as problem:
        raise CommandError(f"{problem}") from problem
    return place.url


def write_card(folder: Path, run: str, run_directory: Path, told: Mapping[str, Any]) -> None:
    """Writes README.md: what the model is, and of which run, data, steps and certificate."""
    spec = json.loads((run_directory / "run.json").read_text())
    (folder / CARD).write_text(card(run, spec, told, *_facts(run_directory, told)))


def card(
    run: str,
    spec: Mapping[str, Any],
    told: Mapping[str, Any],
    figures: Mapping[str, float],
    certificate: Mapping[str, Any],
) -> str:
    """The card's text."""
    algorithm, model, options = spec["algorithm"], spec["model"], spec["data"]["options"]
    base = model.get("path") or ""
    data = str(options.get("dataset") or options.get("path") or spec["data"]["source"])
    head = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["headrace", "reinforcement-learning", algorithm["name"]],
        **({"base_model": base} if _REPOSITORY.fullmatch(base) else {}),
        **(
            {"datasets": [data]}
            if spec["data"]["source"] == "huggingface" and _REPOSITORY.fullmatch(data)
            else {}
        ),
    }
    rows = {
        "Run": run,
        "Base model": base or "a new policy",
        "Algorithm": algorithm["name"],
        "Data": data,
        "Steps": f"{told['step']} of {spec['steps']}",
        "Answers a step": algorithm["group_size"] * algorithm["prompts_per_step"],
        "Learning rate": spec["optimizer"]["lr"],
        "Seed": spec["seed"],
        "Reward": ", ".join(scorer["name"].rpartition("/")[2] for scorer in spec["reward"]["scorers"]) or "–",
        **{name: f"{value:.4g}" for name, value in figures.items()},
        "Digest of the weights": told["digest"],
        **(
            {"Digest of the certificate": certificate["set_digest"], "Version": certificate["number"]}
            if certificate
            else {}
        ),
    }
    table = "\n".join(f"| {name} | {str(value).replace('|', '/')} |" for name, value in rows.items())
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {run}, step {told['step']}\n\n"
        "Trained by reinforcement learning with Headrace.\n\n"
        f"| | |\n| --- | --- |\n{table}\n\n"
        "The certificate names the answers that the last update was made from, by a digest over (slot, attempt, "
        "digest of the trajectory); `headrace run certificates` shows it where the run is.\n"
    )


def _facts(run_directory: Path, told: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures of the step and of its evaluations, and the certificate of its update; what the files have of them."""
    figures: dict[str, float] = {}
    for line in _lines(run_directory / "metrics.jsonl"):
        if line.get("version") != told["version"]:
            continue
        if line.get("type") == "step" and isinstance(line.get("reward_mean"), int | float):
            figures["Mean reward of the last step"] = line["reward_mean"]
        elif line.get("type") == "evaluation" and isinstance(line.get("score"), int | float):
            figures[f"Score ({line['kind']})"] = line["score"]
    certificate: dict[str, Any] = {}
    ledger = next(iter(_lines(run_directory / "checkpoints" / told["checkpoint"] / "ledger.json")), {})
    if packed := ledger.get("steps"):
        for text in zlib.decompress(base64.b64decode(packed)).splitlines():
            found = json.loads(text).get("certificate") or {}
            if found.get("number") == told["version"]:
                certificate = found
    return figures, certificate


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with file.open() as opened:
            for line in opened:
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found
    except (OSError, ValueError):
        return
