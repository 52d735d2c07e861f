"""Every case of verl 0.9.1, OpenRLHF 0.11.2 and RLinf 0.3.0 in one file, against our functions: values and gradients.

Each case's key maps to the call of ours that must give its arrays. The packages leave what they like at tokens outside
the mask, where ours are 0: there only trained tokens are compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from algorithm_losses import cispo_loss, gmpo_loss, gspo_loss, ppo_loss, reinforce_loss, value_loss
from headrace_trainer.algorithms import (
    AdaptiveKLController,
    aggregate,
    discounted_returns,
    dr_grpo_advantages,
    entropy_bonus,
    entropy_from_logits,
    gae_advantages,
    gpg_advantages,
    grpo_advantages,
    kl_estimate,
    kl_penalised_rewards,
    passk_grpo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
    whiten,
)

VECTORS = json.loads((Path(__file__).parent / "data" / "algorithm_vectors.json").read_text())
CASES = {case["key"]: case for case in VECTORS["cases"]}
IN = {name.removeprefix("in/"): torch.tensor(value) for name, value in VECTORS["inputs"].items()}
MASK = IN["response_mask"]
GROUPS = VECTORS["inputs"]["in/prompt_index"]
OUTCOME = IN["token_reward_outcome"]


def both(advantages):
    """verl gives an outcome's advantages as returns too."""
    return {"advantages": advantages, "returns": advantages}


def policy(loss_of):
    """loss, gradient and metrics (under the packages' names) of a policy loss of ours."""
    log_probs = IN["logp"].clone().requires_grad_()
    loss, metrics = loss_of(log_probs)
    loss.backward()
    found = {"loss": loss.detach(), "out": loss.detach(), "grad": log_probs.grad}
    clipped = metrics.get("clip_fraction", torch.tensor(0.0))
    found |= {"clipfrac": clipped, "clip_ratio": clipped, "clipfrac_lower": metrics.get("dual_clip_fraction")}
    found["ppo_kl"] = metrics.get("approx_kl")
    return found


def kl(estimator, **bounds):
    log_probs = IN["logp"].clone().requires_grad_()
    value = kl_estimate(log_probs, IN["ref_logp"], estimator, **bounds)
    value.sum().backward()
    return {"out": value.detach(), "grad": log_probs.grad}


def ppo(**options):
    return lambda: policy(lambda new: ppo_loss(new, IN["old_logp"], IN["adv"], MASK, **options))


def gspo(**options):
    return lambda: policy(lambda new: gspo_loss(new, IN["old_logp"], IN["adv"], MASK, **options))


def gae(rewards, gamma, lam, **options):
    return lambda: gae_advantages(IN[rewards], IN["values"], MASK, gamma=gamma, lam=lam, **options)._asdict()


def rlinf_gae(gamma, lam, normalised):
    found = gae_advantages(IN["token_reward_dense"], IN["values"], gamma=gamma, lam=lam)._asdict()
    if normalised:
        found["advantages"] = whiten(found["advantages"], variance_eps=0.0, std_eps=1e-5)
    return found


def controller():
    updates = CASES["verl/adaptive_kl_controller"]["params"]["updates"]
    control = AdaptiveKLController(0.2, 6.0, 10000)
    return {"out": torch.tensor([control.update(kl, samples) for kl, samples in updates])}


def value_loss_of(**options):
    loss, metrics = value_loss(IN["vpred"], IN["values"], IN["returns"], MASK, clip=0.2, **options)
    return {"loss": loss, "out": loss, "clipfrac": metrics["clip_fraction"]}


