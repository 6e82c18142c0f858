VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: setup check test nightly docs reference bench release-check

setup:  ## a development environment in .venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install torch==2.13.0 'setuptools>=77'
	$(BIN)/pip install --no-build-isolation -e '.[dev,docs,bench]' torch==2.13.0 --constraint .ci/constraints.txt

check:  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

test:  ## the tests that every change must pass
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not nightly" -n 2 --dist worksteal

nightly:  ## the other tests, one at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m nightly

docs:  ## the site, in out/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

reference:  ## the pages of docs/reference and docs/verification, from the code and the recorded results
	$(BIN)/python docs/site/write.py

bench:  ## list the benchmarks, and run a quick one
	@echo "benchmarks, each run by 'python -m benchmarks.<name>':"
	@grep -l '__name__ == "__main__"' benchmarks/*.py benchmarks/*/__main__.py | grep -v -e record -e tiny_models -e cluster | sed -e 's|benchmarks/|  |' -e 's|/__main__.py$$||' -e 's|\.py$$||'
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.parity --ranks 8 --quick

release-check:  ## build, check the metadata, install from the wheel in an empty environment, train
	.ci/release
