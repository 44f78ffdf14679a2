# make demo | test | check | format | parity PROMPTS=FILE.jsonl | bench PROMPTS=FILE.jsonl | clean

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := 2.13.0

.PHONY: demo test check format parity bench has-prompts clean

demo: $(READY)
	$(BIN)/pilotfish demo

test: check
	$(BIN)/pytest

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
	$(BIN)/pilotfish bench speed --pair pycode@344m --prompts "$(PROMPTS)"
	$(BIN)/pilotfish bench acceptance --pair pycode@344m --prompts "$(PROMPTS)"
	$(BIN)/pilotfish bench profile --pair pycode@344m --prompts "$(PROMPTS)" --limit 8

has-prompts:
	@test -n "$(PROMPTS)" || { echo "PROMPTS is missing: make parity PROMPTS=FILE.jsonl" >&2; exit 2; }

$(READY): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet torch==$(TORCH)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
