"""Samples of older versions: what corrects for them, against plain arithmetic token by token, and who refuses them."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_modelkit.loading import load_model
from headrace_modelkit.weights import load_weights
from headrace_schema.sections.generating import ModelSection, SamplingSection
from headrace_schema.sections.learning import AlgorithmSection
from headrace_servicekit.registry import PluginError
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_trainer.algorithms import ALGORITHMS, build_algorithm, functional
from headrace_trainer.algorithms._base import TokenBatch
from headrace_trainer.errors import Refusal
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.figures import staleness_figures
from headrace_trainer.learning.intake import admitted
from headrace_trainer.learning.reading import read_group
from headrace_trainer.learning.samples import Disposition, Sample

# Three answers of 2, 3 and 1 tokens; the second answer's last token has no engine log-prob.
LENGTHS = [2, 3, 1]
NEW = [-0.9, -1.4, -0.3, -2.0, -1.1, -0.7]
BASE = [-1.0, -1.2, -0.4, -2.5, -1.0, -0.6]
ENGINE = [-2.2, -1.3, -0.5, -0.9, math.nan, -3.0]
ADVANTAGES = [1.0, 1.0, -0.5, -0.5, -0.5, -2.0]


def section(name="grpo", max_staleness=0, **options):
    """As the schema would give it; it may know no staleness above 0 yet."""
    return AlgorithmSection(name=name, options=options).model_copy(update={"max_staleness": max_staleness})


def batch_of(new_K, rows=None):
    rows = range(3) if rows is None else rows
    picked = [k for row in rows for k in range(sum(LENGTHS[:row]), sum(LENGTHS[: row + 1]))]
    return TokenBatch(
        log_probs_K=new_K[picked],
        old_log_probs_K=torch.tensor(BASE, dtype=torch.float64)[picked],
        engine_log_probs_K=torch.tensor(ENGINE, dtype=torch.float64)[picked],
        advantages_K=torch.tensor(ADVANTAGES, dtype=torch.float64)[picked],
        weights_K=torch.ones(len(picked), dtype=torch.float64),
        sequences_K=torch.repeat_interleave(torch.tensor([LENGTHS[row] for row in rows])),
    )


def slopes(algorithm):
    """d loss / d log-prob of each token, from micro-batches of one answer each, and the summed figures."""
    new_K = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    figures: dict[str, float] = {}
    total = torch.zeros((), dtype=torch.float64)
    for row in range(3):
        sums = algorithm.loss(batch_of(new_K, [row]))
        total = total + sums.loss
        for name, value in sums.token_sums.items():
            figures[name] = figures.get(name, 0.0) + float(value)
    return torch.autograd.grad(total, new_K)[0].tolist(), figures


def answers():
    """(first token, behind the last one) of each answer."""
    ends = [sum(LENGTHS[: row + 1]) for row in range(3)]
    return list(zip([0, *ends], ends, strict=False))


def ratios(level):
    """base / engine of each token, 1 where the engine told nothing, by hand."""
    logs = [0.0 if math.isnan(e) else b - e for b, e in zip(BASE, ENGINE, strict=True)]
    found = []
    for begin, end in answers():
        total = sum(logs[begin:end])
        own = {"token": logs[begin:end], "sequence": [total] * (end - begin)}
        own["geometric"] = [total / (end - begin)] * (end - begin)
        found += [math.exp(value) for value in own[level]]
    return found


def clipped_slope(ratio, advantage, low=0.2, high=0.2):
    """Of PPO's surrogate, in the log-prob."""
    outside = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
    return 0.0 if outside else -advantage * ratio


