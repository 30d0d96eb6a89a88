"""``rlhf ppo``: step 3, optimise the policy against the reward model."""

from __future__ import annotations

from rlhf_cli.commands.stage import stage_command

command = stage_command(
    "ppo", description="Step 3: optimise a policy against a reward model with PPO."
)
