"""Models that judge: a classifier of sequences or tokens, asked about many sequences in batches of tokens, or made of a
causal language model's body and a scalar head; a vision-language model, asked what it would say first about pictures.

Shapes: B sequences, T positions, L labels, K words. Knows no reward and no message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from headrace_schema.images import VISION_FAMILIES
from headrace_schema.sections.generating import ModelSection
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from headrace_modelkit.devices import moved
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import (
    DTYPES,
    body_of,
    context_limit,
    load_architecture,
    load_model,
    reading,
    reads_images,
    trusted,
)
from headrace_modelkit.logprobs import Head
from headrace_modelkit.model_files import empty_model, parameters_on_meta
from headrace_modelkit.pictures import Span
from headrace_modelkit.tokenizer import TextCodec, load_tokenizer
from headrace_modelkit.vision import Pictures, language_inputs
from headrace_modelkit.weights import state_tensors

Seen = tuple[list[int], list[Span]]
"""Ids of a prompt, and where its pictures are among them."""


class Classifier:
    """A model of form `…ForSequenceClassification` or `…ForTokenClassification` with its tokenizer, on one device.

    What a classifier of tokens says of a sequence is what it says of its last token.
    """

    def __init__(self, model: Any, tokenizer: Any, longest: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.longest = longest
        """Positions that the model has."""
        self.labels = int(model.config.num_labels)

    @classmethod
    def load(cls, path: str, revision: str | None, dtype: str, device: str) -> Classifier:
        """Reads a model directory or Hugging Face id; `dtype` and `device` as torch names them.

        Raises:
            ModelNotReadable: there is none, or it is no classifier.
            torch.OutOfMemoryError, RuntimeError: the device has no room for it, or is none.
        """
        section = ModelSection.model_validate({"path": path, "revision": revision})
        architecture = load_architecture(section)
        kinds = ", ".join(architecture.architectures or ["unknown"])
        names = architecture.architectures or []
        forms: dict[str, Any] = {"ForSequenceClassification": AutoModelForSequenceClassification}
        forms["ForTokenClassification"] = AutoModelForTokenClassification
        form = next((made for end, made in forms.items() if any(name.endswith(end) for name in names)), None)
        if form is None:
            raise ModelNotReadable(
                f"{path!r} is a {kinds} and no sequence classifier; give a reward model, whose config.json names an "
                "architecture …ForSequenceClassification or …ForTokenClassification"
            )
        with reading(section):
            model, report = form.from_pretrained(
                path,
                config=architecture,
                dtype=getattr(torch, dtype),
                use_safetensors=True,
                output_loading_info=True,
                **trusted(section),
            )
            tokenizer = AutoTokenizer.from_pretrained(path, **trusted(section))
        if missing := sorted(report["missing_keys"]):
            raise ModelNotReadable(f"{path!r} lacks {len(missing)} weights, first {missing[0]}")
        return cls(model.to(device).eval(), tokenizer, context_limit(section, architecture))

    def logits(self, sequences: Sequence[Sequence[int]], batch_tokens: int) -> Tensor:
        """(B, L) logits in fp32 on the CPU, of whole sequences of ids in their order.

        Sequences of like length share a batch, which has at most `batch_tokens` positions, padding included, or one
        sequence.
        """
        found = torch.empty(len(sequences), self.labels)
        with torch.inference_mode():
            for places in _batches([len(ids) for ids in sequences], batch_tokens):
                found[places] = self._forward([sequences[place] for place in places])
        return found

    def _forward(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, sequences))
        # The model reads its label at the last id that is no padding: an id that stands in none of these sequences, as
        # one that also ends them would be skipped there.
        pad = _absent(sequences)
        if len(sequences) > 1 and pad >= self.model.config.get_text_config().vocab_size:
            return torch.cat([self._forward([ids]) for ids in sequences])
        ids_BT = torch.full((len(sequences), longest), pad)
        mask_BT = torch.zeros((len(sequences), longest), dtype=torch.long)
        for row, ids in enumerate(sequences):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
            mask_BT[row, : len(ids)] = 1
        for config in (self.model.config, self.model.config.get_text_config()):
            config.pad_token_id = pad if len(sequences) > 1 else None
        device = self.model.device
        logits: Tensor = self.model(input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device)).logits
        if logits.dim() == 3:  # of each token
            last_B = torch.tensor([len(ids) - 1 for ids in sequences], device=device)
            logits = logits[torch.arange(len(sequences), device=device), last_B]
        return logits.float().cpu()


class Viewer:
    """A vision-language model that is asked about pictures, on one device: what it would say first."""

    def __init__(self, model: PreTrainedModel, codec: TextCodec, longest: int) -> None:
        assert codec.images is not None
        self.model, self.codec, self.longest = model, codec, longest
        self._reader, self._head = codec.images, Head.of(model)

    @classmethod
    def load(cls, path: str, revision: str | None, dtype: str, device: str) -> Viewer:
        """As `Classifier.load`; raises ModelNotReadable also for a model that reads no pictures, or no chat."""
        section = ModelSection.model_validate({"path": path, "revision": revision, "dtype": dtype})
        architecture = load_architecture(section)
        if not reads_images(architecture):
            raise ModelNotReadable(
                f"{path!r} is a {architecture.model_type}, which reads no pictures; give a vision-language model: "
                + ", ".join(VISION_FAMILIES)
            )
        codec = load_tokenizer(section)
        if not codec.tokenizer.chat_template:
            raise ModelNotReadable(
                f"{path!r} has no chat template; give a model that was tuned to follow instructions"
            )
        return cls(load_model(section, device=device), codec, context_limit(section, architecture))

    def prompt(self, text: str, pictures: Sequence[bytes], arguments: Mapping[str, Any]) -> Seen:
        """A user's message, whose marks stand for image files, and the beginning of the reply. Raises ValueError."""
        chat = [{"role": "user", "content": text}]
        ids = self.codec.encode_prompt(chat=chat, images=pictures, arguments=arguments)
        images = [self._reader.read(data) for data in pictures]
        return ids, [Span(*each) for each in zip(self._reader.starts(ids, images), images, strict=True)]

    def log_probs(self, prompts: Sequence[Seen], words: Sequence[int], batch_tokens: int) -> Tensor:
        """(B, K) fp32 log-probs on the CPU of these ids as the first of a reply; batches as in `Classifier.logits`."""
        found_BK = torch.empty(len(prompts), len(words))
        with torch.inference_mode():
            for places in _batches([len(ids) for ids, _ in prompts], batch_tokens):
                log_probs_BV = self._forward([prompts[place] for place in places])
                found_BK[places] = log_probs_BV[:, list(words)].cpu()
        return found_BK

    def _forward(self, prompts: Sequence[Seen]) -> Tensor:
        lengths = [len(ids) for ids, _ in prompts]
        # Causal attention never looks right, so padding behind a prompt needs no mask.
        tokens_BT = torch.full((len(prompts), max(lengths)), self.codec.pad_id)
        for row, (ids, _) in enumerate(prompts):
            tokens_BT[row, : len(ids)] = torch.tensor(ids)
        device = self.model.device
        pictures = Pictures.of_rows([spans for _, spans in prompts], max(lengths), self._reader)
        body: Any = body_of(self.model)
        inputs = language_inputs(body, tokens_BT.to(device), moved(pictures, device))
        hidden_BTD = body.language_model(**inputs, use_cache=False).last_hidden_state
        last_B = torch.tensor(lengths, device=device) - 1
        return self._head.logits(hidden_BTD[torch.arange(len(prompts), device=device), last_B]).log_softmax(
            -1
        )


