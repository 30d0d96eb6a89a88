"""Which formula a config of the preference methods asks for, on the answers of P prompts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages.config import (
    DpoConfig,
    KtoConfig,
    OdpoConfig,
    OrpoConfig,
    PairedConfig,
    PreferenceConfig,
    SimpoConfig,
)
from stages.data.encode import DESIRABLE
from stages.functional import dpo, kto, odpo, orpo, pairwise, simpo
from stages.functional.masking import divide, masked_sum
from stages.functional.ranking import ranking_denominator


class Answers(NamedTuple):
    """What the formulas see of up to K answers to each of P prompts, all ``[P, K]``.

    Attributes:
        logps: log π(y | x) in nats.
        lengths: tokens, the end token included.
        ranks: 1 = best; for kto 1 = desirable.
        mask: bool, True = a real answer.
        ratios: log π(y | x) − log π_ref(y | x), or None without a reference.
        gaps: ``[P, K, K]`` how much better the first of a pair is, for odpo.
        point: z_0 of kto, a scalar.
    """

    logps: Tensor
    lengths: Tensor
    ranks: Tensor
    mask: Tensor
    ratios: Tensor | None = None
    gaps: Tensor | None = None
    point: Tensor | None = None

    @property
    def mean_logps(self) -> Tensor:
        """Log-probability per token, ``[P, K]``."""
        return pairwise.per_token(self.logps, self.lengths, self.mask)


def has_reference(config: PreferenceConfig) -> bool:
    """Whether the method compares the policy with the model that it started from."""
    return isinstance(config, DpoConfig | OdpoConfig | KtoConfig)


def reads_reference_live(config: PreferenceConfig) -> bool:
    """Whether the reference is at hand in training; kto shows it other pairs in each step."""
    live = isinstance(config, DpoConfig) and config.dpo.reference_logps == "live"
    return live or isinstance(config, KtoConfig)


def selected_by(config: PreferenceConfig) -> str:
    """The held-out figure by which the best model is kept.

    Where the loss is one of order alone, the share of right orders; the losses of orpo and kto hold
    more than that.
    """
    return "eval/loss" if isinstance(config, OrpoConfig | KtoConfig) else "eval/accuracy"


def denominator(config: PreferenceConfig, ranks: Tensor, mask: Tensor) -> Tensor:
    """What the loss of a whole optimiser batch is divided by; it adds over micro-batches."""
    if isinstance(config, KtoConfig):
        return mask.sum().float()
    return ranking_denominator(ranks, mask, **_weights(_paired(config)))


def rewards(config: PreferenceConfig, answers: Answers) -> Tensor:
    """The implicit reward of each answer, ``[P, K]``: what the method raises for better ones."""
    if isinstance(config, DpoConfig):
        return config.dpo.beta * _log_ratios(config, answers)
    if isinstance(config, OdpoConfig | KtoConfig):
        assert answers.ratios is not None
        options = config.odpo if isinstance(config, OdpoConfig) else config.kto
        return options.beta * answers.ratios
    return answers.mean_logps * (config.simpo.beta if isinstance(config, SimpoConfig) else 1.0)


def loss(config: PreferenceConfig, answers: Answers, whole: Tensor) -> Tensor:
    """A micro-batch's share of the loss; ``whole`` is the denominator of the optimiser batch."""
    if isinstance(config, KtoConfig):
        return _labelled_loss(config, answers, whole)
    if isinstance(config, DpoConfig) and config.dpo.loss == "plackett_luce":
        ratios, beta = _log_ratios(config, answers), config.dpo.beta
        orders = dpo.plackett_luce_losses(ratios, answers.ranks, answers.mask, beta=beta)
        return divide(orders.sum(), whole)
    paired = _paired(config)
    table = _pair_losses(paired, answers)
    weights = _weights(paired)
    return pairwise.pairwise_loss(table, answers.ranks, answers.mask, denominator=whole, **weights)


def statistics(config: PreferenceConfig, answers: Answers) -> dict[str, Tensor]:
    """Sums for the figures of a step, which add over micro-batches."""
    given = rewards(config, answers).detach()
    logps = answers.logps.detach()
    if isinstance(config, KtoConfig):
        return _labelled_statistics(config, answers, given, logps)
    return pair_sums(given, logps, answers.ranks, answers.mask)


