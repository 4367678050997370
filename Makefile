# Verbs for people and CI. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup run serve test test-oracle check bench clean

help: ## List the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The stamp is written last: an interrupted set-up starts again.
$(VENV)/.ready: pyproject.toml setup.py Makefile
	@$(PYTHON) tools/check_host.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@$(BIN)/python -c 'from pipeline.triton.install import ensure_tritonserver; print("tritonserver:", ensure_tritonserver().binary)'
	@touch $@

setup: $(VENV)/.ready ## Create .venv with everything that run and test need

run: $(VENV)/.ready ## Build, judge and emit the default model on this machine (more overrides: ARGS="precision=fp16")
	$(BIN)/python -m pipeline target=reference $(ARGS)

serve: $(VENV)/.ready ## Serve what `make run` made: Triton and the OpenAI frontend
	$(BIN)/python -m pipeline serve target=reference $(ARGS)

test: $(VENV)/.ready ## Run the tests (ARGS="-k name" for some)
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.ready ## Lint, types and layer rules
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)-oracle/.ready: pyproject.toml constraints/oracle.txt
	$(PYTHON) -m venv $(VENV)-oracle
	$(VENV)-oracle/bin/python -m pip install --quiet --disable-pip-version-check -c constraints/oracle.txt torch
	$(VENV)-oracle/bin/python -m pip install --quiet --disable-pip-version-check -c constraints/oracle.txt --editable '.[test,oracle]'
	@touch $@

test-oracle: $(VENV)-oracle/.ready ## Compare with transformers itself (installs a CPU torch in an environment of its own)
	$(VENV)-oracle/bin/python -m pytest -m oracle $(ARGS)

bench: $(VENV)/.ready ## Print the performance ratios of this machine
	$(BIN)/python bench/convert.py
	$(BIN)/python bench/startup.py

clean: ## Remove environments, caches and results; keeps nothing
	rm -rf $(VENV) $(VENV)-oracle .tritonserver .pipeline dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