OURS = {
    "verl/grpo": lambda: both(grpo_advantages(OUTCOME, GROUPS, MASK)),
    "verl/grpo_vectorized": lambda: both(grpo_advantages(IN["seq_reward"], IN["prompt_index"], MASK)),
    "verl/dr_grpo": lambda: both(dr_grpo_advantages(OUTCOME, GROUPS, MASK)),
    "verl/reinforce_pp_baseline": lambda: both(
        reinforce_plus_plus_baseline_advantages(OUTCOME, GROUPS, MASK)
    ),
    "verl/rloo": lambda: both(rloo_advantages(OUTCOME, GROUPS, MASK)),
    "verl/rloo_vectorized": lambda: both(rloo_advantages(IN["seq_reward"], GROUPS, MASK)),
    "verl/grpo_passk": lambda: both(passk_grpo_advantages(OUTCOME, GROUPS, MASK)),
    "verl/gpg": lambda: both(gpg_advantages(OUTCOME, GROUPS, MASK)),
    "verl/reinforce_pp_outcome_g1.0": lambda: reinforce_plus_plus_advantages(OUTCOME, MASK)._asdict(),
    "verl/reinforce_pp_dense_g1.0": lambda: reinforce_plus_plus_advantages(
        IN["token_reward_dense"], MASK
    )._asdict(),
    "verl/reinforce_pp_outcome_g0.97": lambda: reinforce_plus_plus_advantages(
        IN["seq_reward"], MASK, gamma=0.97
    )._asdict(),
    **{f"verl/kl_{name}": lambda name=name: kl(name) for name in ("k1", "k2", "k3", "abs", "k1+", "k3+")},
    **{
        f"verl/agg_{mode}": lambda mode=mode: {"out": aggregate(IN["adv"], MASK, mode)}
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    },
    **{
        f"verl/ppo_{name}_{mode}": ppo(**clips, aggregation=mode)
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
        for name, clips in {
            "sym": {"dual_clip": 3.0},
            "clip_higher": {"clip_high": 0.28, "dual_clip": 10.0},
            "dual": {"dual_clip": 2.0},
        }.items()
        if f"verl/ppo_{name}_{mode}" in CASES
    },
    "verl/loss_vanilla_clip_ratio0.2_low0.2_high0.28_c10.0_token-mean": ppo(clip_high=0.28, dual_clip=10.0),
    "verl/loss_gspo_low0.0003_high0.0004_seq-mean-token-mean": gspo(level="token"),
    "verl/loss_gspo_low0.2_high0.2_seq-mean-token-mean": gspo(level="token", clip_low=0.2, clip_high=0.2),
    "verl/loss_geo_mean_low0.4_high0.4_token-mean": lambda: policy(
        lambda new: gmpo_loss(new, IN["old_logp"], IN["adv"], MASK)
    ),
    "verl/loss_cispo_low0.9_high0.28_token-mean": lambda: policy(
        lambda new: cispo_loss(new, IN["old_logp"], IN["adv"], MASK, clip_low=0.9, clip_high=0.28)
    ),
    "verl/loss_gpg__token-mean": lambda: policy(lambda new: reinforce_loss(new, IN["adv"], MASK)),
    "verl/value_loss_clip0.2": value_loss_of,
    "verl/entropy_token-mean": lambda: {"out": entropy_bonus(entropy_from_logits(IN["logits"]), MASK)},
    "verl/adaptive_kl_controller": controller,
    **{f"openrlhf/kl_{name}": lambda name=name: kl(name, limit_all=True) for name in ("k1", "k2", "k3")},
    "openrlhf/reward_kl0.05": lambda: {
        "out": kl_penalised_rewards(
            IN["seq_reward"], kl_estimate(IN["logp"], IN["ref_logp"], "k1"), 0.05, MASK
        )
    },
    **{
        f"openrlhf/loss_{name}_{level}": ppo(**clips, aggregation=mode)
        for level, mode in {"token": "token-mean", "seq": "seq-mean-token-mean"}.items()
        for name, clips in {
            "sym": {},
            "clip_higher": {"clip_high": 0.28},
            "dual3": {"dual_clip": 3.0},
            "dual2": {"dual_clip": 2.0},
        }.items()
    },
    "openrlhf/loss_gspo0.2_seq": gspo(clip_low=0.2, clip_high=0.2),
    "openrlhf/value_loss_clip0.2": value_loss_of,
    **{
        f"{package}/gae_{rewards}_g{gamma}_l{lam}": gae(f"token_reward_{rewards}", gamma, lam, **options)
        for package, options in {"verl": {"whiten_advantages": True}, "openrlhf": {}}.items()
        for rewards in ("outcome", "dense")
        for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.99, 0.95), (0.9, 0.0))
        if f"{package}/gae_{rewards}_g{gamma}_l{lam}" in CASES
    },
    **{
        f"openrlhf/cumret_dense_g{gamma}": lambda gamma=gamma: {
            "out": discounted_returns(IN["token_reward_dense"], MASK, gamma=gamma)
        }
        for gamma in (1.0, 0.97)
    },
    **{f"rlinf/kl_{name}": lambda name=name: kl(name) for name in ("k1", "k2", "k3", "abs")},
    "rlinf/grpo": lambda: {"out": grpo_advantages(IN["seq_reward"], GROUPS, MASK.bool())},
    **{
        f"rlinf/gae_dense_nomask_g{gamma}_l0.95_norm{norm}": lambda gamma=gamma, norm=norm: rlinf_gae(
            gamma, 0.95, norm
        )
        for gamma in (1.0, 0.99)
        for norm in (0, 1)
    },
    # RLinf puts the outcome at the row's last column, padding included: without discount the same at trained tokens.
    "rlinf/reinpp_baseline0": lambda: {
        "out": reinforce_plus_plus_advantages(IN["seq_reward"], MASK, correction=0).advantages
    },
    "rlinf/ppo_sym": ppo(),
    "rlinf/ppo_clip_higher": ppo(clip_high=0.28),
    "rlinf/ppo_dual3": ppo(dual_clip=3.0),
}


def test_every_case_is_mapped():
    assert set(OURS) == set(CASES) and len(CASES) == 80


@pytest.mark.parametrize("key", CASES)
def test_ours_equals_the_package(key):
    found = OURS[key]()
    for array in CASES[key]["arrays"]:
        wanted, ours = torch.tensor(VECTORS["outputs"][f"{key}/{array}"]), found[array]
        if wanted.shape == MASK.shape and "/kl_" not in key and "nomask" not in key:
            wanted, ours = wanted * MASK, ours * MASK
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5, check_dtype=False)
