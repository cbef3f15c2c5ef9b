# Every target makes its own .venv. PYTHON may name another interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check lint types fmt bench wheel clean

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Rollbook needs Python 3.11 or newer"'
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## record, query, train, replay: all of it, in a few minutes
	$(BIN)/rollbook demo --replace

test: $(STAMP)  ## the tests, a process for each core; those of one file stay together
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile

check: lint types test  ## what a change must pass

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

fmt: $(STAMP)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## measure against the machine and against peers; a minute each, three for the proxy
	@$(BIN)/python -m rollbook.bench.litellm_peer > /dev/null || echo "no litellm here: it is left out"
	@for name in append proxy recover seal sql stream tail; do $(BIN)/rollbook bench $$name || exit; done

wheel: $(STAMP)  ## build the wheel and check that it works where nothing else is installed
	bash .ci/wheel

clean:
	rm -rf $(VENV) dist demo-store
