"""How many tokens a micro-batch may have: after the layout that the trainers will take, by its bytes.

A short form of the trainer's own plan (`headrace_trainer.backends.fsdp.layouts`), which needs torch. Tests hold the two
together: the trainer takes the layout that is named here, and its plan has room for the tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from headrace_schema.model_size import ModelSize
from headrace_schema.rules.learning import model_ranks
from headrace_schema.spec import RunSpec

GIB = 2**30
VERSIONS = 2
"""Of the published weights, in the memory of the host that publishes them: the current one, and one that a commit casts
or the one before; so on a host that takes them: the installed one, and one that comes beforehand.
"""
FP32, MOMENTS, CODED = 4, 8, 2 + 8 / 256
"""Bytes of a weight: in fp32, of AdamW's moments, and of these in a byte each with scales of 256."""
MARGIN = 1.1
"""Of a layout's bytes, that a GPU must have: the trainer's."""
ASLEEP = 0.05
"""Of a GPU's memory: what an engine is expected to keep while it sleeps there."""
FEWEST_TOKENS, MOST_TOKENS, MOST_OF_EXPERTS = 2048, 16_384, 32_768
"""Of a micro-batch: fewer compute slowly, more gain nothing; each gathers weights of experts that few tokens reach."""
EASY_TOKENS = 4096
"""From which on a layout that costs less is better than more tokens."""
SPARSE = 2
"""Weights to those that a token meets, above which a model counts as a mixture of experts."""
TILES = 4 * 2**26 * FP32
"""Of a head: logits of a chunk, what they become, and their gradients."""
ROOT, ROOT_OF_ADAPTERS = 6.3, 0.3
"""Bytes a token and unit of width outside of layers, where the head learns and where it does not."""
AGAIN = 1.5
"""A layer that is computed again, with its gradients."""


@dataclass(frozen=True)
class Fit:
    """The layout, and the tokens of a micro-batch that fit beside it; 0: none do."""

    layout: str
    tokens: int
    why: str


@dataclass(frozen=True)
class Learner:
    """What a rank's memory has to hold of a run, in numbers of weights, and bytes of a token."""

    learned: int
    frozen: int
    reference: int
    layers: int
    width: int
    head: int
    root: int
    """Weights in no layer."""
    layer: int
    """Weights of the largest layer."""
    kept: float
    """Bytes that a layer keeps of a token for its backward."""
    element: int
    """Bytes of a weight in model.dtype."""
    coded: int
    """Of the frozen weights, those that have codes in their place on each rank."""
    coded_bytes: float
    away: bool
    """Inputs of layers that are computed again lie in host memory."""
    moments: float
    """Bytes of the optimizer's state, of all ranks together."""

    @classmethod
    def of(cls, spec: RunSpec, size: ModelSize) -> Learner:
        options, lora = spec.algorithm.options, spec.trainer.lora
        element = 4 if spec.model.dtype == "float32" else 2
        copies = 2 if options.get("critic") == "model" else 1
        learned = size.parameters if lora is None else lora.rank * size.adapter_sides
        asks = spec.trainer.reference is not None or bool(options.get("kl_loss_coef"))
        form = None if lora is None else lora.quantization
        coded = 0 if form is None else size.linear_parameters - size.expert_parameters
        # Embeddings and heads step as with AdamW, and so does a critic.
        each = {"adamw": MOMENTS, "adamw_8bit": CODED, "muon": MOMENTS}[spec.optimizer.name]
        spared = (MOMENTS - FP32) * size.linear_parameters if spec.optimizer.name == "muon" else 0
        return cls(
            learned * copies,
            0 if lora is None else size.parameters * copies,
            size.parameters if asks and lora is None else 0,
            size.layers * copies,
            size.width,
            size.head,
            size.parameters - size.linear_parameters,
            size.linear_parameters // size.layers,
            size.kept_bytes * element / 2,
            element,
            coded,
            coded * {"nf4": 0.5625, "int8": 1.0625, "fp8": 1.0625, None: 0}[form],
            bool(spec.trainer.backend_options.get("offload_activations")),
            each * learned * copies - spared,
        )

    def bytes_of(self, rung: Rung, ranks: int, tokens: int) -> float:
        """Of a rank: what stays, and a micro-batch of so many tokens at its largest."""
        layer, end = self.fixed(rung, ranks)
        own = layer + tokens * self.token_bytes(again=rung.again)
        return max(own, end + (0 if self.frozen else tokens * ROOT * self.width))

    def fixed(self, rung: Rung, ranks: int) -> tuple[float, float]:
        """Without a token's bytes, of the two moments that are largest: a layer's backward, and the end of it."""
        copy, adapts = rung.shard_ranks, self.frozen > 0
        frozen, weights = self.frozen - self.coded, 0 if self.coded else self.layer
        gathers = self.element * (self.head + 2 * weights if rung.divided else self.learned + frozen)
        state = -FP32 if rung.offload == "parameters" else FP32
        stays = (
            (state + (0 if rung.whole_gradients else FP32)) * self.learned / copy
            + (self.moments / copy if rung.offload == "none" else 0)
            + (FP32 * self.learned if rung.whole_gradients else 0)
            + self.coded_bytes
            + self.element * frozen / (1 if ranks == 1 else copy) * (rung.offload != "parameters")
            + self.element * self.reference / copy
        )
        if ranks > copy and not rung.whole_gradients:
            stays += FP32 * self.learned / copy
        gathered = 0 if adapts and ranks == 1 and rung.offload != "parameters" else gathers
        # With adapters the head's weights and those of layers get no gradient.
        reduced = 0 if rung.whole_gradients else (1 if copy == 1 else 2) * self.layer
        layer = stays + gathered + TILES + (0 if adapts else FP32 * (self.head + reduced))
        # What is in no layer is reduced last, on a rank that has a copy alone by one copy of it more.
        last = 0 if adapts or rung.whole_gradients else FP32 * self.root * (3 if copy == 1 else 2)
        return layer, stays + last + (0 if rung.divided else gathered)

    def token_bytes(self, *, again: bool) -> float:
        """Activations of a token; `again`: layers keep their inputs, and one at a time the rest."""
        layers = self.layers * self.kept
        if again:
            layers = (1 if self.away else self.layers) * self.element * self.width + AGAIN * self.kept
        return layers + (ROOT_OF_ADAPTERS if self.frozen else ROOT) * self.width


