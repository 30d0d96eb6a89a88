"""Advantages without a critic: an answer is held against the other answers to its prompt.

Rewards are ``[P, G]``, G answers to each of P prompts.
"""

from __future__ import annotations

from torch import Tensor


def grpo_advantages(
    rewards: Tensor, *, scaled: bool = True, ddof: int = 1, eps: float = 1e-4
) -> Tensor:
    """How much better than its group an answer is.

        A_i = (R_i − mean(R)) / (std(R) + ε),    std² = Σ_i (R_i − mean(R))² / max(G − ddof, 1)

    Equal rewards, and a group of one, give 0. Sources: Shao et al. 2024, arXiv 2402.03300, §4.1.2;
    ddof and ε are those of TRL; not ``scaled``: Liu et al. 2025, arXiv 2503.20783.

    Args:
        rewards: ``[P, G]``.
        scaled: whether the difference is divided by the standard deviation.
        ddof: 1 for Bessel's correction, 0 for the population.
        eps: ε, in units of the reward.

    Returns:
        ``[P, G]``.
    """
    differences = _centred(rewards)
    if not scaled:
        return differences
    count = max(rewards.shape[1] - ddof, 1)
    std = (differences.square().sum(dim=1, keepdim=True) / count).sqrt()
    return differences / (std + eps)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """What an answer has above the mean of the others: its baseline does not depend on itself.

        A_i = R_i − (1/(G−1)) Σ_{j≠i} R_j

    A group of one has no others and gives 0. Source: Ahmadian et al. 2024, arXiv 2402.14740, §2.

    Args:
        rewards: ``[P, G]``.

    Returns:
        ``[P, G]``.
    """
    size = rewards.shape[1]
    return _centred(rewards) * (size / max(size - 1, 1))


def same_rewards(rewards: Tensor) -> Tensor:
    """Prompts whose answers all have the same reward, ``[P]`` bool: they teach nothing.

    Args:
        rewards: ``[P, G]``.
    """
    return (rewards == rewards[:, :1]).all(dim=1)


def _centred(rewards: Tensor) -> Tensor:
    """R_i − mean(R) of each group, ``[P, G]``; exactly 0 where all of them are equal."""
    # From the first answer, so that equal rewards leave no rounding behind.
    shifted = rewards - rewards[:, :1]
    return shifted - shifted.mean(dim=1, keepdim=True)
