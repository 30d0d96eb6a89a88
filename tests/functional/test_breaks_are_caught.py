"""Each kernel is broken on purpose, one formula at a time; the golden cases must notice."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import stages
from stages import functional

from . import adapters
from .golden import SHIPPED, Case, mismatching, read_suites


class Break(NamedTuple):
    """Source text of a kernel's module, and what stands there instead."""

    what: str
    module: str
    old: str
    new: str


BREAKS = [
    Break("mask multiplied", "masking", "torch.where(mask, values, 0.0)", "values * mask"),
    Break("Bessel always", "masking", "(mask.sum() - ddof)", "(mask.sum() - 1)"),
    Break("eps outside the root", "masking", "torch.rsqrt(var + eps)", "1 / (var.sqrt() + eps)"),
    Break("mean taken off twice", "masking", "scaled = scaled + mean", "scaled = scaled - mean"),
    Break(
        "padding counted as tokens",
        "masking",
        "return mask.sum().float()",
        "return torch.ones_like(mask).sum().float()",
    ),
    Break(
        "empty rows counted as sequences",
        "masking",
        "mask.any(dim=1).sum().float()",
        "mask.any(dim=1).numel() * torch.ones(())",
    ),
    Break(
        "sequence mean over the width",
        "masking",
        "losses / mask.sum(dim=1, keepdim=True).clamp(min=1)",
        "losses / mask.shape[1]",
    ),
    Break(
        "mean of micro-batch means",
        "masking",
        "return divide(losses.sum(), denominator)",
        "return divide(losses.sum(), mask.sum())",
    ),
    Break("temperature multiplied", "logprobs", "/ temperature", "* temperature"),
    Break("entropy's sign", "logprobs", "return -(logp.exp()", "return (logp.exp()"),
    Break("direction of the log-ratio", "divergence", "logp_other - logp\n", "logp - logp_other\n"),
    Break("k1's sign", "divergence", "return -d", "return d"),
    Break("k2 without its half", "divergence", "d.square() / 2", "d.square()"),
    Break("k3's linear term", "divergence", "torch.expm1(d) - d", "torch.expm1(d) + d"),
    Break("reverse exact KL", "divergence", "(logp.exp() *", "(logq.exp() *"),
    Break("KL rewarded", "returns", "- kl_coef * kl, kl)", "+ kl_coef * kl, kl)"),
    Break(
        "score in the last column",
        "returns",
        "slots == _last_slot(landing)",
        "slots == mask.shape[1] - 1",
    ),
    Break("score one slot early", "returns", "_last_slot(landing))", "_last_slot(landing) - 1)"),
    Break(
        "finished answers penalised",
        "returns",
        "torch.where(ended, scores, scores - subtract)",
        "torch.where(ended, scores - subtract, scores)",
    ),
    Break(
        "finished answers replaced",
        "returns",
        "(ended, scores, replace)",
        "(~ended, scores, replace)",
    ),
    Break("clip on one side", "returns", "scores.clamp(-clip, clip)", "scores.clamp(max=clip)"),
    Break("no slot after the last", "returns", "_last_slot(mask) + 1", "_last_slot(mask)"),
    Break("a score for empty rows", "returns", "& mask.any(dim=1, keepdim=True))\n", ")\n"),
    Break("value not discounted", "returns", "gamma * next_value", "next_value"),
    Break("advantage not discounted", "returns", "gamma * lam *", "lam *"),
    Break("delta without its value", "returns", "next_value - values[:, t]", "next_value"),
    Break(
        "garbage under the mask",
        "returns",
        "rewards, values = masked(rewards, mask), masked(values, mask)",
        "pass",
    ),
    Break("returns without values", "returns", "advantages + values)", "advantages)"),
    Break("optimistic bound", "policy_gradient", "torch.maximum(*terms)", "torch.minimum(*terms)"),
    Break(
        "clip sides exchanged",
        "policy_gradient",
        "clamp(1 - clip_low, 1 + clip_high)",
        "clamp(1 - clip_high, 1 + clip_low)",
    ),
    Break(
        "ratio upside down",
        "policy_gradient",
        "masked(logp_new - logp_old, mask)",
        "masked(logp_old - logp_new, mask)",
    ),
    Break(
        "policy's sign",
        "policy_gradient",
        "return -ratio * advantages, -ratio",
        "return ratio * advantages, ratio",
    ),
    Break(
        "ties count as clipped", "policy_gradient", "terms[1] > terms[0]", "terms[1] >= terms[0]"
    ),
    Break("entropy punished", "policy_gradient", "- ent_coef * entropy", "+ ent_coef * entropy"),
    Break("value without its half", "value", "0.5 * errors", "errors"),
    Break("smaller value error", "value", "torch.maximum(*_squared", "torch.minimum(*_squared"),
    Break(
        "clip around the return",
        "value",
        "new.clamp(old - clip_range, old +",
        "new.clamp(target - clip_range, target +",
    ),
    Break("variance not explained", "value", "1 - unexplained / total", "unexplained / total"),
    Break("likelihood minimised", "supervised", "aggregate(-logp", "aggregate(logp"),
    Break("worst answer preferred", "ranking", "None] < ranks", "None] > ranks"),
    Break("ties kept whole", "ranking", "strict + 0.5 * tied", "strict + 1.0 * tied"),
    Break("pairs with itself", "ranking", "& ~itself", ""),
    Break(
        "centre of differences",
        "ranking",
        "(scores[:, :, None] + scores",
        "(scores[:, :, None] - scores",
    ),
    Break(
        "margin's sign", "ranking", "(differences - masked(margins", "(differences + masked(margins"
    ),
    Break("K squared pairs", "ranking", "k * (k - 1) / 2", "k * k / 2"),
    Break("equal scores are right", "ranking", "(difference > 0)", "(difference >= 0)"),
    Break("pairs weigh the same", "ranking", 'if reduction == "prompt_mean":\n', "if False:\n"),
    Break("prompts without a pair counted", "ranking", "(counts > 0).sum()", "(counts >= 0).sum()"),
    Break("wrong pairs are right", "ranking", "(diffs > 0).to", "(diffs < 0).to"),
    Break("error per bin", "ranking", "sum() / diffs.numel()", "sum() / bins"),
    Break("controller's direction", "control", "kl / target - 1", "1 - kl / target"),
    Break("warm-up one step longer", "control", "max(warmup_steps - 1, 1)", "warmup_steps"),
    Break("cosine upwards", "control", "(1 + math.cos", "(1 - math.cos"),
    Break(
        "average of the other one",
        "control",
        "decay * average + (1 - decay) * value",
        "decay * value + (1 - decay) * average",
    ),
    Break("the smoothed order", "dpo", "logsigmoid(-beta", "logsigmoid(beta"),
    Break("ipo's target", "dpo", "1 / (2 * beta)", "1 / beta"),
    Break(
        "dpo without beta", "dpo", "logsigmoid(beta * log_ratio_gaps)", "logsigmoid(log_ratio_gaps)"
    ),
    Break("offset added", "odpo", "log_ratio_gaps - offset", "log_ratio_gaps + offset"),
    Break("reference point below zero", "kto", ".clamp(min=0)", ""),
    Break("gain and loss exchanged", "kto", "(desirable, gain, loss)", "(desirable, loss, gain)"),
    Break(
        "reference point times beta left out",
        "kto",
        "beta * (log_ratios - reference)",
        "beta * log_ratios - reference",
    ),
    Break(
        "odds of a whole answer",
        "pairwise",
        "torch.where(mask, lengths, 1)",
        "torch.where(mask, 1, 1)",
    ),
    Break("odds without the other side", "orpo", "below - torch.log(-torch.expm1(below))", "below"),
    Break("odds ratio inverted", "orpo", "logsigmoid(ratios)", "logsigmoid(-ratios)"),
    Break("no target margin", "simpo", " - gamma", ""),
    Break("pairs of either order", "pairwise", "masked(losses, weights > 0)", "losses.mT"),
    Break("equal rewards right", "pairwise", "(table > 0)", "(table >= 0)"),
    Break("population of a group always", "group_advantages", "shape[1] - ddof", "shape[1]"),
    Break("eps inside the root", "group_advantages", "(std + eps)", "(std.square() + eps).sqrt()"),
    Break("scaled in any case", "group_advantages", "if not scaled:", "if False:"),
    Break("a baseline with itself", "group_advantages", "(size / max(size - 1, 1))", "1.0"),
    Break(
        "equal rewards leave a mean", "group_advantages", "shifted - shifted", "rewards - shifted"
    ),
    Break("kl rewarded in the loss", "grpo", "surrogate + beta", "surrogate - beta"),
    Break("kl from the wrong side", "grpo", 'estimator="k3")', 'estimator="k2")'),
    Break("log-probability lowered", "reinforce", "losses = -adv", "losses = adv"),
    Break(
        "sums over tokens", "masking", 'aggregation == "token_mean"', 'aggregation != "seq_mean"'
    ),
]