PROXIMAL = [clipped_slope(math.exp(n - b), a) for n, b, a in zip(NEW, BASE, ADVANTAGES, strict=True)]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_truncated_weights_are_base_over_engine_clipped(level):
    found, figures = slopes(
        build_algorithm(
            section(correction="truncate", correction_level=level, correction_low=0.3, correction_high=1.5)
        )
    )
    weights = [min(max(ratio, 0.3), 1.5) for ratio in ratios(level)]
    assert found == pytest.approx([w * slope for w, slope in zip(weights, PROXIMAL, strict=True)])
    changed = sum(w != pytest.approx(ratio) for w, ratio in zip(weights, ratios(level), strict=True))
    assert figures["correction_capped_fraction"] == changed > 0
    assert figures["correction_weight"] == pytest.approx(sum(weights))
    assert figures["correction_masked_fraction"] == 0


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_icepop_drops_what_lies_outside_its_bounds(level):
    found, figures = slopes(build_algorithm(section(correction="mask", correction_level=level)))
    weights = [ratio if 0.5 <= ratio <= 5 else 0.0 for ratio in ratios(level)]
    assert found == pytest.approx([w * slope for w, slope in zip(weights, PROXIMAL, strict=True)])
    assert figures["correction_masked_fraction"] == sum(w == 0 for w in weights) > 0
    assert figures["correction_weight"] == pytest.approx(sum(weights))
    assert figures["correction_capped_fraction"] == 0


def test_the_sequence_mask_drops_far_answers_of_negative_advantage_alone():
    found, figures = slopes(build_algorithm(section(off_policy_mask=0.4, correction="none")))
    far = []
    for begin, end in answers():
        logs = [0.0 if math.isnan(ENGINE[k]) else ENGINE[k] - BASE[k] for k in range(begin, end)]
        far += [ADVANTAGES[begin] < 0 and sum(logs) / len(logs) > 0.4] * (end - begin)
    assert far == [False, False, True, True, True, False]
    assert found == pytest.approx([0.0 if drop else slope for drop, slope in zip(far, PROXIMAL, strict=True)])
    assert figures["correction_masked_fraction"] == 3 and figures["correction_weight"] == 3


def test_against_the_engine_the_ratio_is_that_to_the_policy_that_sampled():
    """With one optimizer step too: the clip's bounds are options that act."""
    found, figures = slopes(build_algorithm(section(old_log_probs="engine", clip_high=1.5)))
    sampled = [b if math.isnan(e) else e for b, e in zip(BASE, ENGINE, strict=True)]
    ratio = [math.exp(n - s) for n, s in zip(NEW, sampled, strict=True)]
    expected = [clipped_slope(r, a, high=1.5) for r, a in zip(ratio, ADVANTAGES, strict=True)]
    assert found == pytest.approx(expected)
    assert figures["clip_fraction"] == sum(slope == 0 for slope in expected) > 0
    # What has moved is still told from the base: that is what target_kl bounds.
    moved = [math.exp(b - n) for n, b in zip(NEW, BASE, strict=True)]
    k3 = [math.exp(n - b) - 1 - (n - b) for n, b in zip(NEW, BASE, strict=True)]
    assert moved and figures["approx_kl"] == pytest.approx(sum(k3))


def test_cispo_against_the_engine_weighs_by_the_clipped_ratio_to_the_sampler():
    found, _ = slopes(build_algorithm(section("cispo", old_log_probs="engine", clip_high=1.0)))
    sampled = [b if math.isnan(e) else e for b, e in zip(BASE, ENGINE, strict=True)]
    weights = [min(math.exp(n - s), 2.0) for n, s in zip(NEW, sampled, strict=True)]
    assert found == pytest.approx([-w * a for w, a in zip(weights, ADVANTAGES, strict=True)])


def test_a_wide_correction_is_decoupled_ppo():
    """Hilton et al.: (p_proximal / p_behavior) PPO(p / p_proximal), the proximal policy being the step's base."""
    algorithm = build_algorithm(section(correction="truncate", correction_high=1e6))
    found, _ = slopes(algorithm)
    new_K = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    batch = batch_of(new_K)
    sampled_K = torch.where(batch.engine_log_probs_K.isnan(), batch.old_log_probs_K, batch.engine_log_probs_K)
    terms = functional.decoupled_ppo_terms(new_K, batch.old_log_probs_K, sampled_K, batch.advantages_K)
    assert found == pytest.approx(torch.autograd.grad(terms.loss.sum(), new_K)[0].tolist())


