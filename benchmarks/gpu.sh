#!/usr/bin/env bash
# Everything that needs a GPU, on one, in under 8 minutes: the environment, the tests marked `gpu`,
# then the throughput of the stages at 135 M, 1 B and 3 B with random weights. Each part has a time
# limit of its own, and one that fails hides no other.
#
#     bash benchmarks/gpu.sh                          # makes build/gpu/venv
#     GPU_PYTHON=/path/to/python bash benchmarks/gpu.sh   # an environment that is there already
#
# Results: build/gpu/*.json, build/gpu/*.log, and a summary on standard output.
set -u
cd "$(dirname "$0")/.."
out=build/gpu
mkdir -p "$out"
rm -f "$out"/*.json "$out"/*.log "$out"/summary.txt

# part NAME SECONDS COMMAND… : runs it within its limit, keeps its output, notes how it ended.
part() {
    local name=$1 limit=$2 status=0 started=$SECONDS
    shift 2
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
    case $status in
        0) set -- done ;;
        124 | 137) set -- "over its $limit s" ;;
        *) set -- "failed ($status)" ;;
    esac
    printf '%-12s %-14s %4d s\n' "$name" "$1" $((SECONDS - started)) | tee -a "$out/summary.txt"
}

# torch 2.13.0, as constraints.txt pins it: PyPI's wheel for Linux carries CUDA.
environment() {
    python3 -m venv "$out/venv" &&
        "$out/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            -c constraints.txt -e ".[dev]"
}
export -f environment
export out

if [ -n "${GPU_PYTHON:-}" ]; then
    python=$GPU_PYTHON
else
    part environment 165 bash -c environment
    python=$out/venv/bin/python
fi

export PYTHONPATH=. RLHF_GPU_TESTS_ON=cuda HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
part device 20 "$python" -c 'import torch; print(torch.__version__, torch.version.cuda,
torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.mem_get_info())'
part tests 110 "$python" -m pytest -q -m gpu tests/gpu -p no:cacheprovider --timeout 60
part 135m 70 "$python" -m benchmarks.gpu --size 135m --output "$out/135m.json"
part 1b 60 "$python" -m benchmarks.gpu --size 1b --repeat 2 --output "$out/1b.json"
part 3b 50 "$python" -m benchmarks.gpu --size 3b --stages sft reward --budget 8192 --repeat 2 \
    --output "$out/3b.json"

for name in device tests 135m 1b 3b; do
    printf '\n== %s\n' "$name"
    tail -n 25 "$out/$name.log"
done
for file in "$out"/*.json; do
    [ -e "$file" ] && printf '\n== %s\n' "$file" && cat "$file" && echo
done
printf '\n== summary\n'
cat "$out/summary.txt"
! grep -Eq 'failed|over its' "$out/summary.txt"
