"""One rank of a training backend that goes through a list of cases: `python backend_ranks.py JOB.json RANK`.

A case is a backend with its options and a model; what rank 0 finds is written to FOLDER/NAME.json and .safetensors.
"""

from __future__ import annotations

import io
import json
import math
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from headrace_modelkit.tensor_files import Box, TensorFiles
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.addresses import free_port
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import balance_loss_of, replays_routing
from headrace_trainer.backends import build_backend
from headrace_trainer.backends.shared.optimizer import MOMENTUM
from headrace_trainer.group.forming import join_trainer_group
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.pictures import place_images
from headrace_trainer.learning.samples import Image, Rows, Sample
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

from state_parts import whole_state
from trainer_calls import random_sequences

COLUMNS = ("old_log_probs", "reference_log_probs")
DENOMINATOR, RATE = 7.0, 1e-3
MEET_S = 120.0


class SavedState:
    """A checkpoint in one file, as a StateReader."""

    def __init__(self, file: Path) -> None:
        self._file = TensorFiles([file])
        self.optimizer_steps = 2

    def weight(self, name: str, box: Box | None = None) -> torch.Tensor:
        return self._file.read(f"weights/{name}", box)

    def moment(self, kind: str, name: str, box: Box | None = None) -> torch.Tensor:
        return self._file.read(f"moments/{kind}/{name}", box)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        names = [name for name in self._file.names() if name.startswith("weights/")]
        return {name.removeprefix("weights/"): self._file.shape(name) for name in names}

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def moment_names(self) -> set[str]:
        names = [name for name in self._file.names() if name.startswith("moments/")]
        return {name.split("/", 2)[2] for name in names}

    def moment_kinds(self) -> set[str]:
        return {name.split("/")[1] for name in self._file.names() if name.startswith("moments/")}


