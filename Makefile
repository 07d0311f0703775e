# make train and make test need nothing but Python >= 3.11: each sets itself up, once, in .venv.
#
#   make test VENV=/path/to/venv          use (or create) that environment instead of .venv
#   make test PYTHON=/path/to/python      use that interpreter as it is if it has what make test needs, else make .venv
#
# A target asks for no more than it uses (NEEDS), so an environment that has that needs no network.
#
# pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) decide where packages come from, and so which build of
# PyTorch is installed.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# Test files run side by side; what one of them launches once, all of its tests use.
WORKERS ?= auto
SIDE_BY_SIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# What a target uses of pyproject.toml: `dependencies`, single libraries, extras; tools/environment.py reads it.
NEEDS = dependencies
ENVIRONMENT = $(PYTHON) tools/environment.py --venv "$(VENV)" --needs $(NEEDS)

# Expanded when a recipe runs, that is after `environment`.
PY = $(shell $(ENVIRONMENT) --find)

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export OMP_NUM_THREADS ?= 1

.PHONY: help environment install wheel train test test-long first-hour test-oldest lint docs parity parity-full test-native compile-check test-slow bench bench-two-lines bench-schedules bench-overlap bench-search bench-paper bench-recompute bench-host bench-ops bench-performance bench-servers bench-reliability faults doctor gpu gpu-kit gpu-rehearsal bench-shm fuzz-graph clean

help:
	@echo "make train        pretrain a small GPT on real text, 8 CPU processes or the GPUs there are; ARGS='--train-iters 400'"
	@echo "make test         style check, then every test but long and exhaustive ones; ARGS='tests/data -k blend' WORKERS=1"
	@echo "make lint         style, and types of the whole package (a minute; seconds from then on)"
	@echo "make test-long    whole jobs and further layouts, which make test leaves out (20 minutes)"
	@echo "make first-hour   README in a fresh clone and environment, then from a wheel (8 minutes; installs torch twice); ARGS=clone"
	@echo "make test-oldest  the same tests with the oldest libraries that pyproject.toml allows, in .venv-oldest"
	@echo "make parity       every model type of transformers against its eager self, into docs/parity.md (15 minutes; resumes)"
	@echo "make parity-full  every layout of the native models against one process (long)"
	@echo "make test-native  planted defects, sanitizers and registers of the CUDA kernels, without a GPU (5 minutes)"
	@echo "make compile-check  sources of csrc/ against the headers of another PyTorch, downloaded; TORCH=2.11.0 (2 minutes)"
	@echo "make fuzz-graph   random modules on simulated ranks against their eager selves; ARGS='--modules 5000'"
	@echo "make faults       a kill before every disk call of all that writes, then forty jobs with a fault each (40 minutes)"
	@echo "make test-slow    the other long sweeps: every model type's weights, the largest shapes"
	@echo "make bench        one training step beside other ways to run it; ARGS='...'"
	@echo "make bench-two-lines  one training script through HF Trainer and MerakTrainer, as shipped (40 minutes)"
	@echo "make bench-schedules  every pipeline schedule, modelled and measured, into docs/schedules.md (70 minutes)"
	@echo "make bench-overlap    tensor-parallel communication left exposed, into docs/overlap.md (10 minutes)"
	@echo "make bench-search     searched schedules beside bounds and builders, into docs/search.md (2 minutes)"
	@echo "make bench-recompute  what recomputing no more than necessary gains, modelled, into docs/recompute.md (2 minutes)"
	@echo "make bench-host       compiled index builders, simulator and search beside their twins (2 minutes)"
	@echo "make bench-shm       collectives through shared memory beside gloo, alone and in a training step (3 minutes)"
	@echo "make bench-paper      Merak's paper on modelled clusters, into docs/paper.md (5 minutes)"
	@echo "make bench-ops        compiled operations beside PyTorch's and torch.compile's"
	@echo "make bench-performance  a training step with and without compiled kernels, into docs/performance.md (30 minutes)"
	@echo "make bench-servers    parameter servers beside all-reduce, modelled, into docs/parameter_server.md (2 minutes)"
	@echo "make bench-reliability  the same faults here and in other programs, into docs/reliability.md (20 minutes)"
	@echo "make doctor           what is compiled and active here, and why the rest is not"
	@echo "make gpu              on a machine with a GPU: its tests, none of them skipped"
	@echo "make gpu-kit          what a session on a rented GPU carries there, into build/gpu-kit; needs Python 3.12 (3 minutes; 6 GB once)"
	@echo "make gpu-rehearsal    that session on this machine, with planted failures, into docs/gpu.md (20 minutes)"
	@echo "make wheel        a source distribution in dist/, and a wheel of it: compiled for any x86-64-v3 CPU, faster on AVX-512 (2 minutes)"
	@echo "make docs         the documentation site, into build/site; broken links and pages outside the nav fail (20 seconds)"
	@echo "make install      only the set-up that all of these share; idempotent"
	@echo "make clean        remove build products and caches; .venv and runs/ stay"

environment:
	@$(ENVIRONMENT)

install: environment

