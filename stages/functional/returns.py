"""From scores to advantages: score rules, per-token rewards, generalised advantage estimation.

Column t of every ``[B, T]`` tensor belongs to response token t. Values are V_t = V(x, y_<t), read
before the token is chosen. Padding may stand on either side; the mask tells real tokens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from stages.functional.divergence import Estimator, kl_estimate
from stages.functional.masking import masked, require_same_shape

Position = Literal["last", "after_last"]


class ShapedRewards(NamedTuple):
    """Per-token rewards and the KL estimate inside them, both ``[B, T]`` and 0 under the mask."""

    rewards: Tensor
    kl: Tensor


class Estimate(NamedTuple):
    """Advantages and returns, both ``[B, T]`` and 0 under the mask."""

    advantages: Tensor
    returns: Tensor


def process_scores(
    scores: Tensor,
    ended: Tensor,
    *,
    clip: float | None = None,
    subtract: float | None = None,
    replace: float | None = None,
) -> Tensor:
    """Scores after the clip and the rule for answers without an end token, in this order.

    The rule comes last so that the clip cannot hide it. Sources: Ziegler et al. 2019, code
    ``train_policy.py`` (replace); Huang et al. 2024, arXiv 2403.17031, detail 23.

    Args:
        scores: ``[B]`` scores of the reward model.
        ended: ``[B]`` bool, True where the answer has its end token.
        clip: c ≥ 0, scores are cut to [−c, c]; None = off.
        subtract: penalty ≥ 0 of an unfinished answer; None = off.
        replace: score of an unfinished answer; None = off.

    Returns:
        ``[B]``.
    """
    require_same_shape(ended, scores=scores)
    if clip is not None:
        scores = scores.clamp(-clip, clip)
    if subtract is not None:
        scores = torch.where(ended, scores, scores - subtract)
    if replace is not None:
        scores = torch.where(ended, scores, replace)
    return scores


def after_last_mask(mask: Tensor) -> Tensor:
    """The mask widened by the slot after the last real token, where there is room for one.

    That slot holds the state after the whole answer; with the score placed there, rewards and
    values count on it. Empty rows stay empty.

    Args:
        mask: ``[B, T]`` of the response tokens.

    Returns:
        ``[B, T]``.
    """
    slots = torch.arange(mask.shape[1], device=mask.device)
    after_last = slots == _last_slot(mask) + 1
    return mask | (after_last & mask.any(dim=1, keepdim=True))


def shape_rewards(
    logp_old: Tensor,
    logp_ref: Tensor,
    mask: Tensor,
    scores: Tensor,
    *,
    kl_coef: float,
    estimator: Estimator = "k1",
    position: Position = "last",
) -> ShapedRewards:
    """Reward of each token: the KL penalty everywhere, the score once.

        r_t = −β·kl_t + 1[t = T]·R,    kl_t = logp_old,t − logp_ref,t (k1)

    Being likelier than the reference costs. With k1, Σ_t r_t = R − β·(log π_old(y|x) − log
    π_ref(y|x)). Source: Ouyang et al. 2022, §3.5, Eq. 2; code of Ziegler et al. 2019.

    Args:
        logp_old: ``[B, T]`` of the policy that sampled, nats.
        logp_ref: ``[B, T]`` of the reference, nats.
        mask: ``[B, T]``, the response tokens, the end token among them.
        scores: ``[B]`` after ``process_scores``; an empty row gets none.
        kl_coef: β.
        estimator: of the KL inside the reward.
        position: the slot of the score: the last real token, or the one after it where there is
            room.

    Returns:
        Rewards and kl.
    """
    require_same_shape(mask, logp_old=logp_old, logp_ref=logp_ref)
    require_same_shape(mask.any(dim=1), scores=scores)
    kl = kl_estimate(masked(logp_old, mask), masked(logp_ref, mask), estimator=estimator)
    landing = mask if position == "last" else after_last_mask(mask)
    slots = torch.arange(mask.shape[1], device=mask.device)
    at_score = (slots == _last_slot(landing)) & mask.any(dim=1, keepdim=True)
    return ShapedRewards(masked(scores[:, None], at_score) - kl_coef * kl, kl)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Estimate:
    """Generalised advantage estimation, over the real tokens of each row only.

        δ_t = r_t + γ·V_{t+1} − V_t,    A_t = δ_t + γλ·A_{t+1},    V_{T+1} = A_{T+1} = 0

    Returns are A_t + V_t, before any whitening. Source: Schulman et al. 2016, Eq. 16. An answer
    that hit the length limit counts as finished: nothing is bootstrapped.

    Args:
        rewards: ``[B, T]``.
        values: ``[B, T]`` of the critic at rollout time.
        mask: ``[B, T]``; masked slots are skipped, wherever they stand.
        gamma: γ, the discount.
        lam: λ; 0 gives δ_t, 1 the reward-to-go minus V_t.

    Returns:
        Advantages and returns.
    """
    require_same_shape(mask, rewards=rewards, values=values)
    rewards, values = masked(rewards, mask), masked(values, mask)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    backwards = []
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        backwards.append(next_advantage)
    if not backwards:  # a batch of empty answers only
        return Estimate(torch.zeros_like(values), torch.zeros_like(values))
    advantages = masked(torch.stack(backwards[::-1], dim=1), mask)
    return Estimate(advantages, advantages + values)


def _last_slot(mask: Tensor) -> Tensor:
    """``[B, 1]`` index of the last True of each row; −1 in an empty row."""
    slots = torch.arange(mask.shape[1], device=mask.device)
    return pad(torch.where(mask, slots, -1), (1, 0), value=-1).amax(dim=1, keepdim=True)
