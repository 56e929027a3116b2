# The whole developer life, in a few words. Each works on a bare clone: `make demo`, `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
INSTALL := -m pip install --quiet --constraint constraints.txt

# Tests start hundreds of processes: without Python's bytecode beside the source, each would compile it again.
unexport PYTHONDONTWRITEBYTECODE

# SLICE=1 runs the few tests or cells of a long word that .ci/slices.mk names.
include .ci/slices.mk

.PHONY: demo test check bench fmt clean

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "lockstep needs Python >= 3.11; call make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --editable '.[dev]'
	@touch $@

demo: $(READY)  ## train on real digits in two processes
	$(BIN)/lockstep train examples/digits/config.py --nproc 2

# Ranks that wait for each other leave most of two cores idle: three files of tests run at a time. Where times are compared
# (faults, jobs) one runs alone. PYTEST_ARGS="-n 0" runs one at a time everywhere, as a debugger needs.
THREE_AT_A_TIME := --numprocesses 3 --dist loadfile

# Tests that take minutes are marked, and have words of their own (pyproject.toml lists the markers).
test: $(READY)  ## the main test suite, on real ranks
	$(BIN)/python -m pytest $(THREE_AT_A_TIME) -m "not (gpu or jobs or layouts or checkpoints or faults)" $(PYTEST_ARGS)

.PHONY: test-faults
test-faults: $(READY)  ## faults of ranks: wrong calls, errors, exits, signals, slow and diverging ranks; who is named
	$(BIN)/python -m pytest $(or $(if $(SLICE),$(SLICE_FAULTS)),-m "faults and not gpu") $(PYTEST_ARGS)

.PHONY: faults-page
faults-page: $(READY)  ## the faults and who was named, with times: docs/faults.md
	rm -f work_dirs/faults.json && mkdir -p work_dirs
	$(BIN)/python -m pytest tests/faults --faults-json work_dirs/faults.json $(PYTEST_ARGS)
	$(BIN)/python -m tests.faults.table work_dirs/faults.json docs/faults.md

.PHONY: test-checkpoints
test-checkpoints: $(READY)  ## checkpoints and weights: damage, attacks, kills, resuming in another form, other formats
	$(BIN)/python -m pytest $(THREE_AT_A_TIME) $(or $(if $(SLICE),$(SLICE_CHECKPOINTS)),-m "checkpoints and not gpu") $(PYTEST_ARGS)

.PHONY: test-layouts
test-layouts: $(READY)  ## FSDP's options and checks, tensor parallelism, compiled models, states of optimizers, against one process
	$(BIN)/python -m pytest $(THREE_AT_A_TIME) $(or $(if $(SLICE),$(SLICE_LAYOUTS)),-m "layouts and not gpu") $(PYTEST_ARGS)

.PHONY: test-jobs
test-jobs: $(READY)  ## the commands, torchrun, mpirun, Slurm and two hosts for real; every example
	$(BIN)/python -m pytest $(or $(if $(SLICE),$(SLICE_JOBS)),-m "jobs and not gpu") $(PYTEST_ARGS)

.PHONY: test-gpu
# Where there are fewer GPUs than ranks, NCCL takes them as ranks of several hosts.
test-gpu: $(READY)  ## collectives, trainings and faults on GPUs: of one, two and four ranks, which may share one
	NCCL_HOSTID=lockstep $(BIN)/python -m pytest tests/gpu -m gpu $(PYTEST_ARGS)

# Needs a C++ compiler; about a minute of it, the first time.
.PHONY: test-device
test-device: $(READY)  ## collectives, trainings and faults on a simulated accelerator, whose backend has NCCL's rules
	TORCH_EXTENSIONS_DIR=$(CURDIR)/build/torch_extensions $(BIN)/python -m pytest $(if $(SLICE),$(SLICE_DEVICE),tests/device) $(PYTEST_ARGS)

.PHONY: mutants
mutants: $(READY)  ## five faults that only an accelerator shows, each put into a copy of the source: which tests find it
	TORCH_EXTENSIONS_DIR=$(CURDIR)/build/torch_extensions $(BIN)/python tests/device/mutants.py

.PHONY: test-deepspeed
test-deepspeed: .venv-deepspeed/.ready  ## the DeepSpeed strategy, in an environment of its own
	.venv-deepspeed/bin/python -m pytest $(if $(SLICE),$(SLICE_DEEPSPEED),tests/engines/deepspeed --min-rank-tests 45) $(PYTEST_ARGS)

