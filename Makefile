# Every target starts with the set-up, which does nothing once it is done.
# The folder of rustup's cargo, which a shell from before its installation does not have in its path.
export PATH := $(PATH):$(HOME)/.cargo/bin

help:
	@echo 'make demo       train a small model with several local processes and show the result'
	@echo 'make test       run the tests of all crates'
	@echo 'make test-system     run the checks that need root, Prometheus, docker or a browser, where they can run'
	@echo 'make bench-smoke     run every benchmark for seconds, to see that it works (3 minutes)'
	@echo 'make build      build target/release/shoal'
	@echo 'make wheel      build a wheel for pip in target/wheel, around target/release/shoal'
	@echo 'make bench      measure Shoal beside PyTorch (at most 15 minutes)'
	@echo 'make bench-list      print all benchmarks, each with its time: make bench-recovery and others'
	@echo 'make fuzz SECONDS=N  fuzz each decoder for so long (an hour in all unless told otherwise); a nightly compiler'
	@echo 'make soak SECONDS=N  run swarms with faults and demos with deaths for so long'
	@echo 'make drill SECONDS=N break machines, cables and disks of a swarm for so long (root)'
	@echo 'make test-image      build the image with buildah alone, and train with three peers in it (root, debootstrap)'
	@echo 'make screenshots     take pictures of a run in a browser and a terminal (3 minutes; Chromium, tmux)'
	@echo 'make lint       check formatting, clippy and dependencies'
	@echo 'make check-gpu  run the checks that need an NVIDIA GPU'
	@echo 'make gpu-kit    pack these checks into one file, for a machine without Rust and network'
	@echo 'make test-gpu-kit    run such a file on a stand-in for CUDA (3 minutes)'
	@echo 'make check-real fine-tune a real model in a swarm with deaths and compare with PyTorch (15 minutes)'

setup:
	@scripts/setup.sh

build: setup
	cargo build --release -p shoal-node
	scripts/split-debug.sh target/release/shoal

wheel: build
	python3 scripts/wheel/build.py target/release/shoal --out target/wheel

demo: build
	target/release/shoal demo --out demo

# The first line builds the binary that the tests of whole swarms start. With examples, its features are those of the
# tests' build, as both have the dev-dependencies: nothing is built twice.
# Swarms wait for half of the time, so one more test runs than there are processors.
test:
	@scripts/setup.sh --tests
	cargo build --workspace --bins --examples
	RUST_TEST_THREADS=$$(($$(nproc) + 1)) cargo test --workspace --no-fail-fast

# The profile of the programs that `test-system`, `test-deployment` and `bench-smoke` run: that of `make test`, so that
# they build nothing after it, or PROFILE=release.
PROFILE ?= dev
programs := target/$(patsubst dev,debug,$(PROFILE))

programs: setup
	cargo build --workspace --bins --examples --profile $(PROFILE)

# Checks that need root, routers, Prometheus, docker or a browser. Each prints why it is skipped where it cannot run.
# The first line is a part of `make test`.
test-system: programs
	cargo test --workspace --test machines -- --nocapture
	cargo test --workspace --test integration -- --nocapture monitoring::
	$(MAKE) test-deployment

kubernetes := $(CURDIR)/bench/results/tools/kubernetes
test-deployment: programs
	@scripts/setup.sh --tests
	-.venv/bin/python -m pip install --quiet --target $(kubernetes) --upgrade kubernetes-validate==1.37.0
	PYTHONPATH=$(kubernetes) docker/check.sh .venv/bin/python
	docker/try.sh $(programs)/shoal
	scripts/wheel/try.py "$$(scripts/wheel/build.py $(programs)/shoal --out target/wheel-of-tests)"
	scripts/newcomer.sh $(programs)/shoal
	python3 scripts/screenshots.py --shoal $(programs)/shoal --out target/screenshots

# The compiling stage of the image, without a daemon and a registry: it compiles all anew.
test-image:
	docker/try-build.sh $(PROFILE)

bench-smoke: programs
	@scripts/setup.sh --tests
	.venv/bin/python bench/run.py --smoke --programs $(programs)

# The benchmarks are in bench/registry.py. ARGS go to the benchmark: make bench ARGS='--only training'.
bench: bench-all

bench-list:
	@python3 bench/run.py --list

bench-%: setup
	@scripts/setup.sh --tests
	.venv/bin/python bench/run.py $* $(if $(DATA),--data $(DATA)) -- $(ARGS)

screenshots: build
	python3 scripts/screenshots.py --shoal target/release/shoal

SECONDS ?= 3600
soak: setup
	scripts/soak.sh $(SECONDS)

drill: setup
	scripts/drill.sh $(SECONDS)

# Two minutes for each decoder by default.
fuzz: SECONDS := $(if $(filter command line environment,$(origin SECONDS)),$(SECONDS),120)
fuzz:
	scripts/fuzz.sh $(SECONDS)

lint:
	@scripts/setup.sh --lint
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cd fuzz && RUSTFLAGS='--cfg fuzzing' CARGO_TARGET_DIR=../target/fuzz cargo check --quiet --locked --lib --bins
	scripts/check-imports.py
	scripts/check-dependencies.sh

# One file for a machine with a GPU and PyTorch, but without Rust and network: scripts/check-gpu.sh --kit FILE.
gpu-kit: build
	cargo build --release -p shoal-engine --example train_rounds
	cargo test --release -p shoal-engine --test integration --no-run
	scripts/gpu-kit.sh target/release target/gpu-kit.tar.xz

# The kit of the tests' build, on the stand-in for CUDA, so that it does not break unseen.
test-gpu-kit: programs
	@scripts/setup.sh --tests
	cargo test --workspace --no-run
	SHOAL_KIT_XZ=0 scripts/gpu-kit.sh $(programs) target/gpu-kit-trial.tar.xz
	engine/tests/stand_in/build.sh target/tmp/stand-in
	SHOAL_PYTHON=.venv/bin/python SHOAL_STAND_IN=$(CURDIR)/target/tmp/stand-in \
		scripts/check-gpu.sh --kit target/gpu-kit-trial.tar.xz target/gpu-kit-trial

check-gpu:
	scripts/check-gpu.sh

check-real: build
	@scripts/setup.sh --tests
	.venv/bin/python scripts/check_real/ids.py --shoal target/release/shoal
	.venv/bin/python scripts/check_real/check.py --shoal target/release/shoal

.PHONY: help setup build wheel demo test programs test-system test-deployment test-image bench-smoke bench bench-list screenshots \
	fuzz soak drill lint check-gpu gpu-kit test-gpu-kit check-real
