"""Paths of denoising steps, from noise to actions, of which some steps, or all, are drawn; and their log-probs.

The noise that a path begins with is not scored: it depends on no weight. Flow and diffusion policies give the
transitions. Shapes: B environments, H × W numbers of a horizon of actions, K steps, M steps that were drawn. Knows no
model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from headrace_robots.policies import gaussian
from headrace_robots.policies.policy import ACTIONS, ActionChunk

PATH, STEPS = "path", "steps"
"""Entries of `ActionChunk.sampled`: (B, K + 1, H, W) points of the path, and (B, M) which of its steps were drawn."""

Transition = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""((B, H, W) points, (B,) numbers of steps) to the next points without noise, and the means and log-widths of drawn
ones; all (B, H, W)."""


@torch.no_grad()
def draw(
    transition: Transition,
    steps: int,
    drawn_BM: Tensor,
    seeds: Sequence[int] | None,
    starts: Sequence[int],
    shape: tuple[int, int],
) -> tuple[dict[str, Tensor], Tensor]:
    """(PATH and STEPS of each environment, (B, H, W) log-probs summed over its drawn steps).

    `starts` seeds the noise that paths begin with, `seeds` the steps; None draws no step.
    """
    device = drawn_BM.device
    points = [gaussian.row_noise(starts, shape, device)]
    log_probs = torch.zeros_like(points[0])
    noise = (
        None
        if seeds is None
        else gaussian.row_noise([mixed(seed, 1) for seed in seeds], (steps, *shape), device)
    )
    for step in range(steps):
        step_B = torch.full((len(starts),), step, device=device)
        following, mean, log_std = transition(points[-1], step_B)
        if noise is not None:
            sample = mean + log_std.exp() * noise[:, step]
            chosen = (drawn_BM == step).any(1)[:, None, None]
            following = torch.where(chosen, sample, following)
            density = gaussian.log_density(sample, mean, log_std)
            log_probs = log_probs + torch.where(chosen, density, torch.zeros_like(density))
        points.append(following)
    return {PATH: torch.stack(points, 1), STEPS: drawn_BM}, log_probs


def score(transition: Transition, sampled: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(B, H, W) log-probs and entropies of a path's drawn steps, summed over them; differentiable."""
    path, drawn_BM = sampled[PATH], sampled[STEPS]
    rows = torch.arange(len(path), device=path.device)
    log_probs = torch.zeros_like(path[:, 0])
    entropies = torch.zeros_like(path[:, 0])
    for step_B in drawn_BM.unbind(1):
        point, following = path[rows, step_B], path[rows, step_B + 1]
        _, mean, log_std = transition(point, step_B)
        log_probs = log_probs + gaussian.log_density(following, mean, log_std)
        entropies = entropies + gaussian.entropy(log_std).expand_as(mean)
    return log_probs, entropies


def drawn_steps(candidates: range, count: int, seeds: Sequence[int] | None, *, every: bool) -> Tensor:
    """(B, M) steps that are drawn: all candidates, one by each environment's seed, or none without seeds."""
    if seeds is None:
        return torch.zeros(count, 0, dtype=torch.long)
    if every:
        return torch.tensor(candidates, dtype=torch.long).expand(count, -1)
    uniform_B1 = gaussian.row_uniform([mixed(seed, 2) for seed in seeds], (1,), torch.device("cpu"))
    return candidates.start + (uniform_B1 * len(candidates)).long()


def chunk_of(
    sampled: Mapping[str, Tensor],
    log_probs: Tensor,
    values_B: Tensor,
    executed: Callable[[Tensor], Tensor],
    scaling: Callable[[Tensor], Tensor],
) -> ActionChunk:
    """The chunk at the end of a path; `executed` takes a robot's actions and numbers from those of the path."""
    drawn_BCA = executed(sampled[PATH][:, -1])
    return ActionChunk(
        sampled={ACTIONS: drawn_BCA, **sampled},
        executed_BCA=scaling(drawn_BCA),
        valid_BC=torch.ones(drawn_BCA.shape[:2], dtype=torch.bool, device=drawn_BCA.device),
        log_probs_BCA=executed(log_probs),
        values_B=values_B,
    )


def mixed(seed: int, stream: int) -> int:
    """Another seed for each stream of an environment's numbers (splitmix64's finaliser)."""
    found = (int(seed) + stream * 0x9E3779B97F4A7C15) % 2**64
    found = (found ^ (found >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    found = (found ^ (found >> 27)) * 0x94D049BB133111EB % 2**64
    return (found ^ (found >> 31)) % 2**63
