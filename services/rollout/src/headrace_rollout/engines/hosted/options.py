"""What the settings of all hosted engines share: options, names of further arguments, devices, time limits.

Knows no engine: instances without it validate them all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import load_architecture
from headrace_schema.sections.generating import ModelSection, dividing_sizes
from headrace_servicekit.problems import KeyProblem, nearest
from headrace_servicekit.registry import Options, PluginError
from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from headrace_rollout.engines.hosted.backend import Deadlines, Start

_OF_THE_POLICY = ("mtp", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash", "dspark")
"""Methods of vLLM and SGLang whose drafts are made from hidden states of the model that checks them."""


class Speculation(Options):
    """Tokens that are drafted and then checked by the policy: what is sampled has its distribution all the same."""

    method: Literal["ngram", "draft"] = Field(
        description="ngram: what came behind the last tokens where the sequence had them before; draft: what a smaller "
        "model with the same vocabulary says"
    )
    tokens: Annotated[int, Field(ge=1, le=16)] = Field(
        default=4, description="tokens that are drafted at once"
    )
    longest_match: PositiveInt = Field(default=4, description="ngram: most last tokens that are looked for")
    shortest_match: PositiveInt = Field(
        default=1, description="ngram: fewest last tokens that are looked for"
    )
    model: str = Field(
        default="", description="draft: Hugging Face id or local directory of the smaller model"
    )
    revision: str | None = Field(default=None, description="draft: revision of a Hugging Face id")

    @field_validator("method", mode="before")
    @classmethod
    def _a_known_one(cls, method: object) -> object:
        if method in _OF_THE_POLICY:
            raise ValueError(
                f"{method} drafts by weights that go with those of one version, and no version brings the engine new "
                "ones; set ngram or draft, or trainer.draft with rollout.engine: transformers, where they learn"
            )
        return method

    @model_validator(mode="after")
    def _of_its_method(self) -> Self:
        if (self.method == "draft") != bool(self.model):
            raise ValueError("model: method: draft needs one and ngram has none; give it, or leave it out")
        if self.method == "draft" and (idle := self.model_fields_set & {"longest_match", "shortest_match"}):
            raise ValueError(f"{min(idle)}: has no effect with method: draft; leave it out")
        if self.shortest_match > self.longest_match:
            raise ValueError(f"shortest_match: {self.shortest_match} is above longest_match; swap them")
        return self


class HostedOptions(Options):
    """What a run may say about an engine in processes of its own."""

    tensor_parallel_size: PositiveInt | None = Field(
        default=None,
        description="devices among which each layer is divided: on GPUs an instance holds so many (times the pipeline "
        "size); default: 1",
    )
    enforce_eager: bool = Field(default=False, description="no CUDA graphs: slower, and starts sooner")
    speculative: Speculation | None = Field(
        default=None, description="draft tokens and check several at once; default: one token after the other"
    )
    batch_invariant: bool = Field(
        default=False,
        description="the engine's own kernels whose bits do not hang on the batch (vLLM's VLLM_BATCH_INVARIANT, "
        "SGLang's deterministic inference, as it is made for FSDP): slower, on GPUs alone. They are not the "
        "trainer's kernels: a run with deterministic: true has the engine transformers",
    )
    start_timeout_s: PositiveFloat = Field(default=600.0, description="longest start of the engine's process")
    install_timeout_s: PositiveFloat = Field(default=300.0, description="longest install of a version")
    silence_timeout_s: PositiveFloat = Field(
        default=120.0, description="seconds without a token, after which the engine counts as hung"
    )


KEY = "rollout.engine_options"


def deadlines_of(options: HostedOptions) -> Deadlines:
    """The options as the adapter takes them."""
    return Deadlines(
        start_s=options.start_timeout_s,
        install_s=options.install_timeout_s,
        silence_s=options.silence_timeout_s,
    )


def check_invariance(options: HostedOptions, *, has_gpu: bool) -> None:
    """Raises PluginError where an engine has no kernels whose bits do not hang on the batch."""
    if options.batch_invariant and not has_gpu:
        reason = "on a CPU the engine's sums follow the batch, whatever it is told"
        fix = "leave it out, or use the engine transformers with deterministic: true"
        raise PluginError([KeyProblem(f"{KEY}.batch_invariant", reason, fix)])


def check_names(
    given: Mapping[str, Any],
    known: Iterable[str],
    *,
    own: Mapping[str, str],
    fixed: Set[str],
    engine: str,
    listed_in: str,
    refused: Mapping[str, tuple[str, str]] | None = None,
) -> None:
    """Checks `engine_args`; raises PluginError with a problem for each name that cannot stand there.

    `own`: names that another setting decides, and which; `fixed`: those that Headrace sets; `known`: the engine's;
    `refused`: what is not offered, with reason and fix.
    """
    names = sorted(known)
    problems = []
    for name in given:
        key = f"{KEY}.engine_args.{name}"
        if name in own:
            problems.append(KeyProblem(key, "another setting decides it", f"set {own[name]}"))
        elif refused is not None and name in refused:
            problems.append(KeyProblem(key, *refused[name]))
        elif name in fixed:
            problems.append(KeyProblem(key, "Headrace sets it itself", "leave it out"))
        elif name not in names:
            close = nearest(name, names)
            fix = f"did you mean {close!r}?" if close else f"see {engine}'s {listed_in} for its names"
            problems.append(KeyProblem(key, f"{engine} has no such argument", fix))
    if problems:
        raise PluginError(problems)


SEVERAL_HOSTS = (
    "Headrace says where the ranks of an engine meet",
    "set rollout.engine_options.hosts of vLLM, or sizes that the GPUs of one host suffice for",
)
"""Reason and fix where one engine is asked for on several hosts by an engine's own arguments."""
_INSIDE = (
    "engines beside each other are instances, each with devices of its own",
    "set rollout.instances; experts are divided over an engine's devices by enable_expert_parallel",
)


