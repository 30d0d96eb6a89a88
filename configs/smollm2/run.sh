#!/bin/sh
# SmolLM2-135M-Instruct through the three stages on real data, then two steps of every other method.
#
#     sh run.sh DATA WORK
#
# DATA holds demonstrations.jsonl, rankings.jsonl and prompts.jsonl; where one is missing, the one
# other .jsonl in DATA takes its place (rankings serve as demonstrations and as prompts). WORK
# receives base/, runs/ and summary.json. A stopped run goes on where it was. RLHF names the command
# (default: rlhf), PYTHON an interpreter (default: python3).
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
data=$(CDPATH='' cd -- "$1" && pwd)
mkdir -p "$2"
cd -- "$2"
RLHF=${RLHF:-rlhf}
PYTHON=${PYTHON:-python3}
started=$(date +%s)

pick() { # NAME: its file in DATA, else the one other .jsonl there
    if [ -f "$data/$1.jsonl" ]; then
        printf '%s\n' "$data/$1.jsonl"
        return
    fi
    other=''
    for file in "$data"/*.jsonl; do
        case $(basename -- "$file") in
        demonstrations.jsonl | rankings.jsonl | prompts.jsonl | pretrain.jsonl) ;;
        *)
            if [ -n "$other" ]; then
                printf 'error: %s has no %s.jsonl and several other files\n' "$data" "$1" >&2
                exit 3
            fi
            other=$file
            ;;
        esac
    done
    if [ ! -f "$other" ]; then
        printf 'error: %s has no %s.jsonl and no other .jsonl\n' "$data" "$1" >&2
        exit 3
    fi
    printf '%s\n' "$other"
}

demonstrations=$(pick demonstrations)
rankings=$(pick rankings)
prompts=$(pick prompts)
pretrain=$data/pretrain.jsonl
[ -f "$pretrain" ] || pretrain=$here/../../data_samples/pretrain.jsonl

"$PYTHON" "$here/prepare.py" base
"$RLHF" sft "$here/sft.yaml" "data.train='$demonstrations'" --resume
"$RLHF" train-rm "$here/reward_model.yaml" "data.train='$rankings'" --resume
"$RLHF" ppo "$here/ppo.yaml" "data.train='$prompts'" "ptx.data='$pretrain'" --resume
"$PYTHON" "$here/../tiny/summary.py" --seconds "$(($(date +%s) - started))"

method() { # WORD KEY=VALUE...: two steps from runs/sft, adapters alone
    word=$1
    shift
    "$RLHF" "$word" "$here/../$(printf '%s' "$word" | tr - _).yaml" model=runs/sft "output=runs/$word" \
        data.eval=null data.as_messages=true data.max_prompt_tokens=64 data.overlong=truncate \
        lora.rank=8 train.max_steps=2 train.tokens_per_micro_batch=2048 train.learning_rate=1e-4 \
        --resume "$@"
}

ranked() { # WORD KEY=VALUE...: a method that learns from rankings
    word=$1
    shift
    method "$word" "data.train='$rankings'" data.max_response_tokens=96 data.limit=16 \
        train.batch_size=4 "$@"
}

scored() { # WORD KEY=VALUE...: a method that learns from the reward model
    word=$1
    shift
    method "$word" "data.train='$prompts'" data.limit=16 reward.path=runs/reward_model \
        train.batch_size=8 rollout.batch_size=8 rollout.max_new_tokens=32 "$@"
}

ranked dpo
ranked odpo odpo.offset=rank
ranked kto
ranked orpo
ranked simpo
scored grpo grpo.group_size=4
scored rloo rloo.group_size=4
scored reinforce
scored online-dpo
