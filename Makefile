# Every command of the project; `make` alone lists them.
#
# PYTHON=...  the interpreter that makes .venv     PORT=8000  where `make serve` listens
# ARGS=...    further arguments of serve, test     NAME=...   the one benchmark to run

VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
# The oldest Python that pyproject.toml allows.
MIN_PYTHON := 3, 11

PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-full check serve bench venv clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## ask about a picture with a spoken question; the answer lands in demo-answer.wav
	$(BIN)/omnistage run starter --image examples/media/chelsea.png \
	    --audio examples/media/question.wav --out demo-answer.wav $(ARGS)

test: $(VENV)/.installed-dev  ## run the tests that need no more than minutes
	$(BIN)/python -m pytest -m "not full" --durations=15 $(ARGS)

test-full: $(VENV)/.installed-dev  ## run all tests
	$(BIN)/python -m pytest --durations=30 $(ARGS)

check: $(VENV)/.installed-dev  ## lint, format, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

serve: $(VENV)/.installed  ## serve the starter on 127.0.0.1:8000
	$(BIN)/omnistage serve starter --host 127.0.0.1 --port $(PORT) $(ARGS)

bench: $(VENV)/.installed-dev  ## run the benchmarks, or one of them with NAME=...
	@for script in $(if $(NAME),benchmarks/$(NAME).py,$(sort $(wildcard benchmarks/*.py))); do \
	    echo "== $$script"; $(BIN)/python "$$script" $(ARGS) || exit 1; \
	done

venv: $(VENV)/.installed-dev  ## make .venv with everything for development

clean:  ## remove caches and build outputs; .venv and fetched weights stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f demo-answer.wav
	find omnistage tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

# A stamp says what .venv holds, so that a second run installs nothing.
$(VENV)/.created:
	@for python in $(BIN)/python $(or $(PYTHON),python3.11 python3); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < ($(MIN_PYTHON)))' 2> /dev/null; then \
	        test "$$python" = $(BIN)/python || "$$python" -m venv $(VENV) || exit 1; \
	        touch $@; exit 0; \
	    fi; \
	done; \
	echo "Omnistage needs Python 3.11 or newer; found none as: $(or $(PYTHON),python3.11 python3)." \
	    "Install one, or name it: make PYTHON=/path/to/python3.11" >&2; \
	exit 1

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $(VENV)/.installed $@
