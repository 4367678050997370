# Verbs for people and CI. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup run serve test test-oracle test-clients test-soak check modelopt bench clean

help: ## List the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The stamp is written last: an interrupted set-up starts again.
$(VENV)/.ready: pyproject.toml setup.py Makefile
	@$(PYTHON) tools/check_host.py
	$(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV) (a minute or two)'
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

# Clients pin what the product does not, and one another differently: an environment for each, made only when asked for.
CLIENTS := $(VENV)-clients
$(CLIENTS)/.ready: Makefile
	mkdir -p $(CLIENTS)/node
	$(PYTHON) -m venv $(CLIENTS)/lm-eval
	$(CLIENTS)/lm-eval/bin/python -m pip install --quiet --disable-pip-version-check 'lm-eval[api]==0.4.13' 'transformers==4.57.6'
	$(PYTHON) -m venv $(CLIENTS)/schemathesis
	$(CLIENTS)/schemathesis/bin/python -m pip install --quiet --disable-pip-version-check 'schemathesis==4.32.5'
	$(PYTHON) -m venv $(CLIENTS)/aiperf
	$(CLIENTS)/aiperf/bin/python -m pip install --quiet --disable-pip-version-check 'aiperf==0.13.0'
	cd $(CLIENTS)/node && npm install --no-audit --no-fund --no-save openai@6.49.0
	@touch $@

test-clients: $(VENV)/.ready $(CLIENTS)/.ready ## Serve a tiny model to real clients (openai for node, lm-eval, aiperf, schemathesis, chromium)
	$(BIN)/python -m pytest -m clients $(ARGS)

test-soak: $(VENV)/.ready ## Hold the frontend under load for minutes (SOAK_REQUESTS=100000)
	$(BIN)/python -m pytest -m soak $(ARGS)

bench: $(VENV)/.ready ## Print the performance ratios of this machine
	$(BIN)/python bench/convert.py
	$(BIN)/python bench/startup.py

clean: ## Remove environments, caches, the store and results
	rm -rf $(VENV) $(VENV)-oracle $(VENV)-clients $(VENV)-modelopt .tritonserver .pipeline dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
