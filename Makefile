# The whole developer life, in a few words. Each works on a bare clone: `make demo`, `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test check bench fmt clean

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "lockstep needs Python >= 3.11; call make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## train on real digits in two processes
	$(BIN)/lockstep train examples/digits/config.py --nproc 2

test: $(READY)  ## every test, on real ranks
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(READY)  ## style, types, floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## against bare torch.distributed, interleaved in one run
	$(BIN)/python -m benchmarks

fmt: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) work_dirs
