"""The functions that golden cases name, each composed of our kernels and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stages.functional import (
    control,
    divergence,
    dpo,
    group_advantages,
    grpo,
    kto,
    logprobs,
    masking,
    odpo,
    orpo,
    pairwise,
    policy_gradient,
    ranking,
    reinforce,
    returns,
    simpo,
    supervised,
    value,
)

Result = dict[str, Any]
Rows = Sequence[Sequence[int]]


def masked_mean(values: Tensor, mask: Tensor) -> Result:
    return {"mean": masking.masked_mean(values, mask)}


def whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, ddof: int = 0, eps: float = 1e-8
) -> Result:
    result = masking.whiten(values, mask, shift_mean=shift_mean, ddof=ddof, eps=eps)
    return {"whitened": result.values, "mean": result.mean, "var": result.var}


def whiten_distributed(values: Tensor, mask: Tensor, shards: Rows, **options: Any) -> Result:
    """Every process gathers the rows of all, whitens, and keeps its own."""
    order = [row for shard in shards for row in shard]
    gathered = whiten(values[order], mask[order], **options)
    gathered["whitened"] = gathered["whitened"][torch.tensor(order).argsort()]
    return gathered


def sft_loss(
    logits: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    agg: masking.Aggregation = "token_mean",
    segment_ids: Tensor | None = None,
    microbatches: Rows | None = None,
    fixed_length: int | None = None,
) -> Result:
    mask = loss_mask[:, 1:]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, 1:] == segment_ids[:, :-1])
    logits = logits.clone().requires_grad_()
    logp = _aligned_logprobs(logits, input_ids, mask)

    def share(rows: Any, whole: Any) -> Tensor:
        denominator = masking.loss_denominator(
            mask[whole], aggregation=agg, fixed_length=fixed_length
        )
        return supervised.sft_loss(logp[rows], mask[rows], aggregation=agg, denominator=denominator)

    loss = share(slice(None), slice(None))
    result = {
        "loss": loss,
        "n_targets": mask.sum(),
        "nll_sum": masking.masked_sum(-logp, mask),
        "grad_logits": _gradient(loss, logits),
    }
    if microbatches is not None:
        result["microbatch_contrib"] = [share(rows, slice(None)) for rows in microbatches]
        own = torch.stack([share(rows, rows) for rows in microbatches])
        result["naive_mean_of_means"] = own.mean()
    return result


def ranking_loss(
    rewards: Tensor,
    ranks: Tensor,
    mask: Tensor,
    margin: float | Tensor | None = None,
    ties: ranking.Ties = "drop",
    denominator: ranking.PairDenominator = "pairs",
    reduction: ranking.Reduction = "prompt_mean",
    center_coef: float | None = 0.0,
    microbatches: Rows | None = None,
) -> Result:
    rewards = rewards.clone().requires_grad_()
    margin = 0.0 if margin is None else margin
    counting: dict[str, Any] = {"ties": ties, "pair_denominator": denominator}
    whole = ranking.ranking_denominator(ranks, mask, reduction=reduction, **counting)

    def share(rows: Any) -> Tensor:
        return ranking.ranking_loss(
            rewards[rows],
            ranks[rows],
            mask[rows],
            margin=margin[rows] if isinstance(margin, Tensor) else margin,
            reduction=reduction,
            center_coef=center_coef or 0.0,
            denominator=whole,
            **counting,
        )

    loss = share(slice(None))
    statistics = ranking.pair_statistics(rewards, ranks, mask)
    by_k = zip(statistics.correct_by_k.tolist(), statistics.pairs_by_k.tolist(), strict=True)
    weights = {"drop": 0.0, "half": 1.0}[ties]
    strict = ranking.strict_pairs(ranks, mask).sum(dim=(1, 2))
    every = mask.sum(dim=1) * (mask.sum(dim=1) - 1) // 2
    result = {
        "loss": loss,
        "per_prompt_loss": ranking.per_prompt_loss(rewards, ranks, mask, margin=margin, **counting),
        "n_pairs": strict + weights * (every - strict),
        "accuracy": statistics.correct / statistics.pairs,
        "mean_margin": statistics.margin / statistics.pairs,
        "accuracy_by_k": {str(k): right / n for k, (right, n) in enumerate(by_k) if n},
        "grad_rewards": _gradient(loss, rewards),
    }
    if microbatches is not None:
        result["microbatch_contrib"] = [share(rows) for rows in microbatches]
    return result


def rm_bias_normalise(demo_scores: Tensor, scores: Tensor) -> Result:
    mean, std = ranking.normalise_by_mean(demo_scores)
    return {
        "bias": mean,
        "scores": (scores - mean) / std,
        "demo_mean_after": ((demo_scores - mean) / std).mean(),
    }


def rm_gain_bias_normalise(sample_scores: Tensor, scores: Tensor) -> Result:
    mean, std = ranking.normalise_by_moments(sample_scores)
    return {"gain": 1 / std, "bias": -mean / std, "scores": (scores - mean) / std}


def pair_calibration(diffs: Tensor, n_bins: int = 10) -> Result:
    bins, ece, nll = ranking.pair_calibration(diffs, bins=n_bins)
    listed = [
        {"n": n, "confidence": confidence, "accuracy": accuracy}
        for n, confidence, accuracy in zip(*(part.tolist() for part in bins), strict=True)
    ]
    return {"bins": listed, "ece": ece, "nll": nll}


def token_logprobs(
    logits: Tensor, labels: Tensor, mask: Tensor, temperature: float = 1.0
) -> Result:
    logp = _masked(logprobs.token_logprobs(logits, labels, temperature=temperature), mask)
    entropy = _masked(logprobs.entropy(logits, temperature=temperature), mask)
    return {
        "logprobs": logp,
        "entropy": entropy,
        "mean_entropy": masking.masked_mean(entropy, mask),
        "seq_logprob": logp.sum(dim=1),
    }


def kl_estimators(logp: Tensor, logp_ref: Tensor, mask: Tensor) -> Result:
    result: Result = {}
    for name in ("k1", "k2", "k3"):
        kl = _masked(divergence.kl_estimate(logp, logp_ref, estimator=name), mask)
        result |= {
            name: kl,
            f"{name}_token_mean": masking.masked_mean(kl, mask),
            f"{name}_seq_sum": kl.sum(dim=1),
        }
    return result


def exact_kl(logits_p: Tensor, logits_q: Tensor) -> Result:
    return {"kl": divergence.exact_kl(logits_p, logits_q)}


def shape_rewards(
    logp_old: Tensor,
    logp_ref: Tensor,
    mask: Tensor,
    score: Tensor,
    beta: float,
    score_clip: float | None = None,
    kl_estimator: divergence.Estimator = "k1",
    has_eos: Tensor | None = None,
    missing_eos_penalty: float | None = None,
    missing_eos_mode: str = "subtract",
) -> Result:
    score = _final_scores(score, has_eos, score_clip, missing_eos_penalty, missing_eos_mode)
    rewards, kl = returns.shape_rewards(
        logp_old, logp_ref, mask, score, kl_coef=beta, estimator=kl_estimator
    )
    return {
        "rewards": rewards,
        "final_score": _masked(score, mask.any(dim=1)),
        "seq_kl": kl.sum(dim=1),
        "kl_penalty": -beta * kl.sum(dim=1),
        "total_return": rewards.sum(dim=1),
    }


def after_last_advantages(
    logp_old: Tensor,
    logp_ref: Tensor,
    mask: Tensor,
    score: Tensor,
    values: Tensor,
    beta: float,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl_estimator: divergence.Estimator = "k1",
) -> Result:
    rewards, _ = returns.shape_rewards(
        logp_old,
        logp_ref,
        mask,
        score,
        kl_coef=beta,
        estimator=kl_estimator,
        position="after_last",
    )
    value_mask = returns.after_last_mask(mask)
    estimate = returns.gae(rewards, values, value_mask, gamma=gamma, lam=lam)
    return {
        "rewards": rewards,
        "value_mask": value_mask,
        "advantages": _masked(estimate.advantages, mask),
        "returns": estimate.returns,
    }


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> Result:
    return returns.gae(rewards, values, mask, gamma=gamma, lam=lam)._asdict()


def policy_loss(
    logp_new: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    agg: masking.Aggregation = "token_mean",
    fixed_length: int | None = None,
    microbatches: Rows | None = None,
) -> Result:
    logp_new = logp_new.clone().requires_grad_()
    denominator = masking.loss_denominator(mask, aggregation=agg, fixed_length=fixed_length)

    def share(rows: Any) -> Tensor:
        return policy_gradient.policy_loss(
            *(x[rows] for x in (logp_new, logp_old, advantages, mask)),
            clip_low=clip_low,
            clip_high=clip_high,
            aggregation=agg,
            denominator=denominator,
        )

    loss = share(slice(None))
    sums = policy_gradient.policy_diagnostics(
        logp_new, logp_old, advantages, mask, clip_low=clip_low, clip_high=clip_high
    )
    means = {name: total / mask.sum() for name, total in sums._asdict().items()}
    return {
        "loss": loss,
        "grad_logp_new": _gradient(loss, logp_new),
        "ratio_mean": means.pop("ratio"),
        **means,
        "microbatch_contrib": [share(rows) for rows in microbatches or ()],
    }


def value_loss(
    values_new: Tensor,
    values_old: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float | None = 0.2,
    agg: masking.Aggregation = "token_mean",
    fixed_length: int | None = None,
    microbatches: Rows | None = None,
) -> Result:
    values_new = values_new.clone().requires_grad_()
    denominator = masking.loss_denominator(mask, aggregation=agg, fixed_length=fixed_length)

    def share(rows: Any) -> Tensor:
        return value.value_loss(
            *(x[rows] for x in (values_new, values_old, returns, mask)),
            clip_range=clip_range,
            aggregation=agg,
            denominator=denominator,
        )

    loss = share(slice(None))
    clipped = value.value_clip_count(values_new, values_old, returns, mask, clip_range=clip_range)
    return {
        "loss": loss,
        "clip_fraction": clipped / mask.sum(),
        "explained_variance": value.explained_variance(values_new, returns, mask),
        "grad_values_new": _gradient(loss, values_new),
        "microbatch_contrib": [share(rows) for rows in microbatches or ()],
    }


def kl_controller(
    kind: str,
    init: float,
    observations: Sequence[tuple[float, int]],
    target: float | None = None,
    horizon: float | None = None,
    k_beta: float | None = None,
) -> Result:
    betas = [init]
    for kl, episodes in observations:
        if kind == "fixed":
            betas.append(init)
            continue
        assert kind == "adaptive", kind
        assert target is not None
        gain = episodes / horizon if k_beta is None else k_beta
        betas.append(control.next_kl_coef(betas[-1], kl, target=target, gain=gain))
    return {"beta": betas[1:]}


def ppo_total(
    policy: float,
    value: float,
    entropy: float,
    ptx_nll: float,
    vf_coef: float = 0.1,
    ent_coef: float = 0.0,
    ptx_coef: float = 0.0,
) -> Result:
    terms = (torch.tensor(x, dtype=torch.float64) for x in (policy, value, entropy, ptx_nll))
    total = policy_gradient.total_loss(
        *terms, vf_coef=vf_coef, ent_coef=ent_coef, ptx_coef=ptx_coef
    )
    return {"total": total}


def ptx_gradient(grad_ppo: Tensor, grad_ptx_nll: Tensor, ptx_coef: float) -> Result:
    """Two losses with the given gradients at the same weights, and the gradient of their total."""
    weights = torch.zeros_like(grad_ppo).requires_grad_()
    nothing = torch.zeros(())
    total = policy_gradient.total_loss(
        (weights * grad_ppo).sum(),
        nothing,
        nothing,
        (weights * grad_ptx_nll).sum(),
        vf_coef=0.0,
        ent_coef=0.0,
        ptx_coef=ptx_coef,
    )
    return {"grad": _gradient(total, weights)}


def ema(init: Tensor, values: Tensor, decay: float) -> Result:
    averages = [init]
    for new in values:
        averages.append(control.ema(averages[-1], new, decay=decay))
    return {"ema": averages[1:]}


def lr_schedule(
    kind: str, peak: float, steps: Sequence[int], total: int | None = None, warmup: int | None = 0
) -> Result:
    def rate(step: int) -> float:
        return control.learning_rate(
            step,
            peak=peak,
            schedule=kind.removesuffix("_warmup"),
            total_steps=total or 0,
            warmup_steps=warmup or 0,
            min_ratio=0.1,
        )

    return {"lr": [rate(step) for step in steps]}


def ppo_step(
    logits_old: Tensor,
    logits_ref: Tensor,
    logits_new: Tensor,
    labels: Tensor,
    mask: Tensor,
    values_old: Tensor,
    values_new: Tensor,
    score: Tensor,
    beta: float,
    has_eos: Tensor | None = None,
    temperature: float = 1.0,
    score_clip: float | None = None,
    missing_eos_penalty: float | None = None,
    missing_eos_mode: str = "subtract",
    kl_estimator: divergence.Estimator = "k1",
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten_rewards: bool = False,
    whiten_advantages: bool = True,
    clip: float = 0.2,
    value_clip: float | None = 0.2,
    vf_coef: float = 0.1,
    ent_coef: float = 0.0,
    ptx_coef: float = 0.0,
    ptx_logits: Tensor | None = None,
    ptx_ids: Tensor | None = None,
    ptx_mask: Tensor | None = None,
    minibatches: Rows | None = None,
) -> Result:
    """One update on one rollout, in the order of the training loop."""

    def log_probabilities(logits: Tensor) -> Tensor:
        logits = _masked(logits, mask[..., None])
        return _masked(logprobs.token_logprobs(logits, labels, temperature=temperature), mask)

    logp_old, logp_ref = log_probabilities(logits_old), log_probabilities(logits_ref)
    score = _final_scores(score, has_eos, score_clip, missing_eos_penalty, missing_eos_mode)
    rewards = returns.shape_rewards(
        logp_old, logp_ref, mask, score, kl_coef=beta, estimator=kl_estimator
    ).rewards
    scaled = masking.whiten(rewards, mask, shift_mean=False).values if whiten_rewards else rewards
    raw = returns.gae(scaled, values_old, mask, gamma=gamma, lam=lam)
    advantages = raw.advantages
    if whiten_advantages:
        advantages = masking.whiten(advantages, mask).values
    ptx_nll, ptx_logits = _ptx(ptx_logits, ptx_ids, ptx_mask)

    logits_new, values_new = (x.clone().requires_grad_() for x in (logits_new, values_new))
    logp_new = log_probabilities(logits_new)
    entropy = logprobs.entropy(_masked(logits_new, mask[..., None]), temperature=temperature)
    steps = []
    for rows in minibatches or [list(range(len(mask)))]:
        denominator = masking.loss_denominator(mask[rows], aggregation="token_mean")
        shared: dict[str, Any] = {"aggregation": "token_mean", "denominator": denominator}
        policy = policy_gradient.policy_loss(
            *(x[rows] for x in (logp_new, logp_old, advantages, mask)),
            clip_low=clip,
            clip_high=clip,
            **shared,
        )
        critic = value.value_loss(
            *(x[rows] for x in (values_new, values_old, raw.returns, mask)),
            clip_range=value_clip,
            **shared,
        )
        mean_entropy = masking.aggregate(entropy[rows], mask[rows], **shared)
        total = policy_gradient.total_loss(
            policy, critic, mean_entropy, ptx_nll,
            vf_coef=vf_coef, ent_coef=ent_coef, ptx_coef=ptx_coef,
        )  # fmt: skip
        inputs = (logits_new, values_new, ptx_logits)
        grad_logits, grad_values, grad_ptx = torch.autograd.grad(
            total, inputs, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        steps.append(
            {
                "policy": policy,
                "value": critic,
                "entropy": mean_entropy,
                "total": total,
                "grad_logits_new": grad_logits[rows],
                "grad_values_new": grad_values[rows],
            }
        )
    return {
        "logp_old": logp_old,
        "logp_ref": logp_ref,
        "rewards": rewards,
        "advantages_raw": raw.advantages,
        "returns": raw.returns,
        "advantages": advantages,
        "ptx_nll": ptx_nll,
        "grad_ptx_logits": grad_ptx,
        "minibatches": steps,
    }


def seed_literal(
    end: Tensor,
    prob_old: Tensor,
    prob_ref: Tensor,
    prob_new: Tensor,
    value_old: Tensor,
    value_new: Tensor,
    reward: Tensor,
    generate_mask: Tensor,
) -> Result:
    """The walk-through's code as printed: array index i belongs to token i + 1, the answer begins
    at token 256, KL is paid on every slot, and the recursion runs over all of them."""
    old, ref, v_old = (x[:, 255:] for x in (prob_old, prob_ref, value_old))
    mask = generate_mask[:, 256:]
    everything = torch.ones_like(mask)
    answer = torch.arange(mask.shape[1]) <= end[:, None] - 256
    score = returns.process_scores(reward, torch.ones_like(reward, dtype=torch.bool), clip=5.0)
    kl_part = returns.shape_rewards(old, ref, everything, torch.zeros_like(score), kl_coef=0.1)
    score_part = returns.shape_rewards(old, ref, answer, score, kl_coef=0.0, position="after_last")
    rewards = kl_part.rewards + score_part.rewards
    estimate = returns.gae(rewards, v_old, everything, gamma=1.0, lam=0.95)
    actor = policy_loss(prob_new[:, 255:], old, estimate.advantages, mask)
    critic = value_loss(value_new[:, 255:], v_old, estimate.returns, mask)
    return {
        "reward_kl_from_255": rewards,
        "delta": estimate.advantages,
        "loss_actor": actor["loss"] / 8,
        "loss_critic": critic["loss"] / 8,
        "grad_prob_new_from_255": actor["grad_logp_new"] / 8,
        "grad_value_new_from_255": critic["grad_values_new"] / 8,
    }


def seed_preset(
    logp_old: Tensor,
    logp_ref: Tensor,
    logp_new: Tensor,
    values_old: Tensor,
    values_new: Tensor,
    score: Tensor,
    mask: Tensor,
) -> Result:
    score = returns.process_scores(score, torch.ones_like(score, dtype=torch.bool), clip=5.0)
    rewards, _ = returns.shape_rewards(
        logp_old, logp_ref, mask, score, kl_coef=0.1, position="after_last"
    )
    value_mask = returns.after_last_mask(mask)
    estimate = returns.gae(rewards, values_old, value_mask, gamma=1.0, lam=0.95)
    return {
        "rewards": rewards,
        "advantages": estimate.advantages,
        "returns": estimate.returns,
        "loss_actor": policy_loss(logp_new, logp_old, estimate.advantages, mask)["loss"] / 8,
        "loss_critic": value_loss(values_new, values_old, estimate.returns, mask)["loss"] / 8,
    }


def dpo_pairs(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reference_free: bool = False,
) -> Result:
    if reference_free:
        ref_chosen, ref_rejected = torch.zeros_like(chosen), torch.zeros_like(rejected)

    def losses(gaps: Tensor) -> Tensor:
        return dpo.dpo_losses(gaps, loss="sigmoid", beta=beta, label_smoothing=label_smoothing)

    return _pairs(chosen, rejected, ref_chosen, ref_rejected, losses, scale=beta)


def ipo_pairs(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    tau: float,
    len_chosen: Tensor | None = None,
    len_rejected: Tensor | None = None,
) -> Result:
    lengths = None
    if len_chosen is not None and len_rejected is not None:
        lengths = torch.stack([len_chosen, len_rejected], dim=1)

    def losses(gaps: Tensor) -> Tensor:
        return dpo.dpo_losses(gaps, loss="ipo", beta=tau)

    return _pairs(chosen, rejected, ref_chosen, ref_rejected, losses, scale=tau, lengths=lengths)


def odpo_pairs(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    score_chosen: Tensor,
    score_rejected: Tensor,
    beta: float,
    alpha: float,
    scale: odpo.OffsetScale = "log",
) -> Result:
    scores = torch.stack([score_chosen, score_rejected], dim=1)
    table = scores[:, :, None] - scores[:, None, :]
    offset = odpo.offsets(table, alpha=alpha, scale=scale)

    def losses(gaps: Tensor) -> Tensor:
        return odpo.odpo_losses(gaps, offset, beta=beta)

    result = _pairs(chosen, rejected, ref_chosen, ref_rejected, losses, scale=beta)
    return {**result, "offset": offset[:, 0, 1]}


def _pairs(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    losses: Callable[[Tensor], Tensor],
    *,
    scale: float,
    lengths: Tensor | None = None,
) -> Result:
    """Each pair as the ranking of a prompt's two answers."""
    chosen, rejected = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
    ratios = torch.stack([chosen - ref_chosen, rejected - ref_rejected], dim=1)
    ranks, mask = _two(ratios)
    compared = ratios if lengths is None else pairwise.per_token(ratios, lengths, mask)
    table = losses(pairwise.pair_table(compared, mask))
    loss = _mean_over_pairs(table, ranks, mask)
    rewards = scale * ratios
    return {
        "loss": loss,
        "losses": table[:, 0, 1],
        "chosen_rewards": rewards[:, 0],
        "rejected_rewards": rewards[:, 1],
        "accuracy": _accuracy(rewards, ranks, mask),
        "grad_chosen": _gradient(loss, chosen),
        "grad_rejected": _gradient(loss, rejected),
    }


