"""Rewards of type ``model`` that read prompt and answer as a whole: encoders such as BERT.

Their tokenizer joins the two texts, and transformers runs them in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.data.plan import micro_batches
from stages.data.records import PromptLike, to_json
from stages.models.configured import max_positions
from stages.models.network import Network
from stages.runtime.rewards.texts import Absent, Answer, Score

TOO_LONG = "the answer is longer than the positions of the reward model"
_NO_LIMIT = 1 << 20  # tokens; a tokenizer without a limit of its own says a number far above


@dataclass(frozen=True)
class Encoder:
    """A scorer that reads pairs of texts.

    Attributes:
        network: the classifier.
        tokenizer: joins prompt and answer.
        budget: tokens of a micro-batch.
    """

    network: Network
    tokenizer: Any
    budget: int

    def __call__(self, answers: Sequence[Answer]) -> list[Score]:
        """A score for each answer that the model has positions for."""
        encoded = [self._encoded(answer) for answer in answers]
        found: list[Score] = [Absent(TOO_LONG)] * len(answers)
        places = [n for n, pair in enumerate(encoded) if pair is not None]
        lengths = [len(encoded[n]["input_ids"]) for n in places]
        for rows in micro_batches(lengths, self.budget):
            chosen = [places[n] for n in rows]
            for n, score in zip(chosen, self._read([encoded[n] for n in chosen]), strict=True):
                found[n] = score
        return found

    def _encoded(self, answer: Answer) -> Any:
        """The pair as ids; of what is too long the oldest part of the prompt is left out."""
        prompt, limit = self._text(answer.prompt), self._positions()
        pair = self.tokenizer(prompt, answer.text, verbose=False)
        excess = len(pair["input_ids"]) - limit
        if excess <= 0:
            return pair
        ids = self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        if excess > len(ids):
            return None
        kept = self.tokenizer.decode(ids[excess:], clean_up_tokenization_spaces=False)
        shorter = self.tokenizer(kept, answer.text, verbose=False)
        return shorter if len(shorter["input_ids"]) <= limit else None

    def _text(self, prompt: PromptLike) -> str:
        """A prompt in the model's template, or its turns one below the other."""
        if isinstance(prompt, str):
            return prompt
        if self.tokenizer.chat_template is None:
            return "\n\n".join(turn.content for turn in prompt)
        return str(self.tokenizer.apply_chat_template(to_json(prompt), tokenize=False))

    def _positions(self) -> int:
        known = (self.tokenizer.model_max_length, max_positions(self.network.module.config))
        return min(n for n in (*known, _NO_LIMIT) if n is not None)

    @torch.no_grad()
    def _read(self, pairs: Sequence[Any]) -> list[float]:
        network = self.network
        network.module.eval()
        batch = self.tokenizer.pad(pairs, padding=True, return_tensors="pt").to(network.device)
        with network.autocast():
            raw = network.module(**batch).logits[:, 0]
        exact = raw if raw.dtype == torch.float64 else raw.float()
        scores: list[float] = ((exact - network.mean) / network.std).tolist()
        return scores
