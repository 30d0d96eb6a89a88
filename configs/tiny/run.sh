#!/bin/sh
# The three stages on the tone-count task, from a random model to a tuned policy, in a few minutes.
#
# RLHF names the command (default: rlhf) and PYTHON an interpreter (default: python3); give either
# by its name or by its absolute path. A stopped run goes on where it was: start this file again.
# SEED (default: 0) is that of every stage; another one needs a folder of its own.
set -eu
cd -- "$(dirname -- "$0")"
RLHF=${RLHF:-rlhf}
PYTHON=${PYTHON:-python3}
SEED=${SEED:-0}
started=$(date +%s)

say() { printf '\n== %s\n' "$1" >&2; }

sample() { # POLICY PROMPTS ANSWERS: four answers per prompt
    "$RLHF" sample "$1" "$2" --k 4 --max-new-tokens 32 --seed "$SEED" --output "$3" --resume
}

mkdir -p answers

say "step 1: learn to answer from demonstrations"
"$RLHF" sft configs/sft.yaml seed="$SEED" --resume

say "step 2: sample answers, rank them, learn the ranking"
sample runs/sft data/prompts.jsonl answers/unranked.jsonl
# A rule ranks the answers here, in the place of people.
"$PYTHON" tone_count.py label answers/unranked.jsonl --output data/rankings.jsonl
"$RLHF" train-rm configs/reward_model.yaml seed="$SEED" --resume

say "step 3: optimise the policy against the reward model"
"$RLHF" ppo configs/ppo.yaml seed="$SEED" --resume

say "the true score, which no model has seen, on prompts that no stage has seen"
sample runs/sft data/eval_prompts.jsonl answers/before.jsonl
sample runs/ppo data/eval_prompts.jsonl answers/after.jsonl
"$PYTHON" tone_count.py score answers/before.jsonl > answers/before.json
"$PYTHON" tone_count.py score answers/after.jsonl > answers/after.json
"$PYTHON" summary.py --seconds "$(($(date +%s) - started))" \
    --true-scores answers/before.json answers/after.json
