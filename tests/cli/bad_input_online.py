"""What a user can get wrong with the methods without a critic, as lines of bad input."""

from __future__ import annotations

from collections.abc import Iterator

from tests.cli.bad_input import SETTINGS, Bad, holding

SIZES = {
    "grpo": ("grpo.group_size=1", "grpo.group_size", "is 1"),
    "rloo": ("rloo.group_size=1", "rloo.group_size", "is 1"),
    "online_dpo": ("rollout.batch_size=5", "rollout.batch_size", "2, the answers to a prompt"),
}
"""Stage: an override, the key that is named, and words of what is wrong."""


def config(stage: str) -> str:
    """A small config of a stage."""
    return (
        f"stage: {stage}\nmodel: base\noutput: runs/{stage}\n"
        "data: {train: prompts.jsonl, eval: null}\nreward: {path: reward}\n"
        "rollout: {batch_size: 8, max_new_tokens: 4}\n"
        f"train: {{total_episodes: 8, batch_size: 4}}\n{SETTINGS}"
    )


def bad(name: str, stage: str, options: str, exit_code: int, where: str, what: str, do: str) -> Bad:
    """A case on the small config of a stage."""
    argv = f"{stage.replace('_', '-')} {stage}.yaml {options}"
    return Bad(name, argv, exit_code, where, (what,), do, holding(f"{stage}.yaml", config(stage)))


def cases() -> Iterator[Bad]:
    """Every case."""
    for stage, (option, key, what) in SIZES.items():
        do = f"rlhf config schema {stage}"
        yield bad(f"groups that are none in {stage}", stage, option, 2, f"override {key}", what, do)
    for stage in ("grpo", "rloo", "reinforce", "online_dpo"):
        yield bad(
            *(f"a reward model as the policy of {stage}", stage, "model=reward", 4, "reward"),
            *("is a reward model, and a policy is needed", "rlhf sft"),
        )
        yield bad(
            *(f"a policy as the reward model of {stage}", stage, "reward.path=base", 4, "base"),
            *("no reward head", "rlhf train-rm"),
        )
    yield bad(
        *("a rollout of parts of groups", "rloo", "rollout.batch_size=6", 2),
        *("override rollout.batch_size", "rloo.group_size (4), got 6; 8 is one"),
        "rlhf config schema rloo",
    )
    yield bad(
        *("a minibatch of half a pair", "online_dpo", "train.batch_size=3", 2),
        *("override train.batch_size", "got 3; 4 is one", "rlhf config schema online_dpo"),
    )
    yield bad(
        *("a decay of no average", "reinforce", "reinforce.decay=0.5", 2),
        *("override reinforce.decay", "is for baseline: moving_average"),
        "rlhf config schema reinforce",
    )
    yield bad(
        *("a KL in the reward of grpo", "grpo", "kl.coef=0.1", 2),
        *("override kl.coef", "unknown key", "rlhf config schema grpo"),
    )


ONLINE = list(cases())
