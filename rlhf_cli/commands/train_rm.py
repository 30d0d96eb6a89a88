"""``rlhf train-rm``: step 2, a reward model from ranked answers."""

from __future__ import annotations

from rlhf_cli.commands.stage import stage_command

command = stage_command(
    "reward_model", description="Step 2: train a reward model on ranked answers."
)
