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

.PHONY: help help-all environment install wheel train smoke test test-long first-hour test-oldest lint docs parity parity-full test-native compile-check test-slow bench faults doctor gpu gpu-kit gpu-rehearsal fuzz-graph clean

help:
	@echo "make train        pretrain a small GPT on real text, 8 CPU processes or the GPUs there are; ARGS='--train-iters 400'"
	@echo "make smoke        one test of each part (a minute)"
	@echo "make test         style, then every test but long and exhaustive ones; ARGS='tests/data -k blend' WORKERS=1"
	@echo "make lint         style, and types of the whole package (a minute; seconds from then on)"
	@echo "make test-long    whole jobs and further layouts, which make test leaves out (40 minutes)"
	@echo "make first-hour   README in a fresh clone and environment, then from a wheel (15 minutes); ARGS=clone"
	@echo "make bench        lists the benchmarks; NAME=step ARGS=--quick starts one, as python -m benchmarks step --quick does"
	@echo "make doctor       what is compiled and active here, and why the rest is not"
	@echo "make docs         the documentation site, into build/site; broken links and pages outside the nav fail (20 seconds)"
	@echo "make wheel        a source distribution and a wheel of it, in dist/ (2 minutes)"
	@echo "make clean        remove build products and caches; .venv and runs/ stay"
	@echo "make help-all     the other targets: exhaustive tests, GPUs, tables of parity"

help-all: help
	@echo
	@echo "make install          only the set-up that all of these share; idempotent"
	@echo "make test-oldest      the tests with the oldest libraries that pyproject.toml allows, in .venv-oldest"
	@echo "make test-native      planted defects, sanitizers and registers of the CUDA kernels, without a GPU (5 minutes)"
	@echo "make test-slow        the other long sweeps: every model type's weights, random modules, jobs in further layouts, two hosts"
	@echo "make compile-check    sources of csrc/ against the headers of another PyTorch, downloaded; TORCH=2.11.0 (2 minutes)"
	@echo "make fuzz-graph       random modules on simulated ranks against their eager selves; ARGS='--modules 5000'"
	@echo "make faults           a kill before every disk call of all that writes, then forty jobs with a fault each (40 minutes)"
	@echo "make parity           every model type of transformers against its eager self, into docs/evidence/parity.md (15 minutes; resumes)"
	@echo "make parity-full      every layout of the GPT of flags against one process (long)"
	@echo "make gpu              on a machine with a GPU: its tests, none of them skipped"
	@echo "make gpu-kit          what a session on a rented GPU carries there, into build/gpu-kit; needs Python 3.12 (3 minutes; 6 GB once)"
	@echo "make gpu-rehearsal    that session on this machine, with planted failures, into docs/gpu.md (20 minutes)"

environment:
	@$(ENVIRONMENT)

install: environment

train: NEEDS = dependencies pictures
install smoke test test-long test-oldest parity-full test-native test-slow faults fuzz-graph: NEEDS = dependencies test
bench: NEEDS = dependencies accelerate
ifneq ($(filter search servers,$(NAME)),)
bench: NEEDS += pictures
endif
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

# The rules of the code; a job alone and as tensor x pipeline ranks; a captured model as such ranks, beside its
# eager self; a trainer beside HuggingFace's, with what it saves; checkpoints of other ranks; each operation.
SMOKE = tests/test_architecture.py \
	tests/training/test_pretrain.py::test_one_process_and_four_tell_the_same_story \
	'tests/stages/test_captured.py::test_a_layout_computes_what_the_model_computes[llama-grid1-full]' \
	'tests/hf_trainer/test_user_model.py::test_one_process_shares_its_weights[fp32]' \
	tests/checkpoint/test_reshard.py::test_tensor_parallel_sizes_read_each_other \
	tests/ops/test_activation.py::test_swiglu_has_the_gradient_of_its_formula \
	tests/ops/test_attention.py::test_it_is_the_formula \
	tests/ops/test_cross_entropy.py::test_cross_entropy_is_its_definition \
	tests/ops/test_flat.py::test_adamw_is_the_papers \
	tests/ops/test_linear.py::test_linear_through_a_sink \
	tests/ops/test_norm.py::test_kernels_round_once \
	tests/ops/test_residual.py::test_kernel_and_twin_drop_the_same_elements \
	tests/ops/test_rotary.py::test_angles_are_huggingfaces \
	tests/ops/test_softmax.py::test_it_is_the_formula

smoke: environment
	@$(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(SMOKE) $(ARGS)

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
	@$(PY) -m pytest -q -m slow --timeout 3600 --ignore tests/parity/test_parity.py $(ARGS)

KILLS = tests/faults/test_kills.py tests/checkpoint/test_crash.py tests/checkpoint/test_in_place.py tests/checkpoint/test_hf_crash.py tests/hf_trainer/test_crash.py tests/tools/test_convert.py

# Jobs with faults run one after the other: they have times to keep.
faults: environment
	@$(PY) -m pytest -q -m "slow or not slow" --timeout 3600 $(SIDE_BY_SIDE) $(KILLS) $(ARGS)
	@$(PY) -m pytest -q -m "slow or not slow" tests/faults/test_inject_faults.py tests/faults/test_jobs.py $(ARGS)

fuzz-graph: environment
	@$(PY) -m tests.fuzz $(ARGS)

bench: environment
	@$(PY) -m benchmarks $(NAME) $(ARGS)

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
	rm -rf build dist *.egg-info megatron_merak/*.so megatron_merak/_left_out.json .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -type d -prune -exec rm -rf {} +
