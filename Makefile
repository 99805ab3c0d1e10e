# make demo   draw a data set, train Mask R-CNN with MAViT-T on it, evaluate, show the predictions
# make test   run the whole test suite
# make lint   ruff
# PYTHON names the interpreter that makes .venv: Python 3.10 to 3.13.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Stands beside .venv while it is being made. Found later, it says that the set-up was broken off,
# perhaps in the middle of a package: .venv is then made anew. A .venv that somebody else made never
# has it and is only installed into.
UNFINISHED := .venv-unfinished

.PHONY: demo test lint

demo: $(INSTALLED)
	$(BIN)/python tools/demo.py

# Threads that wait by spinning take several times as long where other programs run.
test: $(INSTALLED)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(INSTALLED): setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 13) else \
	"mala_mm needs Python 3.10 to 3.13, $(PYTHON) is %d.%d: run make PYTHON=python3.12" % v)'
	@test -x $(BIN)/python || touch $(UNFINISHED)
	@echo 'Setting up .venv: a few minutes, the first time with a download of several GB.'
	@if test -e $(UNFINISHED); then $(PYTHON) -m venv --clear .venv; fi
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@rm -f $(UNFINISHED)
	@touch $(INSTALLED)