@dataclass(frozen=True)
class Rung:
    """A layout of the trainer's ladder."""

    shard: str
    shard_ranks: int
    again: bool = False
    offload: str = "none"
    """State that lies in the host's memory: "optimizer", or "parameters" too."""

    @property
    def divided(self) -> bool:
        """Weights are gathered layer by layer."""
        return self.shard == "weights"

    @property
    def whole_gradients(self) -> bool:
        """Sums of gradients are whole on each rank."""
        return self.shard == "state"

    def __str__(self) -> str:
        words = f"shard: {self.shard}" + (", gradient_checkpointing: true" if self.again else "")
        return words if self.offload == "none" else f"{words}, offload: {self.offload}"


def ladder(spec: RunSpec, ranks: int, on_host: int) -> Iterator[Rung]:
    """In the trainer's order, as far as the spec leaves it open."""
    options, again = spec.trainer.backend_options, spec.trainer.gradient_checkpointing
    copies = options.get("expert_parallel", 1) == 1
    divides = copies and 1 < on_host < ranks and ranks % on_host == 0
    found = [Rung("state", ranks)]
    for mesh in ([on_host] if divides else []) + [ranks]:
        found += [Rung("gradients", mesh), Rung("weights", mesh), Rung("weights", mesh, again=True)]
    found += [Rung("weights", ranks, again=True, offload=part) for part in ("optimizer", "parameters")]
    for rung in found:
        wanted = {"shard": rung.shard, "shard_ranks": rung.shard_ranks, "offload": rung.offload, **options}
        own = bool(options.get("offload_activations")) or (rung.again if again is None else again)
        yield Rung(str(wanted["shard"]), int(wanted["shard_ranks"]), own, str(wanted["offload"]))


def fit(spec: RunSpec, size: ModelSize, memory_bytes: int, on_host: int, longest: int) -> Fit:
    """Of the cheapest layout with room for an answer of full length, and for enough tokens to compute fast."""
    learner, ranks = Learner.of(spec, size), spec.trainer.ranks
    shares = [MARGIN + ASLEEP, MARGIN] if spec.placement.mode != "disaggregated" else [MARGIN]
    sparse = size.parameters / size.active_parameters
    most = MOST_OF_EXPERTS if sparse > SPARSE else MOST_TOKENS
    best = Fit("none", 0, "no layout has room for an answer of full length")
    for rung, share in itertools.product(ladder(spec, ranks, on_host), shares):
        each = learner.token_bytes(again=rung.again) / model_ranks(spec.trainer)  # ranks that divide rows
        layer, end = learner.fixed(rung, ranks)
        room = memory_bytes / share - layer
        found = max(0, int(room / each)) if end <= memory_bytes / share else 0
        tokens = min(_power_of_two(found), most) if found >= FEWEST_TOKENS else 0
        tokens = max(tokens, longest) if found >= longest else tokens
        if tokens < longest:
            continue
        why = f"{room / GIB:.0f} GiB are left for activations of {each / 2**20:.2f} MiB a token"
        # What is gathered for few tokens waits for its links: most of a sparse model's weights see few.
        if tokens >= max(longest, min(most, EASY_TOKENS * (sparse if rung.divided else 1))):
            hidden = "; gathers of all experts hide behind so many, so that none are divided over ranks"
            return Fit(str(rung), tokens, why + (hidden if sparse > SPARSE and rung.divided else ""))
        best = Fit(str(rung), tokens, why) if tokens > best.tokens else best
    return best


def published_bytes(spec: RunSpec, size: ModelSize) -> int:
    """Of a host's memory, for all versions that it keeps of the run's weights at a time. With adapters that travel
    alone their base is there once.
    """
    element = 4 if spec.model.dtype == "float32" else 2
    own = [each for each in spec.policies.values() if each.model in (None, spec.model)]
    if spec.trainer.lora is not None and spec.weights.lora != "merged":
        return element * size.parameters
    return VERSIONS * element * size.parameters * (1 + len(own))


def _power_of_two(most: int) -> int:
    return 1 << (max(1, most).bit_length() - 1)
