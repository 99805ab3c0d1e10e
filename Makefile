# make demo   draw a data set, train Mask R-CNN with MAViT-T on it, evaluate, show the predictions
# make test   run the whole test suite
# make lint   ruff
# PYTHON names the interpreter that makes .venv: Python 3.10 to 3.13.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLING := .venv/.installing

.PHONY: demo test lint

demo: $(INSTALLED)
	$(BIN)/python tools/demo.py

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The marker stands from the first to the last step: where it is found, an earlier set-up was broken
# off, perhaps in the middle of a package, and the environment is made anew.
$(INSTALLED): setup.py mala_mm/version.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 13) else \
	"mala_mm needs Python 3.10 to 3.13, $(PYTHON) is %d.%d: run make PYTHON=python3.12" % v)'
	@echo 'Setting up .venv; the download is several GB the first time.'
	$(PYTHON) -m venv $(if $(wildcard $(INSTALLING)),--clear) .venv
	@touch $(INSTALLING)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@mv $(INSTALLING) $(INSTALLED)
