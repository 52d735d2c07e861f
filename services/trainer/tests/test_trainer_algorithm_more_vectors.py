"""Functions that the first file of vectors leaves out, against numbers of verl's, RLinf's, OpenRLHF's and TRL's code.

`data/algorithm_vectors_more.json` names package, commit and function of each case; its inputs are those of
`data/algorithm_vectors.json` and a few more.
"""

from __future__ import annotations

import json
from pathlib import Path

import algorithm_losses as losses
import pytest
import torch
from headrace_trainer import algorithms as alg

DATA = Path(__file__).parent / "data"
VECTORS = json.loads((DATA / "algorithm_vectors_more.json").read_text())
CASES = VECTORS["cases"]
IN = {
    name.removeprefix("in/"): torch.tensor(value)
    for name, value in (
        json.loads((DATA / "algorithm_vectors.json").read_text())["inputs"] | VECTORS["inputs"]
    ).items()
}
MASK, OLD, ADV, SAMPLER = IN["response_mask"], IN["old_logp"], IN["adv"], IN["sampler_logp"]
SEQ_ADV = IN["seq_adv"]


def policy(loss_of):
    """A check's call: loss and gradient of a loss of the new log-probs."""

    def found():
        log_probs = IN["logp"].clone().requires_grad_()
        loss = loss_of(log_probs)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        loss.backward()
        return {"loss": loss.detach(), "grad": log_probs.grad}

    return found


def ppo(advantages=SEQ_ADV, **options):
    return policy(lambda new: losses.ppo_loss(new, OLD, advantages, MASK, **{"clip_high": 0.28, **options}))


def gspo(**options):
    return policy(
        lambda new: losses.gspo_loss(new, OLD, SEQ_ADV, MASK, clip_low=0.2, clip_high=0.28, **options)
    )


def with_kl(aggregation, **options):
    return policy(
        lambda new: (
            losses.ppo_loss(new, OLD, SEQ_ADV, MASK, clip_high=0.28, aggregation=aggregation).loss
            + 0.04
            * losses.kl_loss(
                new,
                IN["ref_logp"],
                MASK,
                limit=None,
                aggregation=aggregation,
                weights=(new - OLD).exp() if options.get("unbiased") else None,
            ).loss
        )
    )


def corrected(weights, aggregation):
    return ppo(ADV, clip_high=0.2, dual_clip=3.0, weights=weights, aggregation=aggregation)


def decoupled(proximal_of=lambda new: IN["proximal_logp"], **options):
    return policy(
        lambda new: losses.decoupled_ppo_loss(
            new, proximal_of(new), OLD, ADV, MASK, clip_high=0.28, **options
        )
    )


def tis(**options):
    return {"out": alg.truncated_importance_weights(OLD, SAMPLER, MASK, high=1.5, **options)}


def gkd(**options):
    logits = IN["logits"].clone().requires_grad_()
    loss, _ = losses.distillation_loss(logits, IN["teacher_logits"], MASK, temperature=0.9, **options)
    loss.backward()
    return {"loss": loss.detach(), "grad": logits.grad}


OFF_POLICY_MASK = alg.off_policy_sequence_mask(IN["logp"], SAMPLER, SEQ_ADV, MASK, high=0.1)
ENTROPY_MASK = alg.high_entropy_mask(IN["entropies"], MASK, fraction=0.3)
TIS = alg.truncated_importance_weights(OLD, SAMPLER, MASK, high=1.5)
SEQ_MASK_TIS = alg.importance_ratios(OLD, SAMPLER, MASK) * alg.ratio_mask(
    OLD, SAMPLER, MASK, low=0.6, high=1.7, level="geometric"
)
INTERPOLATED = {"versions": IN["versions"], "current_version": 4}
LEVELS = {"token": "token-mean", "seq": "seq-mean-token-mean"}
DETERMINED = {"cov_fraction": 1.0, "cov_low": 0.1, "cov_high": 5.0}

