# make quickstart   compare five methods on handwritten digits, with a report: under three minutes
# make test         format check, lint, types, tests
# make faults       kills, full disks, damaged files: up to a quarter of an hour
# make docs         the documentation site, into site/
# make mutants      mutation tests, hours: see docs/testing.md
# make dist-check   wheel and sdist, built, installed into an empty environment and tested there
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test lint types pytest test-long faults mutants dist-check docs format bench clean

quickstart: .venv/lab
	$(BIN)/noiseproof compare --data digits

test: lint types pytest

lint: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/dev
	$(BIN)/pyright

pytest: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long"

test-long: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m long

faults: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile tests/faults

mutants: .venv/dev
	$(BIN)/pip install --quiet --constraint constraints.txt mutmut
	OMP_NUM_THREADS=1 nice $(BIN)/python -m tools.mutate

# The wheel is built from the sdist; without noiseproof/ beside them, the tests import the wheel.
CHECK := build/dist-check
dist-check:
	rm -rf dist $(CHECK)
	$(PYTHON) -m venv $(CHECK)/venv
	$(CHECK)/venv/bin/pip install --quiet --upgrade pip build
	$(CHECK)/venv/bin/python -m build --outdir dist .
	tar -xzf dist/*.tar.gz -C $(CHECK) --strip-components 1
	rm -r $(CHECK)/noiseproof
	$(CHECK)/venv/bin/pip install --quiet --constraint constraints.txt "$$(echo dist/*.whl)[lab,dev]"
	cd $(CHECK) && OMP_NUM_THREADS=1 venv/bin/python -m pytest -n 2 --dist loadfile -m "not long" \
		--pyargs noiseproof tests

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/lab
	$(BIN)/python benchmarks/loss.py

# Without PYTHONWARNINGS, setuptools warns that the checkout has a folder named like the package.
INSTALL := PYTHONWARNINGS=ignore::UserWarning $(BIN)/pip install --quiet \
	--constraint constraints.txt --editable

.venv/pip:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	touch $@

.venv/lab: .venv/pip pyproject.toml constraints.txt
	$(INSTALL) ".[lab]"
	touch $@

.venv/dev: .venv/pip pyproject.toml constraints.txt
	$(INSTALL) ".[lab,dev,docs]"
	touch $@ .venv/lab

clean:
	rm -rf .venv site build dist *.egg-info .pytest_cache .ruff_cache