def test_gmpo_takes_the_weights_into_its_mean_and_drops_shares():
    """A token outside IcePop's bounds is neutral in the geometric mean, and its share of the answer is dropped."""
    found, figures = slopes(build_algorithm(section("gmpo", correction="mask")))
    kept = [0.5 <= ratio <= 5 for ratio in ratios("token")]
    expected = []
    for begin, end in answers():
        span, length = range(begin, end), end - begin
        logs = [NEW[k] - BASE[k] for k in span]  # none leaves the clip range of 0.4
        weighed = sum(math.log(ratios("token")[k]) for k in span if kept[k])
        ratio = math.exp((sum(logs) + weighed) / length)
        share = sum(kept[k] for k in span) / length
        slope = -ADVANTAGES[begin] * ratio / length * share
        inside = [not (ADVANTAGES[begin] > 0 and log > 0.4) for log in logs]
        bounded = [not (ADVANTAGES[begin] < 0 and log < -0.4) for log in logs]
        expected += [slope * (a and b) for a, b in zip(inside, bounded, strict=True)]
    assert found == pytest.approx(expected) and figures["correction_masked_fraction"] == kept.count(False)


@pytest.mark.parametrize(
    ("name", "options", "key", "words"),
    [
        ("grpo", {"correction_high": 3.0}, "correction_high", "no effect without correction"),
        ("grpo", {"correction": "none", "correction_level": "sequence"}, "correction_level", "no effect"),
        (
            "grpo",
            {"correction": "mask", "correction_low": 6.0},
            "correction_low",
            "not below correction_high",
        ),
        ("grpo", {"old_log_probs": "engine", "correction": "mask"}, "correction", "leave one of the two out"),
        ("gpg", {"old_log_probs": "engine"}, "old_log_probs", "no ratio"),
        ("grpo", {"correction": "truncated"}, "correction", "did you mean 'truncate'"),
    ],
)
def test_options_without_effect_are_refused_by_name(name, options, key, words):
    with pytest.raises(Refusal) as caught:
        build_algorithm(section(name, **options))
    assert caught.value.metadata["key"] == f"algorithm.options.{key}" and words in caught.value.message


def test_stale_samples_are_corrected_for_unless_the_options_say_otherwise():
    assert build_algorithm(section()).options.correction is None
    assert build_algorithm(section(max_staleness=1)).options.correction == "truncate"
    assert build_algorithm(section(max_staleness=4, correction="none")).options.correction == "none"
    assert build_algorithm(section(max_staleness=1, old_log_probs="engine")).options.correction is None


def test_every_built_in_algorithm_of_samples_but_one_says_that_it_corrects_for_older_ones():
    right_on_policy = {
        each for each in ALGORITHMS.names() if "off_policy" not in ALGORITHMS.find(each).features
    }
    assert right_on_policy == {
        "opo",
        "sft",
        "dpo",
        "ipo",
        "simpo",
        "orpo",
        "kto",
        "session",
        "bradley_terry",
        "prm",
    }  # all but the first sample nothing


@pytest.fixture
def opened():
    """Version 5 is held, ordinal 1; version 1 is its parent."""
    state = steps.restored(steps.StepState(), steps.Version(1, 0, 0), {})
    state = steps.restored(state, steps.Version(5, 1, 1), {1: 0})
    return steps.begin(state, steps.Begin(1, 1, 5, 6))[0]


def replaced(group, **values):
    """With a list of the same value for each trained token in a field of each branch."""
    members = []
    for member in group.members:
        branches = [
            msgspec.structs.replace(b, **{name: [value] * len(b.trained) for name, value in values.items()})
            for b in member.samples
        ]
        members.append(replace(member, samples=tuple(branches)))
    return replace(group, members=tuple(members))


def test_a_token_of_an_older_version_needs_its_log_prob(opened, make_group):
    told = make_group(0, version=1)
    untold = replaced(told, engine_log_probs=math.nan)
    assert admitted(opened, [told], 1)[1] == [told]
    state, fresh = admitted(opened, [untold], 1)
    assert not fresh and state.groups[0].disposition is Disposition.STALE
    assert "log-prob the engine did not tell" in state.groups[0].detail
    fresh_group = replaced(untold, versions=5)
    assert admitted(opened, [fresh_group], 1)[1] == [fresh_group]