OURS = {
    "verl/opo": lambda: {"advantages": alg.opo_advantages(IN["seq_reward"], IN["prompt_index"], MASK)},
    "verl/remax": lambda: alg.remax_advantages(IN["token_reward_dense"], IN["baselines"], MASK)._asdict(),
    "verl/sapo": policy(lambda new: losses.sapo_loss(new, OLD, ADV, MASK)),
    "verl/kl_cov": policy(
        lambda new: losses.kl_cov_loss(new, OLD, ADV, MASK, cov_fraction=0.1, kl_coefficient=0.7)
    ),
    # The fraction is 1, so that every candidate is drawn.
    "verl/clip_cov": policy(lambda new: losses.clip_cov_loss(new, OLD, ADV, MASK, **DETERMINED)),
    "verl/geo_mean_weighted": policy(
        lambda new: losses.gmpo_loss(new, OLD, ADV, MASK, weights=IN["weights"])
    ),
    "verl/gspo_weighted": policy(
        lambda new: losses.gspo_loss(
            new, OLD, ADV, MASK, clip_low=0.2, clip_high=0.2, level="token", weights=IN["weights"]
        )
    ),
    "verl/cispo_weighted": policy(
        lambda new: losses.cispo_loss(new, OLD, ADV, MASK, clip_low=0.2, weights=IN["weights"])
    ),
    "verl/vanilla_weighted": ppo(ADV, clip_high=0.2, dual_clip=3.0, weights=IN["weights"]),
    **{
        f"verl/tis_{level}_norm{norm}": lambda level=level, norm=norm: tis(level=level, normalize=bool(norm))
        for level in ("token", "sequence")
        for norm in (0, 1)
    },
    "rlinf/decoupled_plain": decoupled(),
    "rlinf/decoupled_capped_dual": decoupled(behavior_weight_cap=1.2, dual_clip=2.0),
    "rlinf/decoupled_interpolated": decoupled(
        lambda new: alg.interpolated_log_probs(new, OLD, **INTERPOLATED)
    ),
    "rlinf/critic_huber": lambda: losses.value_loss(
        IN["vpred"], IN["values"], IN["returns"], MASK, huber_delta=0.5
    )._asdict(),
    **{
        f"openrlhf/tis_{level}": corrected(
            alg.truncated_importance_weights(OLD, SAMPLER, MASK, low=0.6, high=1.7), mode
        )
        for level, mode in LEVELS.items()
    },
    **{
        f"openrlhf/icepop_{level}": corrected(alg.icepop_weights(OLD, SAMPLER, MASK, low=0.6, high=1.7), mode)
        for level, mode in LEVELS.items()
    },
    **{f"openrlhf/seq-mask-tis_{level}": corrected(SEQ_MASK_TIS, mode) for level, mode in LEVELS.items()},
    **{
        f"openrlhf/sft_{level}": policy(lambda new, mode=mode: losses.sft_loss(new, MASK, aggregation=mode))
        for level, mode in LEVELS.items()
    },
    "trl/grpo": ppo(aggregation="seq-mean-token-mean"),
    "trl/bnpo": ppo(),
    "trl/dr_grpo": ppo(aggregation="seq-mean-token-sum-norm", norm_length=20),
    "trl/dapo": ppo(total=MASK.sum()),
    "trl/sapo": policy(lambda new: losses.sapo_loss(new, OLD, SEQ_ADV, MASK)),
    "trl/vespo": policy(lambda new: losses.vespo_loss(new, OLD, SEQ_ADV, MASK)),
    "trl/cispo_high5": policy(lambda new: losses.cispo_loss(new, OLD, SEQ_ADV, MASK, clip_high=0.5)),
    "trl/grpo_sequence": gspo(),
    "trl/luspo": gspo(aggregation="seq-mean-token-sum"),
    "trl/dapo_delta2": ppo(dual_clip=2.0),
    "trl/grpo_kl0.04": with_kl("seq-mean-token-mean"),
    "trl/dapo_kl0.04_unbiased": with_kl("token-mean", unbiased=True),
    "trl/dapo_token_truncate": ppo(weights=TIS),
    "trl/vespo_token_truncate": policy(lambda new: losses.vespo_loss(new, OLD, SEQ_ADV, MASK, weights=TIS)),
    "trl/dapo_sequence_mask": ppo(
        weights=alg.icepop_weights(OLD, SAMPLER, MASK, low=0.3, high=3.0, level="sequence")
    ),
    # Masks that take a token out of the numerator alone are weights.
    "trl/grpo_off_policy_mask": ppo(weights=OFF_POLICY_MASK.float(), aggregation="seq-mean-token-mean"),
    "trl/dapo_top_entropy0.3": ppo(weights=ENTROPY_MASK.float()),
    "trl/gkd_beta0.0": lambda: gkd(direction="forward"),
    "trl/gkd_beta0.3": lambda: gkd(direction="jsd", beta=0.3),
    "trl/gkd_beta1.0": lambda: gkd(direction="reverse"),
}


def test_every_case_is_mapped():
    assert set(OURS) == set(CASES) and len(CASES) == 45


@pytest.mark.parametrize("key", CASES)
def test_ours_equals_the_package(key):
    found = OURS[key]()
    for array, values in CASES[key]["outputs"].items():
        wanted, ours = torch.tensor(values), found[array]
        if wanted.shape == MASK.shape:
            wanted, ours = wanted * MASK, ours * MASK
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_trl_s_group_advantages():
    """(r - mean) / (std + 1e-4), by group or batch; RLOO normalised over the batch likewise."""
    rewards_GN = torch.tensor([[0.2, 1.0, 0.4, 0.3], [0.0, 0.5, 0.25, 1.0]])
    rewards_B, groups = rewards_GN.flatten(), [0] * 4 + [1] * 4
    centred_GN = rewards_GN - rewards_GN.mean(1, keepdim=True)
    by_group = centred_GN / (rewards_GN.std(1, keepdim=True) + 1e-4)
    by_batch = centred_GN / (rewards_GN.std() + 1e-4)
    rloo = (rewards_GN - (rewards_GN.sum(1, keepdim=True) - rewards_GN) / 3).flatten()
    normalised = (rloo - rloo.mean()) / (rloo.std() + 1e-4)
    close = torch.testing.assert_close
    close(alg.grpo_advantages(rewards_B, groups, eps=1e-4), by_group.flatten())
    close(alg.grpo_advantages(rewards_B, groups, eps=1e-4, scale="batch"), by_batch.flatten())
    close(alg.rloo_advantages(rewards_B, groups), rloo)
    close(alg.whiten(alg.rloo_advantages(rewards_B, groups), variance_eps=0.0, std_eps=1e-4), normalised)
