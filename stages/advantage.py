"""From a rollout to what the update aims at: rewards, advantages and returns.

    r_t = -β·kl_t + [t = T]·R̃,     δ_t = r_t + γ·V_{t+1} - V_t,     A_t = δ_t + γλ·A_{t+1}

The rollout of all processes is here as a whole, so whitening sees every token of it.
"""

from __future__ import annotations

from torch import Tensor

from stages.config import PpoConfig
from stages.config.episodes import ScoreRules
from stages.functional.masking import masked, masked_mean, masked_sum, whiten
from stages.functional.returns import after_last_mask, gae, process_scores, shape_rewards
from stages.functional.value import explained_variance
from stages.rollout import Rollout
from stages.rollout_method import Estimated
from stages.sampled import answer_figures


def ruled_scores(rollout: Rollout, rules: ScoreRules) -> Tensor:
    """The scores ``[B]`` after the clip and the rule for unfinished answers."""
    return process_scores(
        rollout.scores,
        rollout.ended,
        clip=rules.clip,
        subtract=rules.missing_eos.subtract,
        replace=rules.missing_eos.replace,
    )


def estimate(rollout: Rollout, config: PpoConfig, *, kl_coef: float) -> Estimated:
    """Scores → per-token rewards → advantages and returns.

    Args:
        rollout: B answers.
        config: its sections score, kl and ppo.
        kl_coef: β of this iteration.

    Returns:
        Targets ``advantages`` on the real tokens, and ``returns`` on ``value_mask``, which has one
        slot more per row where the score is placed after the last token; all ``[B, T]``.
    """
    mask = rollout.mask
    score = ruled_scores(rollout, config.score)
    shaped = shape_rewards(
        rollout.logp_old,
        rollout.logp_ref,
        mask,
        score,
        kl_coef=kl_coef,
        estimator=config.kl.estimator,
        position=config.score.position,
    )
    value_mask = after_last_mask(mask) if config.score.position == "after_last" else mask
    rewards = shaped.rewards
    if config.ppo.whiten_rewards:
        rewards = whiten(rewards, value_mask, shift_mean=False).values
    advantages, returns = gae(
        rewards, rollout.values_old, value_mask, gamma=config.ppo.gamma, lam=config.ppo.lam
    )
    advantages = masked(advantages, mask)
    if config.ppo.whiten_advantages:
        advantages = whiten(advantages, mask).values
    figures = answer_figures(rollout)
    figures |= {
        "objective/kl_coef": kl_coef,
        "objective/reward": float(masked_sum(shaped.rewards, value_mask)) / len(rollout),
        "value/explained_variance": float(
            explained_variance(rollout.values_old, returns, value_mask)
        ),
        "value/mean": float(masked_mean(rollout.values_old, value_mask)),
    }
    targets = {"advantages": advantages, "returns": returns, "value_mask": value_mask}
    return Estimated(targets, figures["objective/kl"], figures, {})
