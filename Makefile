# Every target that needs an environment makes .venv first, once, from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test test-faults test-gpu bench docs pictures report format clean

help:
	@echo "make demo         train DLR and attention on two tasks (two minutes) and draw out/demo.png"
	@echo "make test         run ruff, mypy and pytest, as CI does"
	@echo "make test-faults  run all fault tests: kills, full disks, bit flips, hostile files (long)"
	@echo "make test-gpu     run the tests on a CUDA device with the active Python"
	@echo "make bench        time the layer and the paper's listing on this machine"
	@echo "make docs         build the documentation site, out/docs/index.html"
	@echo "make pictures     draw the pictures and tables of docs/ again"
	@echo "make report       build the results site, out/report/index.html, docs/results.md, README's counts"
	@echo "make format       format the code and apply automatic fixes"
	@echo "make clean        remove .venv, out/ and caches"

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

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir out/docs
	@echo "the documentation is in out/docs/index.html"

pictures: $(READY)
	@$(BIN)/python docs/draw.py

report: $(READY)
	@$(BIN)/dlrnn report --out out/report --markdown docs/results.md --counts README.md

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