def kto_answers(
    policy: Tensor,
    ref: Tensor,
    desirable: Tensor,
    kl_policy: Tensor,
    kl_ref: Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Result:
    policy = policy.clone().requires_grad_()
    mismatched = torch.tensor(len(kl_policy))
    point = kto.reference_point((kl_policy - kl_ref).sum(), mismatched)
    losses = kto.kto_losses(
        policy - ref,
        desirable,
        point,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    every = torch.ones_like(desirable)[:, None]
    loss = kto.answer_mean(losses[:, None], every, denominator=torch.tensor(len(policy)))
    return {
        "loss": loss,
        "losses": losses,
        "kl": point,
        "implicit_rewards": beta * (policy - ref),
        "grad_policy": _gradient(loss, policy),
    }


def orpo_pairs(
    chosen_tok: Tensor,
    chosen_mask: Tensor,
    rejected_tok: Tensor,
    rejected_mask: Tensor,
    lam: float,
) -> Result:
    means, ranks, mask = _mean_logps(chosen_tok, chosen_mask, rejected_tok, rejected_mask)
    table = orpo.orpo_losses(means, lam=lam)
    odds = orpo.log_odds(means)
    without = orpo.orpo_losses(means, lam=0.0)[:, 0, 1]
    return {
        "loss": _mean_over_pairs(table, ranks, mask),
        "losses": table[:, 0, 1],
        "nll": without,
        "log_odds_ratio": odds[:, 0] - odds[:, 1],
        "or_term": orpo.orpo_losses(means, lam=1.0)[:, 0, 1] - without,
    }


def simpo_pairs(
    chosen_tok: Tensor,
    chosen_mask: Tensor,
    rejected_tok: Tensor,
    rejected_mask: Tensor,
    beta: float,
    gamma: float,
) -> Result:
    means, ranks, mask = _mean_logps(chosen_tok, chosen_mask, rejected_tok, rejected_mask)
    table = simpo.simpo_losses(pairwise.pair_table(means, mask), beta=beta, gamma=gamma)
    rewards = beta * means
    return {
        "loss": _mean_over_pairs(table, ranks, mask),
        "losses": table[:, 0, 1],
        "chosen_rewards": rewards[:, 0],
        "rejected_rewards": rewards[:, 1],
        "accuracy": _accuracy(rewards, ranks, mask),
    }


def _two(values: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks and mask of two answers a prompt, the better one first."""
    ranks = torch.tensor([[1, 2]]).expand(len(values), 2)
    return ranks, torch.ones_like(ranks, dtype=torch.bool)


def _mean_logps(
    chosen: Tensor, chosen_mask: Tensor, rejected: Tensor, rejected_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    halves = ((chosen, chosen_mask), (rejected, rejected_mask))
    sums = torch.stack([masking.masked(x, m).sum(dim=1) for x, m in halves], dim=1)
    lengths = torch.stack([m.sum(dim=1) for _, m in halves], dim=1)
    ranks, mask = _two(sums)
    return pairwise.per_token(sums, lengths, mask), ranks, mask


def _mean_over_pairs(table: Tensor, ranks: Tensor, mask: Tensor) -> Tensor:
    counting: dict[str, Any] = {"ties": "drop", "pair_denominator": "pairs"}
    counting["reduction"] = "prompt_mean"
    whole = ranking.ranking_denominator(ranks, mask, **counting)
    return pairwise.pairwise_loss(table, ranks, mask, denominator=whole, **counting)


def _accuracy(rewards: Tensor, ranks: Tensor, mask: Tensor) -> Tensor:
    statistics = pairwise.reward_statistics(rewards, ranks, mask)
    return statistics.correct / statistics.pairs


def grpo_advantages(rewards: Tensor, scale: str = "std", ddof: int = 1) -> Result:
    assert scale in ("std", "none"), scale
    scaled = scale == "std"
    return {"advantages": group_advantages.grpo_advantages(rewards, scaled=scaled, ddof=ddof)}


def rloo_advantages(rewards: Tensor) -> Result:
    return {"advantages": group_advantages.rloo_advantages(rewards)}


def grpo_loss(
    logp_new: Tensor,
    logp_old: Tensor,
    logp_ref: Tensor,
    advantages: Tensor,
    mask: Tensor,
    beta: float,
    agg: masking.Aggregation = "seq_mean",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    fixed_length: int | None = None,
) -> Result:
    logp_new = logp_new.clone().requires_grad_()
    clips = {"clip_low": clip_low, "clip_high": clip_high}
    loss = grpo.grpo_loss(
        *(logp_new, logp_old, logp_ref, advantages, mask),
        **clips,
        beta=beta,
        aggregation=agg,
        denominator=masking.loss_denominator(mask, aggregation=agg, fixed_length=fixed_length),
    )
    each = advantages[:, None].expand_as(mask)
    sums = policy_gradient.policy_diagnostics(logp_new, logp_old, each, mask, **clips)
    return {
        "loss": loss,
        "kl_k3_token_mean": masking.masked_mean(grpo.reference_kl(logp_new, logp_ref, mask), mask),
        "clip_fraction": sums.clip_fraction / mask.sum(),
        "grad_logp_new": _gradient(loss, logp_new),
    }


def reinforce_loss(
    logp_new: Tensor, advantages: Tensor, mask: Tensor, agg: masking.Aggregation = "seq_sum"
) -> Result:
    logp_new = logp_new.clone().requires_grad_()
    denominator = masking.loss_denominator(mask, aggregation=agg)
    loss = reinforce.reinforce_loss(
        logp_new, advantages, mask, aggregation=agg, denominator=denominator
    )
    return {"loss": loss, "grad_logp_new": _gradient(loss, logp_new)}


ADAPTERS: dict[str, Callable[..., Result]] = {
    adapter.__name__: adapter
    for adapter in (
        *(masked_mean, whiten, whiten_distributed, sft_loss),
        *(ranking_loss, rm_bias_normalise, rm_gain_bias_normalise, pair_calibration),
        *(token_logprobs, kl_estimators, exact_kl),
        *(shape_rewards, after_last_advantages, gae),
        *(policy_loss, value_loss, ppo_step, seed_literal, seed_preset),
        *(kl_controller, ppo_total, ptx_gradient, ema, lr_schedule),
        *(grpo_advantages, rloo_advantages, grpo_loss, reinforce_loss),
    )
} | {
    "dpo": dpo_pairs,
    "ipo": ipo_pairs,
    "odpo_offset": odpo_pairs,
    "kto": kto_answers,
    "orpo": orpo_pairs,
    "simpo": simpo_pairs,
}


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0)


def _gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    return gradient


def _aligned_logprobs(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probability of token t from the logits at t − 1, for tokens 1, 2, …"""
    return logprobs.token_logprobs(_masked(logits[:, :-1], mask[..., None]), ids[:, 1:])


def _ptx(logits: Tensor | None, ids: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean negative log-likelihood of the pretraining tokens, and the logits it depends on."""
    if logits is None or ids is None or mask is None:
        nothing = torch.zeros((), requires_grad=True)
        return nothing, nothing
    logits = logits.clone().requires_grad_()
    targets = mask[:, 1:]
    denominator = masking.loss_denominator(targets, aggregation="token_mean")
    nll = supervised.sft_loss(
        _aligned_logprobs(logits, ids, targets),
        targets,
        aggregation="token_mean",
        denominator=denominator,
    )
    return nll, logits


def _final_scores(
    score: Tensor,
    has_eos: Tensor | None,
    clip: float | None,
    penalty: float | None,
    mode: str,
) -> Tensor:
    assert mode in ("subtract", "replace"), mode
    ended = torch.ones_like(score, dtype=torch.bool) if has_eos is None else has_eos
    return returns.process_scores(score, ended, clip=clip, **{mode: penalty})
