"""``rlhf grpo``, ``rloo``, ``reinforce`` and ``online-dpo``: sampled answers without a critic."""

from __future__ import annotations

from rlhf_cli.commands.stage import stage_command

_DESCRIPTIONS = {
    "grpo": "Optimise a policy against a reward, each answer held against its group.",
    "rloo": "Optimise a policy against a reward, the other answers to a prompt as baseline.",
    "reinforce": "Optimise a policy against a reward with one answer to a prompt.",
    "online_dpo": "Learn like dpo from pairs that the policy samples and a reward ranks.",
}

commands = {
    word.replace("_", "-"): stage_command(word, description=text, module="online")
    for word, text in _DESCRIPTIONS.items()
}