@pytest.fixture
def clean_modules() -> Iterator[None]:
    """Puts back every module and the package's attribute after a test that exchanged them."""
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)
    stages.functional = functional


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.what.replace(" ", "_"))
@pytest.mark.usefixtures("clean_modules")
def test_golden_cases_notice_a_break(broken: Break) -> None:
    source = _source(broken.module)
    assert source.count(broken.old) == 1, f"{broken.module} does not say {broken.old!r} once"
    exchanged = _adapters_over(broken.module, source.replace(broken.old, broken.new))
    assert next(mismatching(_cases(), exchanged.ADAPTERS), None)


@pytest.mark.usefixtures("clean_modules")
def test_golden_cases_pass_on_the_kernels_as_they_are() -> None:
    reloaded = _adapters_over("masking", _source("masking"))
    assert list(mismatching(_cases(), reloaded.ADAPTERS)) == []


def _cases() -> list[Case]:
    return [case for cases in read_suites(SHIPPED).values() for case in cases]


def _source(module: str) -> str:
    return Path(functional.__file__).with_name(f"{module}.py").read_text(encoding="utf-8")


def _adapters_over(module: str, source: str) -> ModuleType:
    """The adapters, imported anew over kernels of which one module has this source instead."""
    ours = (functional.__name__, adapters.__name__)
    for name in [name for name in sys.modules if name.startswith(ours)]:
        del sys.modules[name]
    package = importlib.import_module(functional.__name__)
    name = f"{functional.__name__}.{module}"
    exchanged = ModuleType(name)
    sys.modules[name] = exchanged
    setattr(package, module, exchanged)
    exec(compile(source, f"<broken {module}>", "exec"), exchanged.__dict__)
    return importlib.import_module(adapters.__name__)
