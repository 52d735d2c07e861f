"""One of two replicas that learns with buckets of many sizes: `python overlap_ranks.py FOLDER RANK`.

What a rank finds is written to FOLDER: RANK.json, the order of events by size of bucket, and SIZE-RANK.safetensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "services/trainer/tests"))

import msgspec
import torch
from backend_cases import config
from backend_ranks import MEET_S, meeting_place
from headrace_megatron import shards
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends import build_backend
from headrace_trainer.group.forming import join_trainer_group
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup
from safetensors.torch import save_file
from trainer_calls import random_sequences


def told(events: list[str], name: str, word: str, of=BucketGroup):
    """A patch under which calls of a method are written down before they are made."""
    whole = getattr(of, name)

    def call(self, *arguments, **options):
        if word != "wait" or self.param_gather_handle is not None:
            events.append(word)
        return whole(self, *arguments, **options)

    return patch.object(of, name, call)


def main() -> None:
    """Learns in micro-batches of several parts or one and commits, with each size of bucket."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    found = {}
    for generation, (size, parts) in enumerate(((None, 1), (4_000, 3)), 1):
        rendezvous = meeting_place(folder / f"{size}.port", leads=rank == 0)
        group = join_trainer_group(generation, rank, 2, rendezvous, MEET_S, torch.device("cpu"))
        events: list[str] = []
        given = TrainerConfig.model_validate(config(folder / "model", 2, {"pipeline_micro_batches": parts}))
        algorithm = build_algorithm(given.algorithm)
        with (
            patch.object(shards, "BUCKET_PARAMETERS", size),
            told(events, "start_grad_sync", "reduce"),
            told(events, "start_param_sync", "gather"),
            told(events, "finish_param_sync", "wait"),
            told(events, "finish", "finish", shards.Shards),
            told(events, "spread", "spread", shards.Shards),
        ):
            backend = build_backend(given, algorithm, group)
            backend.load_initial()
            rows = [[each] for each in random_sequences(2 + rank)]
            bare = [{"columns": {"reference_log_probs": [-3.0] * len(row[0].trained)}} for row in rows]
            rows = [[msgspec.structs.replace(row[0], **more)] for row, more in zip(rows, bare, strict=True)]
            assert backend.micro(rows)  # Megatron counts in its first one what comes in each
            events.clear()
            assert backend.micro(rows[: 1 + rank])
            events.append("micro")
            assert backend.micro([] if rank else rows)
            assert backend.commit(7.0, 1e-3).finite
            events.append("forward")
            assert backend.micro(rows)
            events.append("weights")
            weights = {name: value.cpu() for name, value in backend.weights()}
        save_file(weights, folder / f"{size}-{rank}.safetensors")
        found[str(size)] = events
        group.leave()
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
