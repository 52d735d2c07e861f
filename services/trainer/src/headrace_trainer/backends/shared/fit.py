"""Whether a checkpoint is of this run's model and optimizer: by names and shapes, before anything is loaded."""

from __future__ import annotations

from headrace_modelkit.critic import Critic
from headrace_modelkit.families.draft_files import add_draft
from headrace_modelkit.families.drafts import DRAFT
from headrace_modelkit.loading import load_model
from headrace_modelkit.lora import add_adapters, is_adapter
from headrace_modelkit.vision import vision_tower
from headrace_modelkit.weights import state_tensors
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.learning import LoraSection, OptimizerSection
from torch import nn

from headrace_trainer.backends._base import StateReader
from headrace_trainer.backends.shared.optimizer import KINDS, MOMENTS
from headrace_trainer.errors import Refusal

CRITIC = "critic."
"""What names of a critic's weights begin with, beside the policy's."""
ALPHA = "alpha"
"""Stands among the parts of adapters for the number that scales them."""


def check_fit(reader: StateReader, config: TrainerConfig, critic: Critic | None) -> None:
    """Raises Refusal CHECKPOINT_MISMATCH with `key` model.path, optimizer.name, trainer.lora, trainer.freeze,
    trainer.draft or algorithm.options.critic.

    Raises ModelNotReadable too. A checkpoint's critic is left out where the run has none.
    """
    model, lora = load_model(config.model, weights=False), config.trainer.lora
    if lora is not None:
        add_adapters(model, lora, config.seed, vision=not config.trainer.freezes_vision)
    _check_draft(reader, wanted=add_draft(model, config.trainer.draft, config.model) is not None)
    check_weights(reader, model, lora, repr(config.model.path), optimizer=config.optimizer)
    if lora is None and (tower := vision_tower(model)) is not None:
        own_tower = {*tower.parameters()}
        _check_vision(reader, {name for name, p in model.named_parameters() if p in own_tower}, config)
    if critic is not None:
        _check_critic(reader.critic_shapes(), critic)


def check_weights(
    reader: StateReader,
    model: nn.Module,
    lora: LoraSection | None,
    name: str,
    key: str = "model.path",
    *,
    optimizer: OptimizerSection | None = None,
) -> None:
    """As `check_fit`, of a model that has its adapters, if any; `name` and `key` are for people."""
    shapes = {each: tuple(tensor.shape) for each, tensor in state_tensors(model)}
    own = {each: shape for each, shape in shapes.items() if not is_adapter(each)}
    check_state_shapes(reader, own, name, key, optimizer)
    if lora is None and reader.adapter_shapes():
        raise _mismatch(
            "trainer.lora",
            "the checkpoint has adapters, and this run trains all weights; give trainer.lora as it was, or export the "
            "checkpoint's model and name that as model.path",
        )
    if lora is not None:
        _check_adapters(reader, {each: shapes[each] for each in shapes if is_adapter(each)}, lora)


def _check_draft(reader: StateReader, *, wanted: bool) -> None:
    found = any(name.startswith(DRAFT) for name in reader.weight_shapes())
    if found != wanted:
        has, fix = ("a head that drafts", "give") if found else ("no head that drafts", "leave out")
        raise _mismatch(
            "trainer.draft",
            f"the checkpoint has {has}; {fix} trainer.draft, or export the checkpoint's model and name that as "
            "model.path",
        )


def _check_vision(reader: StateReader, tower: set[str], config: TrainerConfig) -> None:
    """A vision tower that was frozen has no moments to go on with, and one that learned has some."""
    learned = bool(tower & reader.moment_names())
    if learned == config.trainer.freezes_vision:
        was, fix = ("trained", "[]") if learned else ("frozen", "[vision]")
        raise _mismatch(
            "trainer.freeze",
            f"the checkpoint's vision tower was {was}; set trainer.freeze: {fix}, or export the checkpoint's model and "
            "name that as model.path",
        )


def check_state_shapes(
    reader: StateReader,
    own: dict[str, tuple[int, ...]],
    model: str,
    key: str = "model.path",
    optimizer: OptimizerSection | None = None,
) -> None:
    """Raises Refusal CHECKPOINT_MISMATCH unless weights of these shapes and the optimizer's moments are there."""
    if problem := _difference(reader.weight_shapes(), own):
        raise _mismatch(
            key,
            f"{model} is not the model of the checkpoint: {problem}; name the model that it was made with",
        )
    name = optimizer.name if optimizer is not None else "adamw"
    kinds = KINDS if name == "muon" else MOMENTS
    if (saved := reader.moment_kinds()) == set(kinds):
        return
    found = ", ".join(sorted(saved)) or "none"
    made_by = {KINDS: "muon", MOMENTS: "adamw or adamw_8bit"}
    was = next((each for known, each in made_by.items() if set(known) == saved), "")
    fix = f"set optimizer.name: {was}" if was else f"name a checkpoint that {made_by[kinds]} made"
    raise _mismatch(
        "optimizer.name",
        f"the checkpoint has the optimizer state {found}, this run's {name} has {', '.join(kinds)}; {fix}",
    )


def _check_adapters(reader: StateReader, own: dict[str, tuple[int, ...]], lora: LoraSection) -> None:
    saved = {name: shape for name, shape in reader.adapter_shapes().items() if name != ALPHA}
    if not saved:
        raise _mismatch(
            "trainer.lora",
            "the checkpoint has no adapters: all its weights were trained; leave trainer.lora out, or export its model "
            "and name that as model.path",
        )
    if problem := _difference(saved, own):
        key = "trainer.lora.targets" if saved.keys() ^ own.keys() else "trainer.lora.rank"
        raise _mismatch(key, f"the checkpoint has other adapters: {problem}; set {key} as it was")
    if (alpha := float(reader.adapter(ALPHA))) != lora.alpha:
        raise _mismatch(
            "trainer.lora.alpha",
            f"the checkpoint's adapters count {alpha:g} / rank times, not {lora.alpha:g} / rank; "
            f"set trainer.lora.alpha: {alpha:g}",
        )


def _check_critic(saved: dict[str, tuple[int, ...]], critic: Critic) -> None:
    key = "algorithm.options.critic"
    if not saved:
        raise _mismatch(
            key,
            "the checkpoint has no critic: the algorithm that made it had none; export its model and name that as "
            "model.path, or name a checkpoint that was made with a critic",
        )
    own = {f"{CRITIC}{name}": tuple(tensor.shape) for name, tensor in critic.tensors()}
    if problem := _difference(saved, own):
        raise _mismatch(
            key, f"the checkpoint has another critic: {problem}; set the critic's options as they were"
        )


def _difference(saved: dict[str, tuple[int, ...]], own: dict[str, tuple[int, ...]]) -> str:
    for name in sorted(saved.keys() & own.keys()):
        if saved[name] != own[name]:
            return f"{name} has the shape {list(saved[name])} there and {list(own[name])} here"
    if missing := own.keys() - saved.keys():
        return f"it has no {min(missing)} ({len(missing)} missing)"
    if extra := saved.keys() - own.keys():
        return f"it has {min(extra)}, which the model has not ({len(extra)} of them)"
    return ""


def _mismatch(key: str, message: str) -> Refusal:
    return Refusal("CHECKPOINT_MISMATCH", f"{key}: {message}", key=key)