def pair_sums(rewards: Tensor, logps: Tensor, ranks: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sums over the strict pairs of P prompts for ``figures``, from ``[P, K]`` each."""
    pairs = pairwise.reward_statistics(rewards, ranks, mask)
    told = pairwise.reward_statistics(logps, ranks, mask)
    return {
        "judged": pairs.pairs,
        "correct": pairs.correct,
        "chosen": pairs.pairs,
        "rejected": pairs.pairs,
        "reward_chosen": pairs.chosen,
        "reward_rejected": pairs.rejected,
        "logp_chosen": told.chosen,
        "logp_rejected": told.rejected,
    }


def figures(sums: dict[str, float], point: Tensor | None) -> dict[str, float]:
    """The figures of a step from its sums; kto also tells z_0."""
    chosen, rejected = (sums[side] or float("nan") for side in ("chosen", "rejected"))
    found = {
        "preference/accuracy": sums["correct"] / (sums["judged"] or float("nan")),
        "preference/reward_chosen": sums["reward_chosen"] / chosen,
        "preference/reward_rejected": sums["reward_rejected"] / rejected,
        "preference/logp_chosen": sums["logp_chosen"] / chosen,
        "preference/logp_rejected": sums["logp_rejected"] / rejected,
    }
    margin = found["preference/reward_chosen"] - found["preference/reward_rejected"]
    found["preference/margin"] = margin
    return found if point is None else found | {"preference/kl": float(point)}


def _paired(config: PreferenceConfig) -> PairedConfig:
    assert isinstance(config, PairedConfig)
    return config


def _weights(config: PairedConfig) -> dict[str, Any]:
    options = config.ranking
    return {
        "ties": options.ties,
        "pair_denominator": options.denominator,
        "reduction": options.reduction,
    }


def _log_ratios(config: DpoConfig, answers: Answers) -> Tensor:
    assert answers.ratios is not None
    if config.dpo.length_normalised:
        return pairwise.per_token(answers.ratios, answers.lengths, answers.mask)
    return answers.ratios


def _pair_losses(config: PairedConfig, answers: Answers) -> Tensor:
    """``[P, K, K]``: the loss of each pair (preferred, other)."""
    if isinstance(config, OrpoConfig):
        return orpo.orpo_losses(answers.mean_logps, lam=config.orpo.lam)
    if isinstance(config, SimpoConfig):
        gaps = pairwise.pair_table(answers.mean_logps, answers.mask)
        return simpo.simpo_losses(gaps, beta=config.simpo.beta, gamma=config.simpo.gamma)
    if isinstance(config, OdpoConfig):
        assert answers.ratios is not None
        assert answers.gaps is not None
        options = config.odpo
        offset = odpo.offsets(answers.gaps, alpha=options.alpha, scale=options.scale)
        gaps = pairwise.pair_table(answers.ratios, answers.mask)
        return odpo.odpo_losses(gaps, offset, beta=options.beta)
    gaps = pairwise.pair_table(_log_ratios(config, answers), answers.mask)
    assert config.dpo.loss != "plackett_luce"
    return dpo.dpo_losses(
        gaps,
        loss=config.dpo.loss,
        beta=config.dpo.beta,
        label_smoothing=config.dpo.label_smoothing,
    )


def _labelled_loss(config: KtoConfig, answers: Answers, whole: Tensor) -> Tensor:
    assert answers.ratios is not None
    assert answers.point is not None
    losses = kto.kto_losses(
        answers.ratios,
        answers.ranks == DESIRABLE,
        answers.point,
        beta=config.kto.beta,
        desirable_weight=config.kto.desirable_weight,
        undesirable_weight=config.kto.undesirable_weight,
    )
    return kto.answer_mean(losses, answers.mask, denominator=whole)


def _labelled_statistics(
    config: KtoConfig, answers: Answers, given: Tensor, logps: Tensor
) -> dict[str, Tensor]:
    """Right is a desirable answer whose log-ratio is above z_0, or an undesirable one below."""
    assert answers.point is not None
    good = answers.mask & (answers.ranks == DESIRABLE)
    bad = answers.mask & ~good
    distance = given - config.kto.beta * answers.point
    right = (good & (distance > 0)) | (bad & (distance < 0))
    counts = [x.sum().to(given.dtype) for x in (answers.mask, right, good, bad)]
    return {
        **dict(zip(("judged", "correct", "chosen", "rejected"), counts, strict=True)),
        "reward_chosen": masked_sum(given, good),
        "reward_rejected": masked_sum(given, bad),
        "logp_chosen": masked_sum(logps, good),
        "logp_rejected": masked_sum(logps, bad),
    }


def point_of(mismatched: list[float]) -> Tensor:
    """z_0 of a batch from the log-ratios of its mismatched pairs, in float64 on the CPU."""
    values = torch.tensor([sum(mismatched), float(len(mismatched))], dtype=torch.float64)
    return kto.reference_point(values[0], values[1])
