"""A backend over prompts with images: log-probs and gradients against a forward of transformers for each sequence."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import torch
from backend_cases import walk_cases
from backend_ranks import SavedState
from headrace.common.v1 import common_pb2
from headrace_modelkit.loading import load_model
from headrace_modelkit.pictures import place_number
from headrace_modelkit.presets.tiny_vision import write_tiny_vision
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.vision import vision_tower
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.digests import digest_bytes, trajectory_digest
from headrace_trainer.algorithms._base import OLD_LOG_PROBS
from headrace_trainer.backends.shared.warmup import SupervisedBatches
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.packing import Attends, pack
from headrace_trainer.learning.pictures import place_images
from headrace_trainer.learning.samples import Image, Sample
from headrace_trainer.ranks.messages import Header, InferRound, MicroRound, packed, unpacked
from headrace_trainer.workloads import run_kind
from safetensors.torch import save_file
from state_parts import whole_state
from trainer_calls import settled_group
from vision_groups import every, expected, group_of, png


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    write_tiny_vision(directory, family=request.param, initializer_range=0.2)
    return directory


@pytest.fixture(scope="module")
def codec(directory):
    return load_tokenizer(ModelSection(path=str(directory), dtype="float32"))


@pytest.fixture(scope="module")
def groups(codec) -> list[list[Sample]]:
    """Two prompts of the same text and different images, one of two images, one of none; answers begin alike."""
    texts = [
        ("<image>which?", (png(1),)),
        ("<image>which?", (png(2),)),
        ("a<image>b<image>c", (png(3, 32), png(1))),
        ("no image", ()),
    ]
    return [group_of(codec, text, images, seed) for seed, (text, images) in enumerate(texts)]


@pytest.fixture(scope="module")
def with_images_behind(codec) -> list[list[Sample]]:
    """Conversations in which somebody shows an image behind the last token that is learned, or between two of them."""
    found = []
    for seed, text, files, later in (
        (0, "<image>which?", (png(1),), (png(3, 32),)),
        (1, "no image", (), (png(1),)),
        (2, "<image>which?", (png(2),), (png(2),)),
        (3, "a<image>b<image>c", (png(3, 32), png(1)), (png(2), png(3, 32))),
    ):
        group = []
        for sequence in group_of(codec, text, files, seed)[:2]:
            shown = codec.encode_prompt(
                chat=[{"role": "user", "content": "<image>" * len(later)}], images=later
            )
            images = tuple(Image(digest_bytes(data), data) for data in later)
            behind = place_images(shown, images, codec.images)
            whole = msgspec.structs.replace(
                sequence,
                tokens=[*sequence.tokens, *behind, *([9, 10] if len(group) else [])],
                images=tuple(dict.fromkeys((*sequence.images, *images))),
            )
            group.append(whole)
        found.append(group)
    return found


@pytest.mark.parametrize(
    "rows",
    [
        lambda groups: groups,
        lambda groups: [every(groups)],
        lambda groups: [[each] for each in every(groups)],
    ],
    ids=["a row a group", "one row", "a row a sequence"],
)
@pytest.mark.parametrize("attends", ["mask", "cheapest", "segments"])
def test_images_behind_the_last_learned_token_are_not_read(
    make_backend, directory, codec, with_images_behind, rows, attends
):
    """They are an environment's last words, or another role's: what is learned came before them."""
    backend = make_backend(model={"path": str(directory)})
    model = load_model(ModelSection(path=str(directory), dtype="float32"))
    asked = rows(with_images_behind)
    found = [own[OLD_LOG_PROBS] for own in backend.infer(asked, [OLD_LOG_PROBS])]
    before = [
        msgspec.structs.replace(each, tokens=each.tokens[: each.trained[-1] + 1], images=_read_before(each))
        for each in every(asked)
    ]
    for own, sequence in zip(found, before, strict=True):
        torch.testing.assert_close(torch.tensor(own), expected(model, codec, sequence), rtol=1e-4, atol=1e-5)
    assert backend.micro(asked)
    form = {each.name.lower(): each for each in Attends}[attends]
    packed_rows = pack(asked, shared=True, attends=form, images=codec.images)
    plain_rows = pack([_without_behind(row) for row in asked], shared=True, attends=form, images=codec.images)
    for name in ("places_M", "features_M"):
        assert torch.equal(getattr(packed_rows.pictures, name), getattr(plain_rows.pictures, name)), name
    one, other = packed_rows.pictures.inputs, plain_rows.pictures.inputs
    assert {kind: [*each] for kind, each in one.items()} == {kind: [*each] for kind, each in other.items()}
    assert all(torch.equal(each, other[kind][name]) for kind in one for name, each in one[kind].items())


def _read_before(sequence: Sample) -> tuple[Image, ...]:
    numbers = set(sequence.tokens[: sequence.trained[-1]])
    return tuple(image for image in sequence.images if place_number(image.digest) in numbers)


def _without_behind(row: list[Sample]) -> list[Sample]:
    return [msgspec.structs.replace(each, tokens=each.tokens[: each.trained[-1] + 1]) for each in row]


@pytest.mark.parametrize(
    "rows",
    [
        lambda groups: groups,
        lambda groups: [every(groups)],
        lambda groups: [[each] for each in every(groups)],
    ],
    ids=["a row a group", "one row", "a row a sequence"],
)
def test_log_probs_are_those_of_transformers_in_any_packing(make_backend, directory, codec, groups, rows):
    backend = make_backend(model={"path": str(directory)})
    assert backend.shares_prefixes
    model = load_model(ModelSection(path=str(directory), dtype="float32"))
    found = backend.infer(rows(groups), [OLD_LOG_PROBS])
    with torch.no_grad():
        own = [expected(model, codec, sequence) for sequence in every(groups)]
    for columns, expected_K in zip(found, own, strict=True):
        assert columns[OLD_LOG_PROBS] == pytest.approx(expected_K.tolist(), abs=1e-4)


@pytest.mark.parametrize("freeze", [[], ["vision"]])
def test_the_gradient_is_autograds(make_backend, directory, codec, groups, relative_l2, freeze):
    backend = make_backend(model={"path": str(directory)}, trainer={"freeze": freeze})
    model: Any = load_model(ModelSection(path=str(directory), dtype="float32"))
    total = sum(
        -(torch.tensor(each.advantages) * expected(model, codec, each)).sum() for each in every(groups)
    )
    total.backward()
    tower = {name for name, _ in vision_tower(model).named_parameters(prefix="model")}
    own = {name: p.grad for name, p in model.named_parameters() if not freeze or name not in tower}
    assert backend.micro(groups)
    found = backend.reduced_gradient(1.0)
    assert found.keys() == own.keys()
    assert relative_l2(found, own) <= 1e-5


def test_a_frozen_tower_is_published_and_saved_as_it_was_read(make_backend, directory, groups):
    backend = make_backend(model={"path": str(directory), "dtype": "bfloat16"})
    before = {name: value.clone() for name, value in backend.weights()}
    assert backend.micro(groups) and backend.commit(10.0, 1e-2).finite
    after = dict(backend.weights())
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved and not any("visual" in name for name in moved)
    assert {str(value.dtype) for name, value in after.items() if "visual" in name} == {"torch.bfloat16"}


def test_a_state_goes_on_and_one_with_another_tower_is_refused(
    make_backend, trainer_group, directory, groups, tmp_path
):
    section = {"path": str(directory), "dtype": "bfloat16"}
    backend = make_backend(model=section)
    assert backend.micro(groups) and backend.commit(10.0, 1e-2).finite
    weights = {
        f"weights/{name}": value for name, value in whole_state(trainer_group, backend.weight_parts()).items()
    }
    moments = {
        f"moments/{name}": value for name, value in whole_state(trainer_group, backend.moment_parts()).items()
    }
    save_file({name: value.contiguous() for name, value in (weights | moments).items()}, tmp_path / "state")
    reader = SavedState(tmp_path / "state")
    other = make_backend(model=section)
    other.check_state(reader)
    other.load_state(reader)
    assert other.infer(groups, [OLD_LOG_PROBS]) == backend.infer(groups, [OLD_LOG_PROBS])
    trained = make_backend(model=section, trainer={"freeze": []})
    with pytest.raises(Refusal, match="the checkpoint's vision tower was frozen"):
        trained.check_state(reader)


def test_adapters_learn_beside_images(make_backend, directory, groups):
    for freeze in (None, []):
        backend = make_backend(
            model={"path": str(directory)}, trainer={"lora": {"rank": 2}, "freeze": freeze}
        )
        assert backend.micro(groups)
        found = backend.reduced_gradient(1.0)
        assert any("visual" in name and value.any() for name, value in found.items()) is (freeze == [])


def test_a_warm_up_reads_the_images_of_its_examples(make_config, directory, codec):
    import base64

    example = {
        "chat": [{"role": "user", "content": "<image>which?"}],
        "answer": "7",
        "images": [base64.b64encode(png(1)).decode()],
    }
    config = TrainerConfig.model_validate(
        make_config(
            model={"path": str(directory)},
            trainer={"warmup": {"steps": 1, "batch": 1}},
            warmup_examples=[example],
        )
    )
    ((((sequence,),),), tokens) = SupervisedBatches(config, 0, 1).step(0, shared=True)
    assert tokens == 2 and sum(token < 0 for token in sequence.tokens) == 4
    assert [image.data for image in sequence.images] == [png(1)]


def settled(codec: Any, data: bytes, digests: list[str]) -> Any:
    group = settled_group(1, version=common_pb2.PolicyVersion(number=1))
    ids = codec.encode_prompt(chat=[{"role": "user", "content": "<image>which?"}], images=[data])
    for member in group.members:
        trajectory = member.trajectory
        (branch,) = trajectory.branches
        branch.segments[0].tokens.token_ids[:] = ids
        for digest in digests:
            branch.images.add(digest=digest, start=ids.index(codec.images.token))
        trajectory.body_digest = trajectory_digest(trajectory)
    group.images.add(digest=digest_bytes(data), data=data)
    return group


def test_a_settled_group_comes_with_its_images_once(make_config, directory, codec, tiny_directory):
    data = png(1)
    kind = run_kind(TrainerConfig.model_validate(make_config(model={"path": str(directory)})))
    group = kind.read_group(settled(codec, data, [digest_bytes(data)]))
    branches = [branch for member in group.members for branch in member.samples]
    assert all(branch.images == (Image(digest_bytes(data), data),) for branch in branches)
    assert all(sum(token < 0 for token in branch.tokens) == 4 for branch in branches)
    with pytest.raises(Refusal, match="were made with other images"):
        kind.read_group(settled(codec, data, []))
    broken = settled(codec, data, [digest_bytes(data)])
    broken.images[0].data = png(2)
    with pytest.raises(Refusal, match="has not its digest"):
        kind.read_group(broken)
    moved = settled(codec, data, [digest_bytes(data)])
    for member in moved.members:
        member.trajectory.branches[0].images[0].start += 1
        member.trajectory.body_digest = trajectory_digest(member.trajectory)
    with pytest.raises(Refusal, match="are not those of an image"):
        kind.read_group(moved)
    text = run_kind(TrainerConfig.model_validate(make_config(model={"path": str(tiny_directory)})))
    with pytest.raises(Refusal, match="reads none"):
        plain = settled_group(1, version=common_pb2.PolicyVersion(number=1))
        plain.images.add(digest=digest_bytes(data), data=data)
        text.read_group(plain)


def test_an_image_is_announced_once_to_a_rank(groups):
    for round in (MicroRound([groups, groups], {}), InferRound(groups, ["values"])):
        sent = msgspec.msgpack.encode(packed(Header(1, 2, 3, 4, round)))
        assert sent.count(png(1)) == sent.count(png(2)) == 1
        assert unpacked(msgspec.msgpack.decode(sent, type=Header)).round == round


@pytest.mark.parametrize(
    ("trainer", "algorithm", "key"),
    [
        ({"backend_options": {"context_parallel": 2}, "ranks": 2}, {}, "context_parallel"),
        ({}, {"name": "ppo", "group_size": 1, "options": {"critic": "model"}}, "critic"),
    ],
)
def test_what_a_vision_model_cannot_do_is_refused(make_config, directory, trainer, algorithm, key):
    config = make_config(model={"path": str(directory)}, trainer=trainer, algorithm=algorithm)
    with pytest.raises(Refusal) as refused:
        run_kind(TrainerConfig.model_validate(config)).check()
    assert key in refused.value.message and "vision-language" in refused.value.message


def test_a_part_that_the_model_has_not_cannot_be_frozen(make_config, directory, tiny_directory):
    for path, part, said in (
        (directory, "language", "its parts are vision"),
        (tiny_directory, "vision", "leave it out"),
    ):
        config = make_config(model={"path": str(path)}, trainer={"freeze": [part]})
        with pytest.raises(Refusal, match=f"trainer.freeze: .* has no part '{part}', .*{said}"):
            run_kind(TrainerConfig.model_validate(config)).check()


def test_two_ranks_of_which_one_has_images_add_up_one_gradient(tmp_path, tmp_path_factory):
    """Both compute the tower: the rank without images reads a blank one."""
    directory = tmp_path_factory.mktemp("two") / "model"
    write_tiny_vision(directory, initializer_range=0.2)
    found = {}
    for ranks in (1, 2):
        case = {"config": vision_config(directory, ranks), "saved": "", "images": True}
        found[ranks] = walk_cases(tmp_path, ranks, {f"vision-{ranks}": case})[f"vision-{ranks}"]
    one, two = (found[ranks].tensors for ranks in (1, 2))
    gradients = [name for name in one if name.startswith("gradient/")]
    assert any("visual" in name for name in gradients)
    for name in gradients:
        assert torch.allclose(one[name], two[name], atol=1e-5), name
    assert found[2].held and found[2].refused


def vision_config(directory: Any, ranks: int) -> dict[str, Any]:
    return json.loads(
        json.dumps(
            {
                "model": {"path": str(directory), "dtype": "float32"},
                "algorithm": {"group_size": 4, "prompts_per_step": 4, "options": {"kl_loss_coef": 0.3}},
                "trainer": {"micro_batch_tokens": 512, "ranks": ranks, "freeze": []},
                "seed": 1,
                "steps": 10,
            }
        )
    )