.venv-deepspeed/.ready: pyproject.toml constraints.txt requirements/models.txt
	$(PYTHON) -m venv .venv-deepspeed
	.venv-deepspeed/bin/python $(INSTALL) --editable '.[deepspeed,testing]' hypothesis \
		--requirement requirements/models.txt
	@touch $@

.PHONY: test-colossalai
test-colossalai: .venv-colossalai/.ready  ## the ColossalAI strategy, in an environment of its own
	.venv-colossalai/bin/python -m pytest $(if $(SLICE),$(SLICE_COLOSSALAI),tests/engines/colossalai --min-rank-tests 48) $(PYTEST_ARGS)

.venv-colossalai/.ready: pyproject.toml constraints.txt requirements/colossalai.txt requirements/colossalai-imports.txt \
		requirements/models-colossalai.txt
	$(PYTHON) -m venv .venv-colossalai
	.venv-colossalai/bin/python $(INSTALL) --editable '.[testing]' hypothesis \
		--requirement requirements/colossalai-imports.txt --requirement requirements/models-colossalai.txt
	.venv-colossalai/bin/python -m pip install --quiet --no-deps --requirement requirements/colossalai.txt
	@touch $@

# Aim is built for Python 3.11 and 3.12 only.
.PHONY: test-trackers
test-trackers: .venv-trackers/.ready  ## Comet, Aim, ClearML, DVCLive, Trackio, MLflow and W&B, each offline, in an environment of their own
	.venv-trackers/bin/python -m pytest tests/trackers tests/visualization/test_library.py $(PYTEST_ARGS)

.venv-trackers/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/python $(INSTALL) hypothesis \
		--editable '.[comet,aim,clearml,dvclive,trackio,mlflow,wandb,tensorboard,testing]'
	@touch $@

check: $(READY)  ## style, types, layers of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typing/user_script.py
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --project pyproject.toml --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(READY)  ## against bare torch.distributed and a loop by hand, interleaved in one run
	$(BIN)/python -m benchmarks

.PHONY: bench-peers
bench-peers: .venv-peers/.ready  ## training steps of other frameworks: on two ranks, and of MMEngine in one process
	.venv-peers/bin/python -m benchmarks peers --json benchmarks/peers.json
	.venv-peers/bin/python -m benchmarks peers --nproc 1 --json benchmarks/peers-single.json

.PHONY: bench-gpu
bench-gpu: .venv-peers/.ready  ## a GPT and a ResNet-50 on GPUs, by hand and with other frameworks; the host's time per call
	.venv-peers/bin/python -m benchmarks.gpu

.venv-peers/.ready: pyproject.toml constraints.txt requirements/peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python $(INSTALL) --editable . --requirement requirements/peers.txt
	@touch $@

.PHONY: parity
parity: $(READY) .venv-deepspeed/.ready .venv-colossalai/.ready  ## one loss curve under every strategy: docs/parity.md
	$(BIN)/python -m benchmarks.parity --deepspeed-python .venv-deepspeed/bin/python \
		--colossalai-python .venv-colossalai/bin/python $(if $(SLICE),$(SLICE_PARITY))

# ONLY=data needs no engines.
.PHONY: resume-matrix
resume-matrix: $(READY) $(if $(filter data,$(ONLY)),,.venv-deepspeed/.ready .venv-colossalai/.ready)  ## runs that stop and resume in another form: docs/resume-matrix.md
	$(BIN)/python -m benchmarks.resume --deepspeed-python .venv-deepspeed/bin/python \
		--colossalai-python .venv-colossalai/bin/python $(if $(SLICE),$(SLICE_RESUME)) $(if $(ONLY),--only $(ONLY))

.PHONY: test-models
test-models: .venv-models/.ready .venv-deepspeed/.ready .venv-colossalai/.ready  ## many kinds of models under every strategy: docs/models.md
	.venv-models/bin/python -m benchmarks.models $(if $(SLICE),$(SLICE_MODELS))

.PHONY: test-models-device
test-models-device: .venv-models/.ready  ## the same models on a simulated accelerator, under torch's own strategies
	.venv-models/bin/python -m benchmarks.models --device sim

