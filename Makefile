# make demo      a run writes, another process opens parts of it, fresh engines resume it
# make test      lint, types and the tests of every commit
# make test-all  the same, with every combination of stage, offload, dtype and optimizer
# make test-crash  writes killed at every operation and at 300 random times, 50,000 losses of power (half an hour)
# make test-browser  the page of `zckpt report` in a headless Chromium, which it installs on Debian
# make test-versions  some of the tests with every DeepSpeed version that zckpt is meant for
# make bench     every comparison with the limit of the machine and with others; results in bench/results
# make bench-gpu  loading to a GPU, with the loaders that are made for it, and writing from it
# make fuzz      random input to every parser and to whole checkpoints, FUZZ_SECONDS (60) for each
# make docs      the pages of README, docs/, spec/ and bench/results as a site, in build/site
# make setup     what the tests need; every target sets up for itself what it needs
# make bench-index  size and speed of the index at 1024 ranks, and of the commands
# make bench-coverage  what DeepSpeed's own checkpoints and zckpt do in the same situations; writes bench/results/
#
# Wants python3 (3.11 or newer, with headers), make and a C++ compiler; everything else goes into .venv and .cache.
# Without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu avoids several GB of CUDA packages.

PYTHON ?= python3
TORCH_INDEX ?=
FUZZ_SECONDS ?= 60

PY := .venv/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check
SETUP := .venv/.stamp
OPS := .cache/ops.stamp
SIM := .cache/sim.stamp
DEMO_OPS := .cache/demo-ops.stamp
OLDER := 0.16.9 0.17.6 0.18.9
SMOKE := -m "matrix or not matrix" @tests/smoke.txt
PLOTS := .venv/.bench-stamp
BROWSER := .venv/.browser-stamp
FUZZER := .venv/.fuzz-stamp
DOCS := .venv/.docs-stamp
FUZZ_TARGETS := header index manifest tree checkpoint repair latest

# The build of the ops calls ninja, which comes with the tools. Nothing is read from or left in the home directory.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_CACHE_DIR := $(CURDIR)/.cache/pip
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export XDG_CACHE_HOME := $(CURDIR)/.cache
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions
export TRITON_HOME := $(CURDIR)/.cache
export HF_HOME := $(CURDIR)/.cache/huggingface
export HF_HUB_OFFLINE := 1
export MAX_JOBS ?= 2

# Most tests use one processor at a time.
PYTEST := $(PY) -m pytest --numprocesses $(MAX_JOBS) --dist worksteal

.PHONY: setup lint test test-all test-crash test-browser test-versions $(OLDER:%=test-%) demo bench bench-gpu bench-index bench-coverage fuzz docs clean

setup: $(SETUP) $(OPS) $(SIM)

test: setup lint
	@$(PYTEST)

test-all: setup $(DOCS) lint
	@$(PYTEST) -m "matrix or not matrix"

test-crash: setup
	@ZCKPT_TEST_EVERY=1 ZCKPT_TEST_KILLS=150 ZCKPT_TEST_VARIANTS=12000 $(PYTEST) -m "matrix or not matrix" \
	    tests/faults/test_crashes.py tests/faults/test_power_loss.py tests/ranks/test_lost_ranks.py tests/faults/test_store_faults.py

test-browser: setup $(BROWSER)
	@$(install_browser)
	@$(PY) -m pytest -m "matrix or not matrix" tests/reporting

test-versions: setup $(OLDER:%=test-%)
	@$(PY) -m pytest $(SMOKE)

# What an older version warns of while it is imported is not zckpt's; in the ranks, zckpt's own warnings stay errors.
$(OLDER:%=test-%): test-%: .cache/versions/%/stamp
	@echo "DeepSpeed $*"
	@$(with_version) $(PY) -m pytest -W ignore $(SMOKE)

lint: $(SETUP)
	@.venv/bin/ruff check --quiet
	@.venv/bin/ruff format --check --quiet
	@$(PY) -m mypy --no-error-summary

demo: $(DEMO_OPS)
	@$(PY) examples/demo.py

# BENCH="--quick" for a look at whether they work, BENCH="--dir DIR" to measure another disk.
bench: setup $(PLOTS)
	@$(PY) bench/all.py $(BENCH)

bench-gpu: setup $(PLOTS)
	@$(PIP) install 'fastsafetensors>=0.5' 'instanttensor>=0.2' runai-model-streamer
	@$(PY) bench/load_to_gpu.py $(BENCH)
	@$(PY) bench/write_from_gpu.py $(BENCH)
	@$(PY) bench/report.py

bench-index: $(SETUP)
	@$(PY) bench/index_scale.py
	@$(PY) bench/command_line.py
	@$(PY) bench/commands_at_scale.py

bench-coverage: setup
	@$(PY) bench/coverage.py --output bench/results

.PHONY: $(FUZZ_TARGETS:%=fuzz-%)
fuzz: $(FUZZ_TARGETS:%=fuzz-%)

$(FUZZ_TARGETS:%=fuzz-%): fuzz-%: $(SETUP) $(FUZZER)
	@$(PY) fuzz/run.py $* --seconds $(FUZZ_SECONDS)

