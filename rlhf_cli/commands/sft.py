"""``rlhf sft``: step 1, supervised fine-tuning on demonstrations."""

from __future__ import annotations

from rlhf_cli.commands.stage import stage_command

command = stage_command("sft", description="Step 1: fine-tune a model on demonstrations.")