.PHONY: bench-checkpoint
bench-checkpoint: .venv-peers/.ready  ## what a save costs beside those of torch, accelerate and Lightning: pause, seconds, memory
	.venv-peers/bin/python -m benchmarks.checkpoints --json benchmarks/checkpoints.json

# CYCLES=N: how often a run is killed and resumed.
# Needs a C compiler.
.PHONY: bench-scale
bench-scale: $(READY)  ## what 2 to 32 ranks send, how it grows, and what becomes of 32 when one fails: docs/scale.md
	$(BIN)/python -m benchmarks.scale

.PHONY: soak-kills
soak-kills: $(READY)  ## runs that are killed again and again, and what they leave on the disk
	$(BIN)/python -m pytest tests/checkpoint/soak_kills.py -s $(PYTEST_ARGS)

.PHONY: soak-elastic
soak-elastic: $(READY)  ## trainings of one to four ranks, of which random ones are killed, until the end
	$(BIN)/python -m pytest tests/faults/soak_elastic.py -s $(PYTEST_ARGS)

# RUNS=N: how many jobs of each fault; BUSY=N: processes that compute meanwhile; SEED=N.
.PHONY: soak-faults
soak-faults: $(READY)  ## jobs in which a rank fails, in random order and at random moments: how often it is named first
	$(BIN)/python -m pytest tests/faults/soak_faults.py $(PYTEST_ARGS)

.PHONY: soak-preemption
soak-preemption: $(READY)  ## a training that is stopped fifty times, and goes on each time
	$(BIN)/python tests/launch/soak_preemption.py

# CASES=N: how many trainings; SEED=N: the first of them. So for soak-numbers.
.PHONY: soak-resume
soak-resume: $(READY)  ## loops with random options, stopped at random moments, which must go on as if they had not been
	$(BIN)/python -m tests.runner.soak_resume --cases $(or $(CASES),300) --seed $(or $(SEED),0)

.PHONY: soak-numbers
soak-numbers: $(READY)  ## trainings with random options on one to three ranks, against a loop by hand in plain torch
	$(BIN)/python -m tests.runner.soak_numbers --cases $(or $(CASES),300) --seed $(or $(SEED),0)

.PHONY: test-buckets
test-buckets: .venv-buckets/.ready  ## weights and checkpoints in a bucket, of a server that speaks S3, on this machine
	.venv-buckets/bin/python -m pytest tests/buckets $(PYTEST_ARGS)

.venv-buckets/.ready: pyproject.toml constraints.txt requirements/buckets.txt
	$(PYTHON) -m venv .venv-buckets
	.venv-buckets/bin/python $(INSTALL) hypothesis --editable '.[s3,testing]' \
		--requirement requirements/buckets.txt
	@touch $@

.PHONY: test-integrations
test-integrations: .venv-integrations/.ready  ## Ray Train, TorchX, Monarch, dask and notebooks start ranks, in an environment of their own
	.venv-integrations/bin/python -m pytest tests/integrations $(PYTEST_ARGS)

.venv-integrations/.ready: pyproject.toml constraints.txt requirements/integrations.txt
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python $(INSTALL) --editable '.[testing]' hypothesis \
		--requirement requirements/integrations.txt
	@touch $@

# Mosaic's package asks for older versions than the others; what it is used for here needs none of them.
.PHONY: test-data-packages
test-data-packages: .venv-data/.ready  ## data sets and streams of other packages: is each sample seen once? docs/data-packages.md has the table
	.venv-data/bin/python -m pytest tests/data_packages $(if $(SLICE),$(SLICE_DATA_PACKAGES)) $(PYTEST_ARGS)

.venv-data/.ready: pyproject.toml constraints.txt requirements/data.txt
	$(PYTHON) -m venv .venv-data
	.venv-data/bin/python $(INSTALL) hypothesis --editable '.[testing]' --requirement requirements/data.txt
	.venv-data/bin/python -m pip install --quiet --no-deps mosaicml-streaming==0.13.0 litdata==0.2.76
	@touch $@

.PHONY: test-huggingface
test-huggingface: .venv-models/.ready  ## models of transformers and peft: saved, exported and loaded by their own libraries
	.venv-models/bin/python -m pytest tests/huggingface $(PYTEST_ARGS)

