# make demo   trains a RevNet with PETRA and with reversible backprop, and compares them
# make test   runs all tests
# make test-fast   runs those that a contributor runs after each change, in about a minute
# make soak   trains for SECONDS with random faults drawn from SEED, and compares the weights
# make leaks   repeats ticks, trainers and trainings many times, and measures what stays behind
# make docs   builds the documentation into site/
# make lint   checks style and types
# Each of them first sets up .venv, once; nothing else has to be installed by hand.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
# What is imported is compiled once, then, and not all that is installed.
unexport PYTHONDONTWRITEBYTECODE

SECONDS ?= 600
SEED ?= 0

.PHONY: setup demo test test-fast soak leaks docs pictures lint format clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	# For the tests. Without their dependencies: torchvision asks for the CUDA build of PyTorch that it was made for.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --no-deps timm torchvision
	$(BIN)/petra methods > /dev/null
	# Compiled once here, and not by each of the processes that test.
	$(BIN)/python -c "import petra.cli.train, pytest, hypothesis, sklearn.datasets, torch._dynamo"
	touch $@

demo: setup
	$(BIN)/petra compare --recipe digits --methods reversible petra --out runs/demo --overwrite

# Four processes for two cores: many tests wait, for timeouts or for jobs that start.
test: setup
	$(BIN)/python -m pytest -n 4 --dist worksteal --durations 20

test-fast: setup
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not slow and not soak"

# Not part of `make test`. One trial again: python -m soak --seed SEED --only NUMBER.
soak: setup
	$(BIN)/python -m pytest -m soak
	PYTHONPATH=tests $(BIN)/python -m soak --seconds $(SECONDS) --seed $(SEED)

leaks: setup
	PYTHONPATH=tests $(BIN)/python -W ignore -m soak.leaks

# Warnings are errors: broken links, missing pages, docstrings that do not match their signatures.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The pictures of the documentation, drawn again by Petra's own commands.
pictures: setup
	$(BIN)/python docs/pictures.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs site .mypy_cache .pytest_cache .ruff_cache .hypothesis
