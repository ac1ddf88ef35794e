# Every target makes .venv if needed, from a clean clone, and leaves it alone while it is up to date.
#   PYTHON       interpreter of .venv (3.11 or newer)
#   PROGRAMS     no: install no system packages for tests; those that need one are skipped
#   TESTS        folder or file that `make quick` tests (default: what changed)
#   ONLY         parts of gpu, or names of clients, with commas (default: all)
#   DEVICE       device of the demo: cpu (default), or cuda for all its ranks on one GPU
#   TORCH_INDEX  package index for torch, e.g. https://download.pytorch.org/whl/cpu (default: pip's own)

PYTHON ?= python3
TORCH_INDEX ?=
DEVICE ?=
ONLY ?=
PROGRAMS ?=
TESTS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
USER_READY := $(VENV)/ready-user
DEV_READY := $(VENV)/ready-dev
# Studies behind decision records: commands of `python -m bench`.
STUDIES := cost-model kv-carrier scheduling

# Tests start many processes: where bytecode is not written, each of them compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test slow quick programs lint format docs install-test clients bench gpu proto clean distclean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 19

demo: $(USER_READY) ## ask a real model about a document on this machine and check every token
	$(BIN)/ringserve demo $(if $(DEVICE),--device $(DEVICE))

# pytest's summary is the last output, unless lint fails. It has four processes on two cores: two wait for clusters most
# of the time.
test: programs $(DEV_READY) ## run lint and tests, required before a commit; installs the system programs they need
	@$(MAKE) --no-print-directory lint >$(VENV)/lint.log 2>&1 & lint=$$!; \
	$(BIN)/pytest -n 4 || failed=1; \
	wait $$lint || { cat $(VENV)/lint.log; echo "lint failed"; failed=1; }; \
	exit $${failed:-0}

slow: programs $(DEV_READY) ## run the slow tests too: measurements in tests/bench, kernels for emulated processors
	$(BIN)/pytest -n 2 -m slow

quick: $(DEV_READY) ## run lint and the tests of what changed, or of one folder: TESTS=tests/workers/kv
	@$(BIN)/python tests/quick.py $(TESTS)

programs: ## install the system programs that tests run: a browser, Prometheus, iproute2, g++
	@$(if $(filter no,$(PROGRAMS)),,PYTHON=$(PYTHON) tests/system_programs.sh)

lint: $(DEV_READY) ## check style, types, import contracts, stub freshness, links of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python proto/generate.py --check
	$(BIN)/mkdocs build --strict --quiet

format: $(DEV_READY) ## format the source and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV_READY) ## build the documentation as a site in build/site
	$(BIN)/mkdocs build --strict --quiet

install-test: $(DEV_READY) ## build the image and play the chart's pods without a cluster; needs Linux, root, apt and PyPI
	@$(if $(filter no,$(PROGRAMS)),,PYTHON=$(PYTHON) tests/system_programs.sh containers)
	$(BIN)/python -m tests.install.run $(if $(ONLY),--only $(ONLY))

clients: $(USER_READY) ## run other people's clients against a service, and write docs/clients.md; needs PyPI and npm
	$(BIN)/python -m tests.clients.run $(if $(ONLY),--only $(ONLY))

bench: $(DEV_READY) ## run every measurement: rings, then the studies in bench/
	$(BIN)/python -m bench attention
	$(BIN)/python -m bench prefill --rings-only
	$(BIN)/python -m bench decode --rings-only
	@set -e; for study in $(STUDIES); do echo "== $$study"; $(BIN)/python -m bench $$study; done

gpu: $(DEV_READY) ## test and measure this machine's GPU, each figure beside its target; ONLY=kernels,steps for parts
	$(BIN)/python -m bench gpu $(if $(ONLY),--only $(ONLY))

proto: $(DEV_READY) ## generate the stubs of proto/ringserve/v1/*.proto
	$(BIN)/python proto/generate.py

clean: ## remove caches and build outputs
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	rm -rf $(VENV)

# Modules that import nearly all that serves a model.
SERVED := ringserve.services.cli.up ringserve.services.cluster.running ringserve.services.gateway.process \
	ringserve.services.gateway.openai.app ringserve.workers.rank.worker

# torch is installed first and by its exact version: together with the rest, or by a range, pip may choose several
# gigabytes of CUDA packages although a CPU build is available. Bytecode is written when a module is first imported:
# that of all packages would take most of a minute, and most of it is never read. What serves a model is imported at
# once, for those who let Python write none.
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ringserve needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
$(PIP) install --no-compile "$$(grep '^torch==' constraints.txt)" -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
$(PIP) install --no-compile -e proto -e "$(1)" -c constraints.txt
$(BIN)/python -c 'import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]' $(SERVED)
endef

SOURCES := pyproject.toml proto/pyproject.toml constraints.txt hatch_build.py cp_core/attention/native.cpp

$(USER_READY): $(SOURCES)
	$(call install,.)
	@touch $@

$(DEV_READY): $(SOURCES)
	$(call install,.[dev])
	@touch $(USER_READY) $@
