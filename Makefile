# The two commands of the README: `make demo` and `make test`. Both make .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test test-faults test-gpu bench pictures report format clean

help:
	@echo "make demo      train DLR against attention on two tasks (two minutes) and draw out/demo.png"
	@echo "make test      lint, types, imports, tests: all that CI runs"
	@echo "make test-faults  every fault of tests/faults: kills, full disks, bit flips, hostile files (long)"
	@echo "make test-gpu  the same tests on a CUDA device, with the python that is active"
	@echo "make bench     the layer against the paper's listing, on this machine"
	@echo "make pictures  draw the pictures of docs/ again"
	@echo "make report    the pages of the results, out/report/index.html, and docs/results.md"
	@echo "make format    let ruff format and fix"
	@echo "make clean     remove .venv and caches"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "dlrnn needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d: try make PYTHON=python3.12" % v)'
	@echo "Installing dlrnn into .venv (once; a minute or two)"
	@$(PYTHON) -m venv .venv || { echo "could not make .venv: $(PYTHON) lacks its venv module (on Debian: apt install python3-venv)"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 3 --dist worksteal

test-faults: $(READY)
	DLRNN_FAULTS=all $(BIN)/pytest -n 2 --dist worksteal tests/faults

test-gpu:
	DLRNN_TEST_DEVICE=cuda $(PYTHON) -m pytest -p no:cacheprovider

bench: $(READY)
	@$(BIN)/dlrnn bench layer

pictures: $(READY)
	@$(BIN)/python docs/draw.py

report: $(READY)
	@$(BIN)/dlrnn report --out out/report --markdown docs/results.md

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