def refused_parallelism(several_hosts: Iterable[str], inside: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Arguments by which an engine would span hosts, or hold several engines `inside`, with reason and fix."""
    return dict.fromkeys(several_hosts, SEVERAL_HOSTS) | dict.fromkeys(inside, _INSIDE)


def check_draft(speculation: Speculation | None, model: ModelSection) -> None:
    """Raises PluginError where a draft model has another vocabulary than the policy, and ModelNotReadable."""
    if speculation is None or not speculation.model:
        return
    given = {"path": speculation.model, "revision": speculation.revision, "gguf_file": None}
    own, draft = (
        int(load_architecture(each).get_text_config().vocab_size)
        for each in (model, model.model_copy(update=given))
    )
    if own != draft:
        reason = f"{speculation.model} has a vocabulary of {draft} tokens and {model.path} one of {own}"
        fix = "name a model of the same family, or set method: ngram"
        raise PluginError([KeyProblem(f"{KEY}.speculative.model", reason, fix)])


def parallel_size(wanted: int | None, start: Start, stages: int = 1, hosts: int = 1) -> int:
    """Devices of one layer: by default all GPUs of the lease, in each of `stages` that its layers are divided into.

    `hosts`: so many have a lease of as many. Raises ValueError when these have fewer, or unequal parts.
    """
    gpus = [device for device in start.devices if device.type == "cuda"]
    size = wanted or max(1, len(gpus) * hosts // stages)
    if gpus and size * stages > len(gpus) * hosts:
        raise ValueError(
            f"{KEY}.tensor_parallel_size: {size * stages} devices are wanted and {len(gpus) * hosts} are leased"
        )
    if size * stages % hosts:
        raise ValueError(f"{KEY}.hosts: {size * stages} devices cannot be divided among {hosts} hosts")
    return size


def check_heads(size: int | None, model: ModelSection) -> None:
    """Raises PluginError where so many devices cannot divide the model's attention heads, and ModelNotReadable."""
    config: Any = load_architecture(model).get_text_config()
    heads: int = getattr(config, "num_attention_heads", None) or 0
    keys: int = getattr(config, "num_key_value_heads", None) or heads
    valid = dividing_sizes(heads, keys)
    if size is None or not heads or size in valid:
        return
    reason = f"{size} devices cannot divide {heads} attention heads ({keys} of keys and values)"
    fix = f"set one of {', '.join(map(str, valid))}"
    raise PluginError([KeyProblem(f"{KEY}.tensor_parallel_size", reason, fix)])


@contextmanager
def needing(extra: str, engine: str) -> Iterator[None]:
    """Names the extra to install where the engine's package cannot be imported."""
    try:
        yield
    except ImportError as error:
        reason = f"{engine} cannot be imported by this instance: {error}"
        fix = f"install headrace-rollout[{extra}] where the instance runs, or choose transformers"
        raise PluginError([KeyProblem("rollout.engine", reason, fix)]) from error


def check_no_gguf(section: ModelSection, why: str) -> None:
    """Raises ModelNotReadable for a GGUF file."""
    if section.gguf_file is not None:
        raise ModelNotReadable(f"model.gguf_file: {why}")
