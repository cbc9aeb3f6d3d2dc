# The two commands of the README: `make serve` and `make test`. Both set up .venv first.

PYTHON ?= $(firstword $(foreach v,python3.13 python3.12 python3.11 python3,\
	$(shell $(v) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(v))))
VENV := .venv
STAMP := $(VENV)/.installed
MODEL ?= smollm2-135m-instruct
ARGS ?=

.PHONY: setup serve test check clean

setup: $(STAMP)

$(STAMP): pyproject.toml hatch_build.py scripts/setup $(wildcard engine/native/*.[ch])
	scripts/setup "$(PYTHON)" $(VENV)
	@touch $@

serve: setup
	$(VENV)/bin/halfmoon model pull $(MODEL)
	exec $(VENV)/bin/halfmoon serve $(MODEL) $(ARGS)

test: setup
	scripts/check --all

check: setup
	scripts/check

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