.venv-models/.ready: pyproject.toml constraints.txt requirements/models.txt
	$(PYTHON) -m venv .venv-models
	.venv-models/bin/python $(INSTALL) --editable '.[dev]' \
		--requirement requirements/models.txt
	@touch $@

# The same torch in both; PyPI has no build of mmcv's operators, nor of torchvision's, that fits it: see the tests' stubs.
MMENGINE := .venv-mmengine/.ready .venv-mmengine-reference/.ready

.PHONY: test-mmengine
test-mmengine: $(MMENGINE)  ## packages that were written for MMEngine on lockstep, beside MMEngine itself in a second environment
	MMENGINE_REFERENCE=$(CURDIR)/.venv-mmengine-reference/bin/python \
		.venv-mmengine/bin/python -m pytest -c compat/mmengine/pyproject.toml compat/mmengine/tests $(PYTEST_ARGS)
	TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 \
		.venv-mmengine-reference/bin/python -m pytest -c compat/mmengine/pyproject.toml -W ignore compat/mmengine/tests/documented $(PYTEST_ARGS)

.PHONY: mmengine-trainings
mmengine-trainings: $(MMENGINE)  ## seven packages for MMEngine train, validate, resume, test and train with AMP: one rank, two under DDP and FSDP
	MMENGINE_REFERENCE=$(CURDIR)/.venv-mmengine-reference/bin/python .venv-mmengine/bin/python -m pytest \
		-c compat/mmengine/pyproject.toml compat/mmengine/tests/test_trainings.py -m matrix --durations=0 $(PYTEST_ARGS)

# SHARE=K/N tries every N-th family, from the K-th on, with the configs of the page; MORE=1 those that are not on it yet.
.PHONY: mmengine-models
mmengine-models: $(MMENGINE)  ## one model of each family of seven packages, beside MMEngine: docs/mmengine-models.md
	.venv-mmengine/bin/python compat/mmengine/families.py --ours $(CURDIR)/.venv-mmengine/bin/python \
		--theirs $(CURDIR)/.venv-mmengine-reference/bin/python $(if $(SHARE),--share $(SHARE)) $(if $(MORE),--missing)

.venv-mmengine/.ready: pyproject.toml compat/mmengine/pyproject.toml constraints.txt requirements/mmengine.txt requirements/mmengine-packages.txt
	$(PYTHON) -m venv .venv-mmengine
	.venv-mmengine/bin/python $(INSTALL) --editable '.[testing]' --editable compat/mmengine \
		--requirement requirements/mmengine.txt
	.venv-mmengine/bin/python -m pip install --quiet --no-deps --requirement requirements/mmengine-packages.txt
	@touch $@

.venv-mmengine-reference/.ready: constraints.txt requirements/mmengine.txt requirements/mmengine-packages.txt
	$(PYTHON) -m venv .venv-mmengine-reference
	.venv-mmengine-reference/bin/python $(INSTALL) --requirement constraints.txt \
		--requirement requirements/mmengine.txt
	.venv-mmengine-reference/bin/python -m pip install --quiet --no-deps mmengine==0.10.7 \
		--requirement requirements/mmengine-packages.txt
	@touch $@

.PHONY: docs
docs: .venv-docs/.ready  ## the documentation, in site/; warnings are errors, and links are checked
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	.venv-docs/bin/python tools/links.py site

.venv-docs/.ready: constraints.txt requirements/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python $(INSTALL) --requirement requirements/docs.txt
	@touch $@

.PHONY: test-docs
test-docs: docs .venv-models/.ready  ## every code block of the documentation, on one rank and on two; every public name in the reference
	.venv-models/bin/python -m pytest $(if $(SLICE),$(SLICE_DOCS),tests/pages) $(PYTEST_ARGS)

.PHONY: dist
dist: $(READY)  ## wheel and sdist, and the wheel tried in a fresh environment
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python tools/try_wheel.py

.PHONY: messages
messages: $(READY)  ## every message that the package can raise, warn of or log, to be read in one go
	$(BIN)/python tools/messages.py

# WORDS="parity test-jobs" runs those alone, and puts their results beside the others.
.PHONY: nightly
nightly: $(READY)  ## every word, whole, one after the other (hours); the result of each: docs/verified.md
	$(BIN)/python tools/nightly.py $(WORDS)

fmt: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-* work_dirs build site dist