def empty_judge(config: ModelSection, form: str) -> PreTrainedModel:
    """The classifier of `config`'s family on meta, in its type: of "answers", with one label, or of "steps", of tokens
    with the labels bad and good.

    Raises ModelNotReadable for a family that has none, or one whose body is another.
    """
    architecture = load_architecture(config)
    made: Any = AutoModelForSequenceClassification if form == "answers" else AutoModelForTokenClassification
    name = "…ForSequenceClassification" if form == "answers" else "…ForTokenClassification"
    if type(architecture) not in made._model_mapping:
        raise ModelNotReadable(
            f"model.path: transformers has no {name} of {architecture.model_type}, as which a reward model is "
            "exported; name a model of another family, such as llama, qwen2 or qwen3"
        )
    architecture.num_labels = 1 if form == "answers" else 2
    with parameters_on_meta(), reading(config):
        model: PreTrainedModel = made.from_config(architecture, dtype=DTYPES[config.dtype])
    own = dict(state_tensors(model))
    body = [value for each, value in state_tensors(empty_model(config)) if each in own]
    if len(body) + len(_head_names(model)) != len(own):
        raise ModelNotReadable(
            f"model.path: {name} of {architecture.model_type} is made of other parts than its language model; name a "
            "model of another family, such as llama, qwen2 or qwen3"
        )
    return model


def body_weights(
    judge: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Those of a language model's weights that its classifier has too."""
    own = dict(state_tensors(judge))
    return ((name, tensor) for name, tensor in tensors if name in own)


def head_weights(judge: PreTrainedModel, head: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The classifier's head of a scalar one, `weight` (D) and maybe `bias` (1): of two labels the logit is the good
    one's, and the bad one's is 0.
    """
    for name in _head_names(judge):
        own = head.get(name.rpartition(".")[2], torch.zeros(1))
        rows = own[None] if name.endswith("weight") else own
        yield name, torch.cat([torch.zeros_like(rows), rows]) if judge.config.num_labels == 2 else rows


def _head_names(judge: PreTrainedModel) -> list[str]:
    """Of the last linear layer's weights."""
    untyped: Any = judge
    return (
        [f"score.{name}" for name, _ in untyped.score.named_parameters()] if hasattr(judge, "score") else []
    )


def _absent(sequences: Sequence[Sequence[int]]) -> int:
    """The smallest id that is in none of the sequences."""
    used = {id for ids in sequences for id in ids}
    return next(id for id in range(len(used) + 1) if id not in used)


def _batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Places of sequences by batch, from the shortest to the longest."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[place] > tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
