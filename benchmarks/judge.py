"""One judge for both sides: plain passes of transformers over held-out records.

    python -m benchmarks.judge sft          MODEL HELD_OUT
    python -m benchmarks.judge reward_model MODEL HELD_OUT
    python -m benchmarks.judge ppo          MODEL PROMPTS REWARD REFERENCE

Prints one JSON line. Answers are read one by one, so that nothing depends on padding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

NEW_TOKENS = 24


def lines(path: str) -> list[dict[str, Any]]:
    """The records of a JSON Lines file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def answer_logps(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """``[T]`` log π(y_t | x, y_<t) in nats."""
    ids = torch.tensor([[*prompt, *answer]])
    logp = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
    return logp.gather(1, ids[0, len(prompt) :, None])[:, 0]


def score(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """What a reward model says at the last token."""
    return float(model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, 0])


class Judge:
    """A tokenizer and how it reads prompts and whole answers."""

    def __init__(self, model: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def ids(self, text: str) -> list[int]:
        """A prompt, or an answer that was cut."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def ended(self, text: str) -> list[int]:
        """An answer with its end token."""
        return [*self.ids(text), self.tokenizer.eos_token_id]

    def answers(self, policy: Any, prompts: list[str]) -> list[list[int]]:
        """A sampled answer to each prompt, its end token included where it has one."""
        end, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        batch = self.tokenizer(
            prompts,
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        torch.manual_seed(0)
        out = policy.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=end,
            pad_token_id=pad,
        )
        rows = out[:, batch["input_ids"].shape[1] :].tolist()
        return [row[: row.index(end) + 1] if end in row else row for row in rows]


def sft(model: str, held_out: str) -> dict[str, float]:
    """Loss per answer token in nats."""
    judge, policy = Judge(model), AutoModelForCausalLM.from_pretrained(model).eval()
    logps = [
        answer_logps(policy, judge.ids(row["prompt"]), judge.ended(row["response"]))
        for row in lines(held_out)
    ]
    return {"loss": -float(torch.cat(logps).mean())}


def reward_model(model: str, held_out: str) -> dict[str, float]:
    """Accuracy and log loss over all pairs."""
    judge = Judge(model)
    reward = AutoModelForSequenceClassification.from_pretrained(model).eval()
    gaps = []
    for row in lines(held_out):
        prompt = judge.ids(row["prompt"])
        ordered = sorted(row["responses"], key=lambda r: r["rank"])
        scores = [score(reward, prompt, judge.ended(r["text"])) for r in ordered]
        gaps += [better - worse for better, worse in combinations(scores, 2)]
    found = torch.tensor(gaps, dtype=torch.float64)
    return {
        "accuracy": float((found > 0).double().mean()),
        "log_loss": -float(logsigmoid(found).mean()),
    }


def ppo(model: str, prompts: str, reward: str, reference: str) -> dict[str, float]:
    """Score, KL from the reference in nats per answer, and length of sampled answers."""
    judge = Judge(model)
    policy: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    frozen = AutoModelForCausalLM.from_pretrained(reference).eval()
    judges = AutoModelForSequenceClassification.from_pretrained(reward).eval()
    rows = []
    texts = [record["prompt"] for record in lines(prompts)]
    for text, answer in zip(texts, judge.answers(policy, texts), strict=True):
        prompt = judge.ids(text)
        moved = answer_logps(policy, prompt, answer) - answer_logps(frozen, prompt, answer)
        rows.append([score(judges, prompt, answer), float(moved.sum()), float(len(answer))])
    means = torch.tensor(rows).mean(dim=0).tolist()
    return dict(zip(("score", "kl", "length"), means, strict=True))


if __name__ == "__main__":
    KINDS: dict[str, Callable[..., dict[str, float]]] = {
        "sft": sft,
        "reward_model": reward_model,
        "ppo": ppo,
    }
    with torch.no_grad():
        print(json.dumps(KINDS[sys.argv[1]](*sys.argv[2:])))
