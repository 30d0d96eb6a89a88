"""``rlhf dpo``, ``odpo``, ``kto``, ``orpo`` and ``simpo``: preferences without a reward model."""

from __future__ import annotations

from rlhf_cli.commands.stage import stage_command

_DESCRIPTIONS = {
    "dpo": "Learn from ranked answers directly, the policy as its own reward model.",
    "odpo": "Learn from ranked answers with an offset: better by more, likelier by more.",
    "kto": "Learn from answers that are labelled as desirable or not.",
    "orpo": "Fine-tune and learn from ranked answers at once, without a reference.",
    "simpo": "Learn from ranked answers by mean log-probability, without a reference.",
}

commands = {
    word: stage_command(word, description=text, module="preference")
    for word, text in _DESCRIPTIONS.items()
}