# Strict: a link that leads nowhere fails.
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "docs: build/site/index.html"

clean:
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

# DeepSpeed is built from source, by a build that imports torch: so torch comes first, and no build environment of
# pip's own, which would fetch another torch.
$(SETUP): constraints.txt pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup: needs Python 3.11 or newer"; exit 1; }
	@echo "setup: virtual environment in .venv"
	@$(PYTHON) -m venv .venv
	@$(PIP) install pip setuptools wheel
	@echo "setup: PyTorch (some minutes where it has to be downloaded)"
	@$(PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@echo "setup: DeepSpeed and the tools"
	@$(PIP) install hatchling editables msgpack ninja numpy packaging psutil py-cpuinfo pydantic tqdm einops hjson
	@$(PIP) install --no-build-isolation --editable '.[deepspeed,dev]'
	@touch $@

# DeepSpeed compiles its C++ ops where they are first used, half a minute each: here, once, and not inside a test.
$(OPS): $(SETUP) tests/support/ops.py
	@$(needs_compiler)
	@mkdir -p .cache
	@$(install_packages)
	@echo "setup: DeepSpeed's C++ ops (three minutes at first)"
	@$(PY) -m tests.support.ops
	@touch $@

# The accelerator that the tests simulate: a backend of torch.
$(SIM): $(SETUP) tests/support/accelerator/build.py $(wildcard tests/support/accelerator/*.h tests/support/accelerator/*.cpp)
	@$(needs_compiler)
	@mkdir -p .cache
	@echo "setup: the simulated accelerator (a minute)"
	@$(PY) tests/support/accelerator/build.py
	@touch $@

# The two that its engines use.
$(DEMO_OPS): $(SETUP) tests/support/ops.py
	@$(needs_compiler)
	@mkdir -p .cache
	@echo "setup: two of DeepSpeed's C++ ops (a minute at first)"
	@$(PY) -m tests.support.ops shm_comm fused_adam
	@touch $@

define needs_compiler
command -v $${CXX:-c++} >/dev/null || { echo "setup: needs a C++ compiler, such as Debian's g++"; exit 1; }; \
$(PY) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || \
    { echo "setup: needs Python's headers, such as Debian's python3-dev"; exit 1; }
endef

# An older DeepSpeed lies beside .venv, in front of the one there, and so do its ops.
with_version = PYTHONPATH=$(CURDIR)/.cache/versions/$*/site TORCH_EXTENSIONS_DIR=$(CURDIR)/.cache/versions/$*/ops
$(OLDER:%=.cache/versions/%/stamp): .cache/versions/%/stamp: $(SETUP)
	@echo "setup: DeepSpeed $* (three minutes)"
	@rm -rf $(@D)
	@env -u PIP_CONSTRAINT $(PIP) install --no-deps --no-build-isolation --target $(@D)/site deepspeed==$*
	@$(with_version) $(PY) -c 'import importlib.metadata; assert importlib.metadata.version("deepspeed") == "$*"'
	@$(with_version) $(PY) -m tests.support.ops
	@touch $@

$(FUZZER): $(SETUP)
	@$(PIP) install --no-build-isolation --editable '.[fuzz]'
	@touch $@

$(DOCS): $(SETUP)
	@$(PIP) install --no-build-isolation --editable '.[docs]'
	@touch $@

$(BROWSER): $(SETUP)
	@$(PIP) install --no-build-isolation --editable '.[browser,report]'
	@touch $@

$(PLOTS): $(SETUP)
	@$(PIP) install --no-build-isolation --editable '.[bench]'
	@touch $@

# Each serves some tests alone, so its absence stops nothing. To mount an XFS takes root.
has_libaio := echo '\#include <libaio.h>' | $${CXX:-c++} -E -x c++ - >/dev/null 2>&1
has_xfs := { [ "$$(id -u)" != 0 ] || command -v mkfs.xfs >/dev/null; }
define install_missing
if [ -n "$$missing" ]; then \
    sudo=; [ "$$(id -u)" = 0 ] || sudo="sudo -n"; \
    echo "setup: Debian's$$missing, for $$what"; \
    { $$sudo apt-get update; for package in $$missing; do \
        DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y --no-install-recommends $$package; \
    done; } </dev/null >.cache/packages.log 2>&1 || true; \
fi
endef
define install_browser
missing=; \
command -v chromium >/dev/null || missing="$$missing chromium"; \
command -v chromedriver >/dev/null || missing="$$missing chromium-driver"; \
what="tests of the page of zckpt report"; $(install_missing)
endef
define install_packages
missing=; \
$(has_libaio) || missing="$$missing libaio-dev"; \
$(has_xfs) || missing="$$missing xfsprogs"; \
what="tests of NVMe offload and of files that share pages"; $(install_missing); \
$(has_libaio) || echo "setup: no libaio (install libaio-dev): what needs NVMe offload will be skipped"; \
$(has_xfs) || echo "setup: no mkfs.xfs (install xfsprogs): the tests of files that share pages will be skipped"
endef
