"""The model of an engine: its passes over rows, and its weights' life (none, installed, released).

Shapes: P prompts, S scored sequences, T tokens, N rows, D hidden, V vocabulary. Draws no token; knows no queue.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from headrace_modelkit.devices import moved
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.experts import plain_experts, take_routers
from headrace_modelkit.families.draft_files import add_draft
from headrace_modelkit.families.drafts import Features
from headrace_modelkit.families.mixtures import expert_shape
from headrace_modelkit.invariant import make_invariant
from headrace_modelkit.loading import body_of, context_limit, load_architecture, load_model
from headrace_modelkit.logprobs import CHUNK_ELEMENTS, Head
from headrace_modelkit.pictures import ImageReader, Span, place_number
from headrace_modelkit.products import PackedLayers, PackedWeight
from headrace_modelkit.vision import Pictures, language_inputs, rope_shift
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import DraftSection
from numpy.typing import NDArray
from torch import Tensor

from headrace_rollout.engines.base import Adapter, Policy, Refused, WeightView, adapters_differ
from headrace_rollout.engines.holding import HeldModel
from headrace_rollout.engines.samples import Distribution, ImageAt
from headrace_rollout.engines.trajectory import Scored
from headrace_rollout.engines.transformers.adapters import AdapterLayers
from headrace_rollout.engines.transformers.attention import own_attention
from headrace_rollout.engines.transformers.cache import PromptKeys, SlotCache
from headrace_rollout.engines.transformers.drafting import HeadPasses
from headrace_rollout.engines.transformers.kept import Extension
from headrace_rollout.engines.transformers.passes import Routes, by_row, new_cache, padded, positions, split
from headrace_rollout.engines.transformers.sampling import RowDistributions, chosen_log_probs, process
from headrace_rollout.engines.weight_memory import HOST, ParameterMemory

Images = tuple[ImageAt, ...]
"""Those of a context."""


class PolicyModel(HeldModel):
    """A causal language model with a slot cache; used from the engine's thread alone."""

    def __init__(
        self,
        config: ModelSection,
        device: torch.device,
        *,
        routed_experts: bool = False,
        images: ImageReader | None = None,
        adapters: Collection[str] = (),
        deterministic: bool = False,
        draft: DraftSection | None = None,
    ) -> None:
        self.architecture = architecture = load_architecture(config)
        self.path = config.path
        self.context_limit = context_limit(config, architecture)
        self.device = HOST
        self._images = images
        self.looks_ahead = images is not None and images.looks_ahead
        """Whether images see what of them is behind, so that what follows one is no extension."""
        self.policy: Policy | None = None
        self._model = load_model(config, weights=False, device="cpu")
        # Experts are computed as the trainer computes them, whether their routes are wanted or not.
        routing = take_routers(self._model)
        self.routes = Routes(routing if routed_experts else None, expert_shape(architecture))
        self.deterministic = deterministic
        if deterministic:
            try:
                make_invariant(self._model)
            except ValueError as error:
                reason = f"the model at {config.path!r} has bits that hang on its batch: {error}"
                raise ModelNotReadable(f"deterministic: {reason}; set deterministic: false") from error
        head, limit = add_draft(self._model, draft, config), self.context_limit
        self.drafts = None if head is None else HeadPasses(head, self._model)
        """Of the head that drafts: where there is one, cached passes give what it reads behind their hidden states."""
        self.cache = new_cache(self._model, config, architecture, limit, drafts=head is not None)
        self.continues = True
        """Whether a context can be computed behind what is kept of it (`check_model` finds out)."""
        self.takes_back = True
        """Whether tokens behind a wrong guess leave no trace (`check_model` finds out)."""
        self._layers = PackedLayers(body_of(self._model), fixed=deterministic)
        self._packed_head = PackedWeight(fixed=deterministic)
        self._adapters = AdapterLayers(self._model) if adapters else None
        self._names, self._base = frozenset(adapters), ""
        self._memory = ParameterMemory(self._model)
        self._memory.free()
        self._head: Head | None = None
        self.place(device)
        self.vocabulary_size = int(architecture.get_text_config().vocab_size)

    @property
    def adapted(self) -> bool:
        """Whether rows have adapters of their own."""
        return self._adapters is not None

    @property
    def head(self) -> Head:
        """The output head. Refused while nothing is installed."""
        if self._head is None:
            raise Refused("POLICY_MISMATCH", "no policy is installed; call InstallPolicy first")
        return self._head

    def place(self, device: torch.device) -> None:
        """Runs on `device` from now on; on another one than before, nothing is installed."""
        if device == self.device:
            return
        self.free_memory()
        self.device = device
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))

    def learn_token_size(self) -> None:
        """Lets the cache know what a token takes, from a pass over one; costs nothing when it is known."""
        if not self.cache.token_bytes:
            self.cache.learn()
            with self.cache.finding_mixers(self._model):
                found = self.hidden(padded([[0]], self.device), past_key_values=self.cache)
            if self.drafts is not None:
                self.drafts.read(padded([[0]], self.device), found, self.cache)
            if not self.cache.token_bytes:
                raise Refused(
                    "INVALID",
                    f"model.path: {self.path!r} has no layer with keys and values, without which rollout.engine: "
                    "transformers cannot run; choose another engine",
                )

    def prefill(
        self, contexts: Sequence[Sequence[int]], images: Sequence[Images] = (), adapters: Sequence[str] = ()
    ) -> Tensor:
        """(P, D) hidden states at each context's last token; the cache stores what its plan says.

        `adapters`: the adapter of each context.
        """
        lengths = [len(context) for context in contexts]
        if self.cache.stateful and len(set(lengths)) > 1:  # a state would go on through padding
            return self._by_length(contexts, images, adapters)
        # Causal attention never looks right, so padding behind a context needs no mask.
        tokens_PT = padded(contexts, self.device)
        pictures = self._pictures(contexts, images) if any(images) else None
        hidden_PTD = self.hidden(tokens_PT, pictures, adapters, past_key_values=self.cache)
        if self.drafts is not None:
            self.drafts.read(tokens_PT, hidden_PTD, self.cache)
        last = [row * max(lengths) + length - 1 for row, length in enumerate(lengths)]
        return hidden_PTD.flatten(0, 1).index_select(0, torch.tensor(last, device=self.device))

    def _by_length(
        self, contexts: Sequence[Sequence[int]], images: Sequence[Images], adapters: Sequence[str]
    ) -> Tensor:
        found: dict[int, Tensor] = {}
        recorded: list[bytes] = [b""] * len(contexts)
        for length in sorted({len(context) for context in contexts}):
            places = [at for at, context in enumerate(contexts) if len(context) == length]
            own = [contexts[at] for at in places]
            self.cache.narrow(places, self.device)
            hidden_PD = self.prefill(
                own,
                [images[at] for at in places] if images else (),
                [adapters[at] for at in places] if adapters else (),
            )
            found |= dict(zip(places, hidden_PD, strict=True))
            for at, routes in zip(places, self.routes.prefilled(own), strict=False):
                recorded[at] = routes
        self.routes.whole = recorded
        return torch.stack([found[at] for at in range(len(contexts))])

    def shift(self, context: Sequence[int], images: Images) -> int:
        """What is added to the index of a token behind a context with images to get its position."""
        return rope_shift(self._spans(context, images)) if images else 0

    def identity(self, context: Sequence[int], images: Images) -> list[int]:
        """What tells the context from others: a number for each image in place of its tokens."""
        found = list(context)
        for span in self._spans(context, images):
            found[span.start : span.start + span.image.tokens] = [
                place_number(span.image.digest)
            ] * span.image.tokens
        return found

    def _spans(self, context: Sequence[int], images: Images) -> list[Span]:
        if not images:
            return []
        assert self._images is not None
        return [self._images.span(context, image.start, image.data) for image in images]

    def _pictures(
        self, contexts: Sequence[Sequence[int]], images: Sequence[Images], known: Sequence[int] | None = None
    ) -> Pictures:
        """The images among the tokens behind the first `known` ones of each context, and all their positions."""
        assert self._images is not None
        known = known or [0] * len(contexts)
        length = max(len(context) - before for context, before in zip(contexts, known, strict=True))
        rows = [self._spans(context, own) for context, own in zip(contexts, images, strict=True)]
        return moved(Pictures.of_rows(rows, length, self._images, known), self.device)

    def extend(
        self,
        contexts: Sequence[Sequence[int]],
        known: Sequence[PromptKeys],
        images: Sequence[Images] = (),
        adapters: Sequence[str] = (),
    ) -> tuple[Tensor, list[PromptKeys]]:
        """As `prefill`, of the tokens behind what is known of each context; and the whole contexts' keys and values."""
        new_lengths = {len(context) - keys.length for context, keys in zip(contexts, known, strict=True)}
        if self.cache.stateful and len(new_lengths) > 1:  # as in a prefill
            each = [
                self.extend([context], [keys], images[at : at + 1], adapters[at : at + 1])
                for at, (context, keys) in enumerate(zip(contexts, known, strict=True))
            ]
            return torch.cat([hidden for hidden, _ in each]), [keys for _, [keys] in each]
        before = [keys.length for keys in known]
        new = [context[length:] for context, length in zip(contexts, before, strict=True)]
        lengths, extension = list(map(len, new)), Extension(known, self.device, self.cache.reaches)
        position_NT, mask = extension.inputs(lengths, self._model.dtype)
        given: dict[str, Any] = {"attention_mask": mask, "past_key_values": extension}
        pictures = self._pictures(contexts, images, before) if any(images) else None
        if pictures is None or pictures.positions_3RL is None:
            given["position_ids"] = position_NT
        tokens_NT = padded(new, self.device)
        hidden_NTD = self.hidden(tokens_NT, pictures, adapters, **given)
        if self.drafts is not None:
            self.drafts.read(tokens_NT, hidden_NTD, extension, position_NT, mask)
        last = torch.tensor([length - 1 for length in lengths], device=self.device)
        hidden_ND = hidden_NTD[torch.arange(len(new), device=self.device), last]
        return hidden_ND, extension.keys(lengths)

    def decode(
        self,
        tokens_NT: NDArray[np.int64],
        length_N: NDArray[np.int64],
        shift_N: NDArray[np.int64] | None = None,
        adapters: Sequence[str] = (),
    ) -> Tensor:
        """(N, T, D) hidden states of more tokens in each row, whose caches hold `length_N` tokens.

        `shift_N`: where images make positions other than the number of tokens before. `adapters`: the rows' own.
        """
        plan = self.cache.decode(length_N, self.device, self._model.dtype, tokens_NT.shape[1])
        hidden_NTD = self.hidden(
            torch.from_numpy(tokens_NT[plan.order]).to(self.device),
            adapters=[adapters[row] for row in plan.order] if adapters else (),
            position_ids=positions(plan, shift_N),
            attention_mask=plan.mask,
            past_key_values=self.cache,
        )
        self.routes.order = plan.order
        return by_row(plan, hidden_NTD)

    def logits(self, found_NW: Tensor) -> Tensor:
        """fp32 (N, V) of what a pass gave. Refused while nothing is installed."""
        return self.head.logits(found_NW if self.drafts is None else self.drafts.own(found_NW))

    def hidden(
        self,
        tokens_NT: Tensor,
        pictures: Pictures | None = None,
        adapters: Sequence[str] = (),
        **arguments: Tensor | SlotCache | Extension,
    ) -> Tensor:
        """(N, T, D) hidden states before the head; of rows with these adapters, or all with the own policy's."""
        if self._adapters is not None:
            self._adapters.of(adapters or [""], self.device)
        self.routes.begin()
        body: Any = body_of(self._model)
        inputs: dict[str, Any] = {"input_ids": tokens_NT}
        if pictures is not None:
            inputs = language_inputs(body, tokens_NT, pictures)
        if self._images is not None:  # a wrapper would look for images among ids that were sampled
            body = body.language_model
        cached = "past_key_values" in arguments
        reads = Features(body, self.drafts.head.layers) if self.drafts is not None and cached else None
        with reads or nullcontext():
            found: Tensor = body(**inputs, use_cache=cached, **arguments).last_hidden_state
        cache = arguments.get("past_key_values")
        if isinstance(cache, SlotCache):
            cache.end_pass()
        return found if reads is None else torch.cat([found, reads.taken()], -1)

    def plain(self, ids: Sequence[int]) -> Tensor:
        """(T, V) log-probs behind each of these tokens as the model's class gives them, head and all."""
        if self._adapters is not None:
            self._adapters.of([""], self.device)
        untyped: Any = self._model
        with own_attention(self._model), plain_experts([self._model]):
            logits_TV: Tensor = untyped(input_ids=padded([ids], self.device), use_cache=False).logits[0]
        return logits_TV.float().log_softmax(-1)

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        return self._model.dtype

    @torch.inference_mode()
    def score(self, sequences: Sequence[Scored], distribution: Distribution) -> list[list[float]]:
        """Log-probs of one pass: for each sequence those of its ids from its start on."""
        lengths = [len(ids) for ids, _ in sequences]
        tokens_ST = padded([ids for ids, _ in sequences], self.device)
        hidden_STD = self.hidden(tokens_ST)
        counts = [length - start for length, (_, start) in zip(lengths, sequences, strict=True)]
        hidden_ND = torch.cat([hidden_STD[i, s - 1 : lengths[i] - 1] for i, (_, s) in enumerate(sequences)])
        tokens_N = torch.cat([tokens_ST[i, s : lengths[i]] for i, (_, s) in enumerate(sequences)])
        found: list[float] = []
        size = max(1, CHUNK_ELEMENTS // self.vocabulary_size)
        for begin in range(0, len(tokens_N), size):
            part_N = tokens_N[begin : begin + size]
            rows = RowDistributions.of([distribution] * len(part_N), self.device)
            scores_NV = process(self.head.logits(hidden_ND[begin : begin + size]), rows)
            found += chosen_log_probs(scores_NV, part_N).tolist()
        return split(found, counts)

    def install(
        self,
        policy: Policy,
        tensors: Sequence[WeightView],
        beside: Mapping[str, Adapter] = MappingProxyType({}),
    ) -> float:
        """Takes all weights, or none (ValueError); returns the seconds it took.

        On the CPU the views become the weights and are referenced until the next version; a GPU gets a copy.
        """
        start = time.perf_counter()
        if beside.keys() != self._names:
            raise ValueError(adapters_differ(beside, self._names))
        base = next((adapter.base for adapter in beside.values()), "")
        if not (base and base == self._base):
            self._base = ""
            self._memory.load(tensors, self.device)
            self.adopt_weights()
            self._base = base
        if self._adapters is not None:
            self._adapters.load(beside, self.device)
        self.policy = policy
        return time.perf_counter() - start

    def adopt_weights(self) -> None:
        """Computes with the weights that are there from now on; the first pass packs them, and the head in fp32."""
        self._layers.adopt()
        self._head = Head.of(self._model).packed_into(self._packed_head)

    @property
    def missing_bytes(self) -> int:
        """What the first pass of a version takes beside its cache: weights as the CPU's kernels read them."""
        return self._layers.missing_bytes + self._packed_head.missing_bytes

    def take_memory(self) -> None:
        """Room for the weights."""
        self._memory.take(self.device)

    def free_memory(self) -> None:
        """Drops weights and cache."""
        self.policy, self._head, self._base = None, None, ""
        if self._adapters is not None:
            self._adapters.free()
        self._memory.free()
        self._layers.free()
        self._packed_head.free()
        self.cache.free()
