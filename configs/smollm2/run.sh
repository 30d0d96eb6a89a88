#!/bin/sh
# SmolLM2-135M-Instruct through the three stages on real data.
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
