"""Adapters of experts: their gradient, what is published, the memory plan, resumes, divided experts, peft's format."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from backend_cases import config, part, walk_cases
from headrace_modelkit.loading import load_model, save_model
from headrace_modelkit.lora import is_adapter
from headrace_modelkit.presets.tiny import character_tokenizer, tiny_moe
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.weights import load_weights, state_tensors
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import OLD_LOG_PROBS
from headrace_trainer.backends.fsdp.layouts.planned import choose_layout
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.memory import Room, Rooms
from merged_models import base_model, merged
from peft import PeftModel
from torch.func import functional_call
from trainer_calls import TrainerClient
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

BOTH = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "experts"]}
FUSED = {**BOTH, "targets": ["gate_up_proj"]}
LAST = {**BOTH, "targets": ["o_proj", "layers.1.mlp.experts.down_proj"]}
ROOMY = Rooms(Room("host memory", 2**50, 2**50), None)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(3)
    shape = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 48, "num_local_experts": 4}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = {
        "qwen3_moe": tiny_moe(initializer_range=0.2),
        "mixtral": MixtralForCausalLM(
            MixtralConfig(**shape, **heads, max_position_embeddings=512, initializer_range=0.2)
        ),
    }
    for name, model in made.items():
        save_model(model, character_tokenizer(), folder / name)
    return {name: folder / name for name in made}


@pytest.fixture
def make_moved(make_backend, accumulate, sequences, models):
    """A backend whose adapters have left 0 by a step."""

    def make(lora=BOTH, model="qwen3_moe", dtype="float32", deterministic=False, **trainer):
        backend = make_backend(
            model={"path": str(models[model]), "dtype": dtype},
            trainer={"lora": lora, **trainer},
            deterministic=deterministic,
        )
        if deterministic:  # a step would compare log-probs with an engine's to the bit
            for name, shard in backend._sharded.parameters.items():
                shard.data.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
            return backend
        accumulate(backend, [sequences(1)], 512)
        assert backend.commit(7.0, 3e-2).finite
        return backend

    return make


@pytest.mark.parametrize(
    ("lora", "model", "trainer"),
    [
        (BOTH, "qwen3_moe", {}),
        (FUSED, "qwen3_moe", {"gradient_checkpointing": True}),
        (LAST, "qwen3_moe", {"backend_options": {"shard": "weights"}}),
        (BOTH, "mixtral", {}),
    ],
    ids=["both", "recomputed", "resharded", "mixtral"],
)
def test_the_gradient_is_autograds_through_a_plain_merged_model(
    make_moved, accumulate, sequences, relative_l2, lora, model, trainer
):
    backend = make_moved(lora, model, **trainer)
    adapters = {name: tensor.clone().requires_grad_() for name, tensor in backend._sharded.adapters()}
    experts = {name.rpartition(".")[0] for name in adapters if name.rpartition(".")[0].endswith("_adapter")}
    assert len(experts) == {"experts": 4, "gate_up_proj": 2}.get(lora["targets"][-1], 1)
    assert all(tensor.any() for tensor in adapters.values())
    weights, plain = merged(backend, adapters), base_model(backend)
    groups = [sequences(2), sequences(3)]
    total = 0.0
    for sequence in itertools.chain(*groups):
        logits = functional_call(plain, weights, (torch.tensor([sequence.tokens]),)).logits[0]
        rows = torch.tensor(sequence.trained) - 1
        ids = torch.tensor([sequence.tokens[position] for position in sequence.trained])
        gained_K = torch.tensor(sequence.advantages) * logits.log_softmax(-1)[rows, ids]
        total = total - sequence.weight * gained_K.sum()
    total.backward()
    accumulate(backend, groups, 512)
    found = backend.reduced_gradient(7.0)
    assert found.keys() == adapters.keys()
    for name, tensor in adapters.items():
        assert relative_l2({name: found[name]}, {name: tensor.grad / 7.0}) <= 1e-5, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_is_what_the_forward_computes_with(
    make_moved, make_backend, sequences, tmp_path, dtype
):
    """To the last bit in a deterministic run: a backend that loads the published weights gives the same log-probs."""
    backend = make_moved(dtype=dtype, deterministic=True)
    published, own = dict(backend.weights()), dict(state_tensors(base_model(backend)))
    assert published.keys() == own.keys(), "the model's own names: the checkpoint's come with the version"
    moved = {name for name, tensor in published.items() if not tensor.equal(own[name])}
    assert moved == {name for name in own if "q_proj" in name or ".experts." in name}
    model = base_model(backend)
    load_weights(model, published)
    save_model(model, load_tokenizer(backend._config.model), tmp_path / "merged")
    plain = make_backend(model={"path": str(tmp_path / "merged"), "dtype": dtype}, deterministic=True)
    for group in (sequences(2), sequences(3)):
        assert backend.infer([group], [OLD_LOG_PROBS]) == plain.infer([group], [OLD_LOG_PROBS])


def test_the_memory_plan_is_what_the_backend_has(make_moved):
    backend = make_moved()
    plan = backend.memory_plan(ROOMY).host
    shards = backend._sharded.shards()
    assert any(name.endswith("gate_up_proj_adapter.lora_B") for name in shards)
    assert plan["masters"] == sum(shard.nbytes for shard in shards.values()) == plan["moments"] / 2
    frozen = {name: t for name, t in state_tensors(backend._sharded.model) if not is_adapter(name)}
    assert plan["frozen weights"] == sum(tensor.nbytes for tensor in frozen.values())
    assert plan["gathered weights"] == plan["masters"]
    assert "merged experts" not in plan
    merging = make_moved(deterministic=True).memory_plan(ROOMY).host
    assert merging["merged experts"] == frozen["model.layers.0.mlp.experts.gate_up_proj"].nbytes


def test_a_rank_that_divides_experts_is_planned_with_its_share(make_config, models):
    path = str(models["qwen3_moe"])
    config = TrainerConfig.model_validate(
        make_config(
            model={"path": path, "dtype": "float32"}, trainer={"lora": BOTH, "ranks": 2}, deterministic=True
        )
    )

    def planned(expert_parallel: int) -> Mapping[str, int]:
        options = FsdpOptions(expert_parallel=expert_parallel, shard="state")
        return choose_layout(config, build_algorithm(config.algorithm), options, 2, 2, ROOMY)[1].host

    whole, share = planned(1), planned(2)
    assert share["merged experts"] == whole["merged experts"] / 2
    # Experts of both layers, with A and B of each of them: half stays with the other rank.
    shapes = [own.shape for name, own in state_tensors(load_model(config.model)) if ".experts." in name]
    elements = sum(count * (outputs * inputs + 4 * (outputs + inputs)) for count, outputs, inputs in shapes)
    assert len(shapes) == 4 and whole["gathered weights"] - share["gathered weights"] == 4 * elements / 2


async def test_a_resume_goes_on_to_the_same_bits(client: TrainerClient, make_config, models):
    config = make_config(
        deterministic=True,
        model={"path": str(models["qwen3_moe"]), "dtype": "float32"},
        trainer={"lora": BOTH},
        optimizer={"lr": 1e-2},
        algorithm={"options": {"kl_loss_coef": 0.3}},
    )
    first = await client.train((await client.open(config)).version, 1)
    saved = (await client.save(first.number)).checkpoint
    straight = await client.train(first, 2)
    await client.close_run()
    again = await client.open(config, checkpoint=saved.name, number=40)
    assert again.version.digest == first.digest
    assert (await client.train(again.version, 2)).digest == straight.digest


@pytest.mark.parametrize("lora", [BOTH, FUSED, LAST], ids=["both", "one", "last"])
@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
async def test_peft_reads_the_exported_adapter_as_the_merged_model(
    client: TrainerClient, make_config, models, model, lora, recwarn
):
    sections = {"trainer": {"lora": lora}, "optimizer": {"lr": 1e-2}}
    opened = await client.open(
        make_config(model={"path": str(models[model]), "dtype": "float32"}, **sections)
    )
    await client.train(opened.version, 2)
    exported = Path((await client.export("final")).path)
    ids = torch.arange(3, 30)[None]

    def logits(model) -> torch.Tensor:
        with torch.no_grad():
            return model(ids).logits

    base = AutoModelForCausalLM.from_pretrained(models[model])
    merged = logits(AutoModelForCausalLM.from_pretrained(exported))
    assert (logits(base) - merged).abs().max() > 0.1, "it has learned"
    with_adapter = PeftModel.from_pretrained(base, exported / "adapter")
    assert not [each for each in recwarn if "missing adapter keys" in str(each.message)]
    torch.testing.assert_close(logits(with_adapter), merged, rtol=1e-4, atol=1e-4)


DIVIDED = {"divided": {"expert_parallel": 2}, "resharded": {"shard": "weights"}}


@pytest.fixture(scope="module")
def walked(tmp_path_factory, models) -> dict[str, SimpleNamespace]:
    folder = tmp_path_factory.mktemp("walks")
    path = models["qwen3_moe"]
    # A warm-up, so that no B is 0, and the reference has adapters too.
    adapted = {"lora": BOTH, "warmup": {"steps": 2, "lr": 1e-2, "batch": 6}}
    beside = {"warmup_examples": [{"text": f"copy {n}: ", "answer": str(n)} for n in range(10, 20)]}
    alone = walk_cases(
        folder, 1, {"alone": {"config": config(path, backend="fsdp", **adapted) | beside, "saved": ""}}
    )
    cases = {
        name: {"config": config(path, 2, options, backend="fsdp", **adapted) | beside, "saved": ""}
        for name, options in DIVIDED.items()
    }
    return alone | walk_cases(folder, 2, cases)


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", DIVIDED)
def test_two_ranks_train_as_one(walked, name, relative_l2):
    found, alone = walked[name], walked["alone"]
    gradient = part(alone.tensors, "gradient")
    assert any("down_proj_adapter.lora_A" in key for key in gradient)
    for weight, value in gradient.items():
        assert value.any(), f"{weight} learns"
        assert relative_l2({weight: found.tensors[f"gradient/{weight}"]}, {weight: value}) < 1e-4, weight
    assert relative_l2(part(found.tensors, "gradient"), gradient) < 1e-5

    assert relative_l2(part(found.tensors, "weights"), part(alone.tensors, "weights")) < 1e-5
    assert relative_l2(part(found.tensors, "moments"), part(alone.tensors, "moments")) < 1e-4
    assert found.layout == alone.layout and found.held and found.refused