class Walk:
    """One case on one rank."""

    def __init__(self, case: dict[str, Any], trainer_group: TrainerGroup) -> None:
        config = TrainerConfig.model_validate(case["config"])
        self.trainer_group = trainer_group
        self.warms_up = config.trainer.warmup.steps > 0
        self.algorithm = build_algorithm(config.algorithm)
        self.backend: Any = build_backend(config, self.algorithm, trainer_group)
        self.tensors: dict[str, torch.Tensor] = {}
        self.figures: dict[str, Any] = {"log_probs": [], "norms": [], "sums": []}
        self.codec = load_tokenizer(config.model) if case.get("images") else None
        """With it, every other row has an image before its tokens."""
        self.grouped = case.get("grouped", False)
        """Whether a row has a whole group, which may be a tree, in place of one sequence."""

    def all_rows(self) -> Rows:
        groups = [[self.routed(sequence) for sequence in random_sequences(seed)] for seed in (2, 3)]
        if self.grouped:
            return groups
        sequences = [sequence for group in groups for sequence in group]
        return [[self.pictured(each) if at % 2 == 0 else each] for at, each in enumerate(sequences)]

    def pictured(self, sequence: Sample) -> Sample:
        """With an image before its tokens, in a case with images."""
        if self.codec is None or self.codec.images is None:
            return sequence
        from PIL import Image as Pillow  # which Megatron's environment has no need of

        file = io.BytesIO()
        Pillow.linear_gradient("L").resize((16, 16)).save(file, "PNG")
        image = Image(digest_bytes(file.getvalue()), file.getvalue())
        tokens = [self.codec.images.token] * self.codec.images.read(image.data).tokens
        before = place_images(tokens, [image], self.codec.images)
        trained = [position + len(before) for position in sequence.trained]
        return msgspec.structs.replace(
            sequence, tokens=[*before, *sequence.tokens], trained=trained, images=(image,)
        )

    def routed(self, sequence: Sample) -> Sample:
        """With experts drawn for each token but the last, where routes are replayed."""
        if not replays_routing(self.algorithm):
            return sequence
        shape = self.backend._expert_shape
        drawn = np.random.default_rng(0).random((len(sequence.tokens) - 1, shape.layers, shape.experts))
        routes = np.argsort(drawn, -1)[..., : shape.chosen].astype(np.uint8)
        return msgspec.structs.replace(sequence, routes=routes.tobytes())

    def learn(self) -> None:
        """Accumulates this rank's share, whose reference is a little off the policy."""
        rows = self.all_rows()[self.backend.replica :: self.backend.replicas]
        own = self.backend.infer(rows, COLUMNS)
        found = [[values["old_log_probs"]] for values in own]
        bodies = self.trainer_group.gather(json.dumps([self.backend.replica, found]).encode())
        by_replica = dict(json.loads(body) for body in bodies)
        self.figures["log_probs"].append([by_replica[replica] for replica in sorted(by_replica)])
        references = iter([value - 0.1 for value in values["reference_log_probs"]] for values in own)
        moved = [[with_column(sequence, next(references)) for sequence in row] for row in rows]
        if balance_loss_of(self.algorithm):
            self.backend.count_experts(moved)
            self.backend.balance_experts(DENOMINATOR)
        assert self.backend.micro(moved)
        if (pipeline := getattr(self.backend, "_pipeline", None)) is not None:
            parts = self.trainer_group.gather(str(pipeline.most_kept).encode())
            self.figures["kept"] = [int(part) for part in parts]
            norms = {type(each).__name__ for module in pipeline._model.modules for each in module.modules()}
            self.figures["engine"] = [name for name in ("Norm", "RMSNorm") if name in norms]

    def commit(self) -> None:
        self.learn()
        assert self.backend.gradient_is_finite()
        report = self.backend.commit(DENOMINATOR, RATE)
        self.figures["norms"].append(report.grad_norm)
        self.figures["sums"].append(report.token_sums)

    def state(self) -> dict[str, torch.Tensor]:
        weights = {f"weights/{name}": value.clone() for name, value in self.backend.weights()}
        saved = whole_state(self.trainer_group, self.backend.weight_parts())
        assert same(saved, {name.removeprefix("weights/"): value for name, value in weights.items()})
        self.check_narrow(weights)
        self.check_published(weights)
        self.check_owned(weights)
        moments = whole_state(self.trainer_group, self.backend.moment_parts())
        return weights | {f"moments/{name}": value for name, value in moments.items()}

    def check_owned(self, weights: dict[str, torch.Tensor]) -> None:
        """What each rank alone is given of a tensor is the whole."""
        rank, ranks = self.trainer_group.rank, self.trainer_group.world_size
        names = [name for name, _, _ in self.backend.weight_layout()]
        owners = {name: (at * 7) % ranks for at, name in enumerate(names)}
        own = {name: value.clone() for name, value in self.backend.weights(published=True, owners=owners)}
        assert list(own) == [name for name in names if owners[name] == rank]
        assert same(own, {name: self.cast(weights, name) for name in own})

    def check_published(self, weights: dict[str, torch.Tensor]) -> None:
        """What the leader publishes are the weights, rounded to the type that they are published in."""
        types = {name: getattr(torch, kind) for name, kind, _ in self.backend.weight_layout()}
        exchange, received = dist.batch_isend_irecv, [0]

        def counting(operations):
            received[0] += sum(each.tensor.nbytes for each in operations if each.op is dist.irecv)
            return exchange(operations)

        with patch.object(dist, "batch_isend_irecv", counting):
            published = {name: value.clone() for name, value in self.backend.weights(published=True)}
        self.figures["received"] = received[0]
        found = {name: value.to(types[name]) for name, value in published.items()}
        if self.trainer_group.leads:
            assert same(found, {name: self.cast(weights, name) for name in types})

    def cast(self, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        kinds = {each: kind for each, kind, _ in self.backend.weight_layout()}
        return weights[f"weights/{name}"].cpu().to(getattr(torch, kinds[name]))

    def check_narrow(self, weights: dict[str, torch.Tensor]) -> None:
        """What ranks exchange in bf16 is what is cast of the whole."""
        sharded = getattr(self.backend, "_sharded", None)
        if sharded is None:
            return
        for name, value in sharded.weights(torch.bfloat16):
            whole = weights[f"weights/{name}"].to(value.device)
            travels = self.trainer_group.world_size > 1 and name in sharded.parameters
            cast = travels and not sharded.is_adapted(name)
            assert torch.equal(value, whole.to(torch.bfloat16) if cast else whole), name

    def go(self, saved: str) -> None:
        backend = self.backend
        backend.load_initial()
        if self.warms_up:
            backend.warm_up()
        backend.load_reference()
        self.figures["layout"] = backend.weight_layout()
        self.figures["notes"] = list(backend.notes)
        self.figures["initial"] = [name for name, _ in backend.weights()]
        self.learn()
        gradient = backend.reduced_gradient(DENOMINATOR)
        self.tensors |= {f"gradient/{name}": value for name, value in gradient.items()}
        self.commit()
        self.commit()
        committed = self.state()
        self.tensors |= committed
        self.go_back(committed)
        self.refuse_what_is_not_finite()
        if saved:
            self.resume(Path(saved))
        if self.backend._config.optimizer.name == "muon":
            self.step_as_whole()

    def step_as_whole(self) -> None:
        """How far a step over ranks is from torch's optimizer of whole matrices with the same gradients."""
        own, sharded = self.backend._adamw, self.backend._sharded
        kept = {name: shard for name, shard in sharded.shards().items() if name in own._shapes}
        wholes = {name: torch.nn.Parameter(sharded.gather(name).clone()) for name in kept}
        muon = torch.optim.Muon(wholes.values(), lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for name, shard in kept.items():
            moment = own.moment(MOMENTUM, name) if shard.numel() else shard
            muon.state[wholes[name]] = {MOMENTUM: sharded.gather(name, moment).clone()}
        torch.manual_seed(5)
        gradients = {name: torch.randn(sharded.shape(name)) for name in sharded.learned}
        own.step({name: sharded.scatter(name, value) for name, value in gradients.items()}, 4.0, RATE)
        for name, whole in wholes.items():
            whole.grad = gradients[name] / 4.0
        muon.step()
        far = [(sharded.gather(name) - whole.detach()).abs().max().item() for name, whole in wholes.items()]
        self.figures["whole_step"] = max(far)

    def go_back(self, committed: dict[str, torch.Tensor]) -> None:
        self.backend.hold()
        self.commit()
        moved = self.state()
        self.backend.end_hold(back=True)
        self.figures["held"] = same(self.state(), committed) and not same(moved, committed)
        self.backend.suspend()
        self.backend.wake()

    def refuse_what_is_not_finite(self) -> None:
        """A row that is not finite, on one replica alone, leaves nothing behind on any."""
        self.learn()
        self.backend.zero()
        row = [with_column(self.all_rows()[0][0], None)]
        bad = [msgspec.structs.replace(row[0], advantages=[math.inf] * len(row[0].trained))]
        first = self.backend.replica == 0
        refused = not self.backend.micro([bad] if first else [row])
        left = self.backend.reduced_gradient(1.0)
        self.figures["refused"] = refused and not any(bool(value.any()) for value in left.values())

    def resume(self, saved: Path) -> None:
        """Goes on from a checkpoint that another backend made."""
        reader = SavedState(saved)
        self.backend.check_state(reader)
        self.backend.load_state(reader if self.trainer_group.leads else None)
        state = self.state()
        names = [f"weights/{name}" for name in reader.weight_shapes()]
        same_weights = all(state[name].equal(reader.weight(name.removeprefix("weights/"))) for name in names)
        moments = [name.split("/", 2)[1:] for name in state if name.startswith("moments/")]
        same_moments = all(
            state[f"moments/{kind}/{name}"].equal(reader.moment(kind, name)) for kind, name in moments
        )
        known = {name for _, name in moments} == set(reader.weight_shapes())
        self.figures["resumed"] = same_weights and same_moments and known
        self.commit()
        self.tensors |= {f"third/{name}": value.clone() for name, value in self.backend.weights()}


def with_column(sequence: Sample, values: list[float] | None) -> Sample:
    reference = values or [-3.0] * len(sequence.trained)
    return msgspec.structs.replace(sequence, weight=0.5, columns={"reference_log_probs": reference})


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(value.equal(other[name]) for name, value in one.items())


def meeting_place(file: Path, *, leads: bool) -> str:
    """The rendezvous of a case. Rank 0 picks the port as the case begins: earlier cases' connections take free ones."""
    if leads:
        found = file.with_suffix(".part")
        found.write_text(str(free_port()))
        found.rename(file)
    end = time.monotonic() + MEET_S
    while not file.exists():
        assert time.monotonic() < end, f"rank 0 has not come to {file.stem}"
        time.sleep(0.02)
    return f"127.0.0.1:{file.read_text()}"


def main() -> None:
    """Goes through the cases of a job, each in a trainer group of its own."""
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.set_num_threads(1)
    for generation, case in enumerate(job["cases"], 1):
        rendezvous = meeting_place(Path(job["folder"]) / f"{case['name']}.port", leads=rank == 0)
        trainer_group = join_trainer_group(
            generation, rank, job["ranks"], rendezvous, MEET_S, torch.device("cpu")
        )
        walk = Walk(case, trainer_group)
        walk.go(case["saved"])
        if trainer_group.leads:
            target = Path(job["folder"]) / case["name"]
            save_file(
                {name: value.contiguous() for name, value in walk.tensors.items()}, f"{target}.safetensors"
            )
            Path(f"{target}.json").write_text(json.dumps(walk.figures))
        trainer_group.leave()


if __name__ == "__main__":
    main()
