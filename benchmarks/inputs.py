"""What both sides read: random models, a tokenizer, and texts whose ranks follow a rule.

An answer is the better the larger its share of words that begin with one of ``EARLY``. Lengths are
log-normal, as in instruction data, so that padding costs what it costs in practice.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.works import Work

CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
EARLY = "bcdfg"
LONGEST = 5  # times the median
HAZARD = 1 - 0.5 ** (1 / 16)  # chance of the end token at each position: half end before 16
CARRIER = 1.0
LEARNT = 8192  # tokens that the tokenizer knows at most; a larger vocabulary is a larger matrix


@dataclass(frozen=True)
class Size:
    """Dimensions of a Llama."""

    hidden: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    shared_heads: int | None = None


SIZES = {
    "tiny": Size(128, 4, 4, 384, 2048),  # 1.0 M
    "small": Size(384, 6, 6, 1024, 8192),  # 13.8 M
    "medium": Size(576, 30, 9, 1536, 49152, 3),  # 134.5 M, the shape of SmolLM2-135M
}


def lexicon(count: int) -> list[str]:
    """``count`` different words of one to three syllables, always the same."""
    rng = random.Random(0)
    syllables = [c + v for c in CONSONANTS for v in VOWELS]
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choice(syllables) for _ in range(rng.randint(1, 3)))] = None
    return list(words)


def words_of(vocabulary: int) -> list[str]:
    """The words of a model's texts; nearly each becomes one token."""
    return lexicon(min(vocabulary, LEARNT) // 2)


def share_of_early(text: str) -> float:
    """The rule: the share of words that begin with an early letter."""
    words = text.split()
    return sum(word[0] in EARLY for word in words) / len(words)


@dataclass
class Writer:
    """Draws texts from a seed."""

    rng: random.Random
    early: Sequence[str]
    late: Sequence[str]
    spread: float

    def text(self, median: int, share: float = len(EARLY) / len(CONSONANTS)) -> str:
        """Words of a log-normal number, a share of which is expected to begin early."""
        drawn = round(math.exp(self.rng.gauss(0.0, self.spread)) * median)
        count = min(max(2, drawn), LONGEST * median)
        kinds = [self.early if self.rng.random() < share else self.late for _ in range(count)]
        return " ".join(self.rng.choice(kind) for kind in kinds)

    def demonstration(self, work: Work) -> dict[str, Any]:
        """A prompt and its answer."""
        prompt, answer = self.text(work.prompt_words), self.text(work.answer_words)
        return {"prompt": prompt, "response": f" {answer}"}

    def ranking(self, work: Work) -> dict[str, Any]:
        """A prompt and K answers, ranked by the rule; no two have the same share."""
        answers: dict[float, str] = {}
        while len(answers) < work.k:
            answer = self.text(work.answer_words, self.rng.random())
            answers[share_of_early(answer)] = f" {answer}"
        order = sorted(answers, reverse=True)
        responses = [{"text": text, "rank": order.index(s) + 1} for s, text in answers.items()]
        return {"prompt": self.text(work.prompt_words), "responses": responses}


def writer(vocabulary: int, seed: int, work: Work) -> Writer:
    """Texts of a work for a model of a vocabulary."""
    words = words_of(vocabulary)[: work.words]
    early = [word for word in words if word[0] in EARLY]
    late = [word for word in words if word[0] not in EARLY]
    return Writer(random.Random(seed), early, late, work.spread)


def records(
    work: Work, count: int, seed: int, *, vocabulary: int | None = None
) -> list[dict[str, Any]]:
    """The lines of a work's file in the format of this project."""
    source = writer(vocabulary or SIZES[work.size].vocabulary, seed, work)
    if work.stage == "sft":
        return [source.demonstration(work) for _ in range(count)]
    if work.stage == "reward_model":
        return [source.ranking(work) for _ in range(count)]
    return [{"prompt": source.text(work.prompt_words)} for _ in range(count)]


def pairs(ranking: Mapping[str, Any]) -> list[dict[str, str]]:
    """All pairs of a ranking, as trainers of pairs read them."""
    texts = [r["text"] for r in sorted(ranking["responses"], key=lambda r: r["rank"])]
    return [
        {"prompt": ranking["prompt"], "chosen": better, "rejected": worse}
        for better, worse in combinations(texts, 2)
    ]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A JSON Lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def write_data(folder: Path, work: Work, *, seed: int = 0) -> tuple[Path, Path]:
    """A work's records and, of rankings, their pairs."""
    rows = records(work, work.records, seed)
    data = write_lines(folder / f"{work.slug}.jsonl", rows)
    if work.stage != "reward_model":
        return data, data
    flat = [pair for row in rows for pair in pairs(row)]
    return data, write_lines(folder / f"{work.slug}-pairs.jsonl", flat)


def write_models(folder: Path, size: Size, *, seed: int = 0) -> None:
    """A policy, a policy that ends its answers, and a reward model, with their tokenizer.

    Each stands in a folder of its own, ``model``, ``ending`` and ``reward``.
    """
    import torch
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    tokenizer = make_tokenizer(size.vocabulary)
    config = llama(size, tokenizer)
    torch.manual_seed(seed)
    policy = LlamaForCausalLM(config)
    policy.save_pretrained(folder / "model")
    let_end(policy, tokenizer.eos_token_id, len(tokenizer))
    policy.save_pretrained(folder / "ending")
    config.num_labels = 1
    torch.manual_seed(seed)
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    for name in ("model", "ending", "reward"):
        tokenizer.save_pretrained(folder / name)


def make_tokenizer(vocabulary: int) -> Any:
    """A byte-level BPE that has seen every word equally often."""
    from stages.models import tiny

    words = words_of(vocabulary)
    texts = [" ".join(random.Random(n).sample(words, len(words))) for n in range(4)]
    return tiny.make_tokenizer(texts, vocabulary=min(vocabulary, LEARNT))


def llama(size: Size, tokenizer: Any) -> Any:
    """The config of a Llama with tied embeddings."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=max(size.vocabulary, len(tokenizer)),
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.shared_heads or size.heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )


def let_end(model: Any, end: int, known: int) -> None:
    """Give the end token a chance of ``HAZARD`` at every position, inside the weights.

    The first entry of each embedding becomes a constant, which the final hidden states then carry;
    the end token's own entry is raised until its mean probability in random contexts is right.
    """
    import torch

    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = CARRIER
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(end + 1, known, (8, 64), generator=generator)
        hidden = model.model(input_ids=ids).last_hidden_state
        logits = (hidden @ embedding.T).double()
        own = logits[..., end].clone()
        logits[..., end] = -math.inf
        rest, carried = logits.logsumexp(dim=-1), hidden[..., 0].double()
        low, high = 0.0, 100.0
        for _ in range(60):
            middle = (low + high) / 2
            chance = float((own + middle * carried - rest).sigmoid().mean())
            low, high = (middle, high) if chance < HAZARD else (low, middle)
        embedding[end, 0] += low