train bench-search bench-servers: NEEDS = dependencies pictures
install test test-long test-oldest parity-full test-native test-slow faults fuzz-graph: NEEDS = dependencies test
bench bench-two-lines bench-reliability: NEEDS = dependencies accelerate
lint: NEEDS = dependencies lint test
docs: NEEDS = docs
compile-check: NEEDS = torch
doctor: NEEDS = torch numpy
wheel: NEEDS = torch build
gpu: NEEDS = dependencies gpu

train: environment
	@$(PY) examples/train.py $(ARGS)

SELECTION = -m "not long and not slow and not gpu and not compiles" $(SIDE_BY_SIDE)
STYLE = $(PY) -m ruff check --output-format concise . && $(PY) -m ruff format --check -q .

# In an environment that was given and has no ruff, tests run all the same.
test: environment
	@if $(PY) -c "import ruff" 2>/dev/null; then $(STYLE); else echo "style is not checked: $(PY) has no ruff"; fi
	@$(PY) -m pytest -q $(SELECTION) $(ARGS)

test-long: environment
	@$(PY) -m pytest -q -m "long and not slow" --timeout 600 $(SIDE_BY_SIDE) $(ARGS)

first-hour:
	@tests/first_hour.sh $(ARGS)

# The other end of the ranges in pyproject.toml; compiled parts are built for it, and again for the next target.
test-oldest:
	@$(ENVIRONMENT) --oldest --venv .venv-oldest
	@.venv-oldest/bin/python -m pytest -q $(SELECTION) $(ARGS)

lint: environment
	@$(STYLE)
	@$(PY) -m mypy

# Pages open from disk: build/site/index.html.
docs: environment
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)
	@echo "build/site/index.html"

parity: environment
	@$(PY) tools/parity.py --write $(ARGS)

parity-full: environment
	@$(PY) -m pytest -v -m slow --timeout 3600 -n $(WORKERS) --dist loadgroup tests/parity $(ARGS)

test-native: environment
	@$(PY) -m pytest -q -m compiles --timeout 600 $(SIDE_BY_SIDE) tests/native $(ARGS)

compile-check: environment
	@$(PY) tools/compile_check.py $(or $(TORCH),2.11.0) $(ARGS)

test-slow: environment
	@$(PY) -m pytest -q -m slow --timeout 3600 --ignore tests/parity $(ARGS)

KILLS = tests/faults/test_kills.py tests/checkpoint/test_crash.py tests/hf_trainer/test_crash.py

# Jobs with faults run one after the other: they have times to keep.
faults: environment
	@$(PY) -m pytest -q -m "slow or not slow" --timeout 3600 $(SIDE_BY_SIDE) $(KILLS) $(ARGS)
	@$(PY) -m pytest -q -m "slow or not slow" tests/faults/test_inject_faults.py tests/faults/test_jobs.py $(ARGS)

fuzz-graph: environment
	@$(PY) -m tests.fuzz $(ARGS)

bench: environment
	@$(PY) benchmarks/step.py $(ARGS)

bench-two-lines: environment
	@$(PY) benchmarks/two_lines.py $(ARGS)

bench-schedules: environment
	@$(PY) benchmarks/schedules.py $(ARGS)

bench-overlap: environment
	@$(PY) benchmarks/overlap.py $(ARGS)

bench-search: environment
	@$(PY) benchmarks/search.py $(ARGS)

bench-recompute: environment
	@$(PY) benchmarks/recompute.py --write $(ARGS)

bench-host: environment
	@$(PY) benchmarks/host.py $(ARGS)

bench-shm: environment
	@$(PY) benchmarks/shared_memory.py $(ARGS)

bench-paper: environment
	@$(PY) benchmarks/paper.py --write $(ARGS)

bench-ops: environment
	@$(PY) benchmarks/ops.py $(ARGS)

bench-performance: environment
	@$(PY) benchmarks/performance.py $(ARGS)

bench-servers: environment
	@$(PY) benchmarks/parameter_server.py --into docs/parameter_server.md $(ARGS)

bench-reliability: environment
	@$(PY) benchmarks/reliability.py --into docs/reliability.md $(ARGS)

doctor: environment
	@$(PY) tools/doctor.py $(ARGS)

# Kernels that wait for each other deadlock where one is loaded while another waits.
gpu: environment
	@CUDA_MODULE_LOADING=EAGER $(PY) -m pytest -q -m gpu --no-skip tests/gpu $(ARGS)

# With the versions of the rented machine, in an environment of their own.
GPU_VENV ?= .venv-gpu

gpu-kit:
	@$(PYTHON) benchmarks/gpu_kit.py --venv "$(GPU_VENV)" $(ARGS)

gpu-rehearsal:
	@$(MAKE) --no-print-directory gpu-kit ARGS=
	@$(GPU_VENV)/bin/python -m tests.rehearsal.session --write $(ARGS)

# The wheel is made of the source distribution, so what that lacks the wheel shows.
wheel: environment
	@rm -rf dist
	@$(PY) setup.py --quiet sdist
	@MERAK_PORTABLE=1 MERAK_STRICT=1 $(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	@ls dist/*

clean:
	rm -rf build dist *.egg-info megatron_merak/*.so megatron_merak/_left_out.json .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -type d -prune -exec rm -rf {} +