def test_figures_of_staleness_count_tokens(opened, make_group):
    group = make_group(0, version=5)
    record = steps.GroupRecord(0, group.digest, (), Disposition.ACCUMULATED, tokens=8)
    assert staleness_figures(opened) == {}
    state = steps.learned(opened, replace(record, tokens_by_version={1: 2, 5: 6}))
    assert staleness_figures(state) == {
        "staleness_mean": 0.25,
        "staleness_max": 1.0,
        "stale_tokens_fraction": 0.25,
    }


def two_segments(sequence, cut, versions):
    """A trajectory whose first `cut` sampled tokens are of one version, and whose others are of the next."""
    first = sequence.trained[0]
    trajectory = common_pb2.Trajectory(
        sample=common_pb2.SlotKey(prompt_ordinal=0, sample_index=0),
        attempt=1,
        finish_reason=common_pb2.FINISH_REASON_EOS,
    )
    branch = trajectory.branches.add()
    branch.segments.add(tokens=common_pb2.TokenSegment(token_ids=sequence.tokens[:first]))
    for number, span in zip(versions, (slice(0, cut), slice(cut, None)), strict=True):
        ids = sequence.tokens[first:][span]
        log_probs = sequence.engine_log_probs[span]
        body = common_pb2.TokenSegment(token_ids=ids, log_probs=log_probs)
        branch.segments.add(policy_number=number, tokens=body)
    trajectory.body_digest = trajectory_digest(trajectory)
    return trajectory


def test_each_token_of_two_versions_is_weighed_by_the_one_that_sampled_it(
    make_backend, sequences, accumulate, plain_log_probs, tiny_directory
):
    """The gradient of an answer with a segment of an older version, against autograd on the bare model."""
    backend = make_backend(algorithm={"options": {"correction": "truncate", "correction_high": 1.05}})
    older = {name: value.clone() for name, value in backend.weights()}
    accumulate(backend, [sequences(seed) for seed in range(3)], 4096)
    backend.commit(17.0, 0.02)
    base = {name: value.clone() for name, value in backend.weights()}
    given, cut = max(sequences(7), key=lambda each: len(each.trained)), 3
    old, new = (plain_log_probs(weights, [given])[0] for weights in (older, base))
    told = Sample(given.tokens, given.trained, old[:cut] + new[cut:])
    settled = trainer_pb2.SettledGroup(prompt_ordinal=0)
    settled.members.add(trajectory=two_segments(told, cut, (1, 5)), reward=1.0)
    member = read_group(settled, SamplingSection(), 32).members[0]
    assert member.versions == [1] * cut + [5] * (len(given.trained) - cut)
    (branch,) = member.samples
    assert branch.engine_log_probs == pytest.approx(old[:cut] + new[cut:], rel=1e-6)
    learned = Sample(branch.tokens, branch.trained, branch.engine_log_probs, [0.7] * len(old), 1.0)
    assert backend.micro([[learned]])
    found = backend.reduced_gradient(1.0)

    stale = [math.exp(n - o) for n, o in zip(new, old, strict=True)][:cut]
    assert min(stale) < 0.98 and max(stale) > 1.05  # the policy has moved, in both directions
    weights = [min(weight, 1.05) for weight in stale] + [1.0] * (len(new) - cut)
    model = load_model(ModelSection(path=str(tiny_directory), dtype="float32"))
    load_weights(model, base)
    log_probs = model(torch.tensor([given.tokens])).logits[0].log_softmax(-1)
    own = torch.stack([log_probs[position - 1, given.tokens[position]] for position in given.trained])
    (-0.7 * torch.tensor(weights) * own).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_options_are_checked_by_the_registry_too():
    with pytest.raises(PluginError, match="old_log_probs"):
        ALGORITHMS.choose("grpo", {"old_log_probs": "proximal"})
