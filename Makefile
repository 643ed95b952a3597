# `make` lists the targets. CI calls the same ones.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Python 3.11 or newer, by that name or as python3.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV := .venv
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
SHIM_DIR := python/prism_core/_shim
DEMO_OUT := demo-out

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk 'BEGIN{FS=":.*?## "}{printf "  %-14s %s\n",$$1,$$2}'

$(VENV)/.tools: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, not $(PYTHON): set PYTHON=..." >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c 'import tomllib; p=tomllib.load(open("pyproject.toml","rb"))["project"]; print("\n".join(p["dependencies"]+p["optional-dependencies"]["dev"]))' > $(VENV)/.requirements
	$(PY) -m pip install --quiet --disable-pip-version-check -r $(VENV)/.requirements
	touch $@

.PHONY: build
build: $(VENV)/.tools  ## engine binding and shims, built in place (release)
	cargo build --release --locked -p prism-nccl -p prism-cuda -p prism-gpu -p prism-nvml -p prism-audit
	mkdir -p $(SHIM_DIR)
	install -m 755 target/release/libprism_nccl.so target/release/libprism_cuda.so target/release/libprism_gpu.so target/release/libprism_nvml.so target/release/libprism_audit.so $(SHIM_DIR)/
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release --locked --quiet > $(VENV)/maturin.log 2>&1 || { cat $(VENV)/maturin.log >&2; exit 1; }

.PHONY: torch
torch: $(VENV)/.torch  ## slim torch in the venv: no NVIDIA wheels, stand-in libraries instead
$(VENV)/.torch: python/prism_core/slim.py $(VENV)/.tools
	$(PY) python/prism_core/slim.py
	touch $@

.PHONY: plane
plane: $(VENV)/.plane  ## the value plane, compiled for the venv's torch (without a C++ compiler: said, and left out)
$(VENV)/.plane: python/prism_core/torch/plane.cpp python/prism_core/torch/values.py $(VENV)/.torch
	$(PY) python/prism_core/torch/values.py
	touch $@

.PHONY: programs
programs: $(VENV)/.programs  ## training programs of others for the tests, without their dependencies
$(VENV)/.programs: pyproject.toml $(VENV)/.tools | $(VENV)/.torch
	$(PY) -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml","rb"))["project"]["optional-dependencies"]["programs"]))' > $(VENV)/.programs-list
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r $(VENV)/.programs-list
	touch $@

.PHONY: dev
dev: build torch plane  ## editable build, slim torch, `prism` on .venv/bin

.PHONY: demo
demo: dev  ## the main job: an unmodified PyTorch program as ranks of an 8,192-rank world
	bash scripts/demo.sh $(BIN) $(DEMO_OUT)

# Python tests mostly start programs and wait for them: the compiler has the time between.
.PHONY: test
test: dev programs  ## all tests, no GPU
	$(MAKE) --no-print-directory --jobs=2 test-rust run-pytest

# Tests inside a library compile all of it again: without optimisation, and with checks of overflow.
# Other tests with the whole workspace, the binding included, although it has no tests of its own: with fewer packages some
# dependencies have fewer features, and the engine would be compiled on top of them once more.
.PHONY: test-rust
test-rust:  ## Rust tests
	cargo test --locked --quiet --profile unit --workspace --exclude prism-import --exclude prism-python --lib
	cargo test --locked --quiet --release --workspace --test '*' --examples
	cargo test --locked --quiet --release --workspace --doc

.PHONY: test-python
test-python: dev programs  ## Python and end-to-end tests
	$(MAKE) --no-print-directory run-pytest

# Without building: another make may be compiling.
.PHONY: run-pytest
run-pytest:
	$(PY) -m pytest

.PHONY: slicing
slicing: dev programs  ## the graph of a few ranks against that of all, for every kind of job (tens of minutes)
	$(PY) benches/slicing.py

.PHONY: bench-fidelity
bench-fidelity: dev programs  ## hybrid against all ranks real, what each part is worth, sweep against runs (an hour)
	rm -rf target/fidelity
	$(PY) benches/fidelity.py
	$(PY) benches/fidelity.py --worlds 32 --modes ddp,hsdp,pipeline
	$(PY) benches/fidelity.py --measured --modes ddp,fsdp2
	$(PY) benches/fidelity.py --megatron all --keep target/fidelity
	$(PY) benches/ablation.py --keep target/fidelity
	$(PY) benches/tuning.py

.PHONY: test-te
test-te: dev programs  ## Transformer Engine: builds it in the venv (2 GB of downloads, a long compilation) and runs its tests
	$(PY) scripts/build_te.py
	$(PY) -m pytest tests/integration/test_transformer_engine.py

.PHONY: test-ray
test-ray: dev  ## slices of a collection on a two-node Ray cluster on loopback (installs the extra `ray`, 70 MB)
	$(PY) -m pip install --quiet --disable-pip-version-check "$$($(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml","rb"))["project"]["optional-dependencies"]["ray"])')"
	$(PY) -m pytest tests/integration/test_ray.py

.PHONY: test-extras
test-extras: dev  ## tables as Parquet and pictures as PNG (installs the extras `parquet` and `plots`, some 75 MB)
	$(PY) -m pip install --quiet --disable-pip-version-check $$($(PY) -c 'import tomllib; e=tomllib.load(open("pyproject.toml","rb"))["project"]["optional-dependencies"]; print(*e["parquet"], *e["plots"])')
	$(PY) -m pytest tests/unit/test_extras.py tests/unit/test_imports.py

.PHONY: loom
loom:  ## model-check the ring under every interleaving
	RUSTFLAGS="--cfg prism_loom" cargo test --locked --release -p prism-wire --target-dir target/loom loom

.PHONY: bench
bench: dev  ## every benchmark; each asserts its answer before it is timed
	$(PY) -m pytest benches --benchmark-enable --benchmark-only
	cargo run --locked --release -p prism-wire --example roundtrip

.PHONY: lint
lint: build  ## formatting, clippy, ruff, mypy, stubtest, layering
	$(MAKE) --no-print-directory run-lint

.PHONY: run-lint
run-lint:
	cargo fmt --all --check
	cargo clippy --locked --release --workspace --all-targets -- -D warnings
	$(BIN)/ruff format --check python tests benches examples scripts
	$(BIN)/ruff check python tests benches examples scripts
	$(BIN)/mypy
	cd python && ../$(BIN)/python -m mypy.stubtest prism_core._native --ignore-missing-stub
	$(BIN)/lint-imports
	bash scripts/check_layers.sh

.PHONY: format
format:  ## rewrite to house style
	cargo fmt --all
	$(BIN)/ruff check --fix --quiet python tests benches examples scripts
	$(BIN)/ruff format python tests benches examples scripts

.PHONY: wheel
wheel: build  ## a wheel with the extension, the shims and the type stubs
	$(BIN)/maturin build --release --locked --out dist

.PHONY: check-wheel
check-wheel: build  ## the wheel by itself: new environment, empty folder (minutes, not in CI)
	bash scripts/check_wheel.sh $(abspath $(PY))

.PHONY: reference
reference: build  ## docs/reference, written anew from the code
	$(PY) scripts/cli_reference.py

.PHONY: clean
clean:  ## remove build products (not the venv)
	rm -rf target dist $(DEMO_OUT) $(SHIM_DIR)
