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
	@echo 'make bench-recovery  measure how long a death and a newcomer take (5 minutes)'
	@echo 'make bench-overhead  measure the cost of exactly-once in a run without deaths (15 minutes)'
	@echo 'make bench-codec     measure the speed of the codecs (2 minutes)'
	@echo 'make bench-all-reduce measure all-reduces beside gloo and hivemind (20 minutes)'
	@echo 'make bench-all-reduce-links measure all-reduces over emulated links and in virtual time (10 minutes; root)'
	@echo 'make bench-links     measure the share of its speed that a swarm keeps over links (17 minutes; root)'
	@echo 'make bench-transport measure throughput over long, full and lossy links (13 minutes; root)'
	@echo 'make bench-convergence DATA=TEXT  measure the effect of codecs on the loss (19 minutes)'
	@echo 'make bench-workers DATA=TEXT  measure what workers that sync now and then do to the loss (10 minutes)'
	@echo 'make bench-syncs  measure bytes and speed of such workers over links, beside hivemind (15 minutes; root)'
	@echo 'make bench-staleness DATA=TEXT  measure what delayed updates do to AdamW and Muon (20 minutes)'
	@echo 'make bench-subspace DATA=TEXT  measure the effect of subspace boundaries on the loss (20 minutes)'
	@echo 'make bench-prepare   measure the preparation of data beside datasets (30 minutes)'
	@echo 'make bench-swap      measure training with a third of its memory, beside DeepSpeed (15 minutes)'
	@echo 'make bench-island    measure a peer of two workers beside DDP, FSDP2 and tensor parallelism (11 minutes)'
	@echo 'make bench-generate  measure the generation of text beside transformers (4 minutes)'
	@echo 'make bench-chunks    measure downloads of a file from several peers (10 minutes; root)'
	@echo 'make bench-span-choice measure spans that the coordinator chooses, over links (15 minutes; root)'
	@echo 'make bench-placement compare placements of 64 devices with DT-FM (3 minutes)'
	@echo 'make bench-watching  measure the cost of status and metrics (4 minutes)'
	@echo 'make bench-hostile   measure a run under hostile connections (4 minutes)'
	@echo 'make bench-schedules compare pipeline schedules over slow links (1 minute)'
	@echo 'make bench-spans     compare one stage at each peer with all of them, swapped (1 minute)'
	@echo 'make bench-routing   compare ways of routing to replicas of different speeds (1 minute)'
	@echo 'make bench-uneven    measure a swarm of peers of different speeds (7 minutes)'
	@echo 'make bench-storm     measure many simultaneous newcomers (2 minutes)'
	@echo 'make bench-rebalance measure placement in a spot fleet against the optimum (10 minutes)'
	@echo 'make bench-scale     measure control traffic with 100, 1,000 and 10,000 peers (20 minutes)'
	@echo 'make fuzz SECONDS=N  fuzz each decoder for so long (an hour in all unless told otherwise); a nightly compiler'
	@echo 'make soak SECONDS=N  run swarms with faults and demos with deaths for so long'
	@echo 'make drill SECONDS=N break machines, cables and disks of a swarm for so long (root)'
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

bench-smoke: programs
	@scripts/setup.sh --tests
	.venv/bin/python bench/smoke.py --programs $(programs)

bench:
	@scripts/setup.sh --tests
	bench/run.sh

bench-recovery: build
	@scripts/setup.sh --tests
	.venv/bin/python bench/recovery.py --shoal target/release/shoal

bench-overhead: build
	@scripts/setup.sh --tests
	cargo build --release -p shoal-node --example bare_driver
	.venv/bin/python bench/overhead.py --shoal target/release/shoal \
		--bare target/release/examples/bare_driver

# The folder of libraries that Shoal is compared with and that no test needs.
peers := bench/results/tools/peers
bench-codec: setup
	@scripts/setup.sh --tests
	cargo build --release -p shoal-protocol --example codec_speed
	.venv/bin/python -m pip install --quiet --no-deps --target $(peers) --upgrade bitsandbytes==0.50.2
	.venv/bin/python bench/codec.py --codec-speed target/release/examples/codec_speed --peers $(peers)

hivemind := bench/results/tools/hivemind
bench-all-reduce: build
	@scripts/setup.sh --tests
	scripts/install-hivemind.sh $(hivemind)
	cargo build --release -p shoal-protocol --features net --example transport_speed
	cargo build --release -p shoal-engine --example round_speed
	.venv/bin/python bench/all_reduce.py --shoal target/release/shoal --hivemind $(hivemind) \
		--speed target/release/examples/transport_speed \
		--arithmetic target/release/examples/round_speed

bench-all-reduce-links: build
	@scripts/setup.sh --tests
	cargo run --release -p shoal-scheduler --example all_reduce
	cargo build --release -p shoal-tests --example emulated_network
	.venv/bin/python bench/all_reduce.py --shoal target/release/shoal \
		--network target/release/examples/emulated_network

bench-links: build
	@scripts/setup.sh --tests
	cargo build --release -p shoal-tests --example emulated_network
	.venv/bin/python bench/links.py --shoal target/release/shoal \
		--network target/release/examples/emulated_network

bench-syncs: build
	@scripts/setup.sh --tests
	scripts/install-hivemind.sh $(hivemind)
	cargo build --release -p shoal-tests --example emulated_network
	.venv/bin/python bench/syncs.py --shoal target/release/shoal --hivemind $(hivemind) \
		--network target/release/examples/emulated_network

bench-span-choice: build
	@scripts/setup.sh --tests
	cargo build --release -p shoal-tests --example emulated_network
	.venv/bin/python bench/span_choice.py --shoal target/release/shoal \
		--network target/release/examples/emulated_network

bench-transport:
	cargo build --release -p shoal-protocol --features net --example transport_speed --example plain_speed
	cargo build --release -p shoal-tests --example emulated_network
	python3 bench/transport.py --speed target/release/examples/transport_speed \
		--plain target/release/examples/plain_speed \
		--network target/release/examples/emulated_network

torchft := bench/results/tools/torchft
bench-chunks:
	@scripts/setup.sh --tests
	cargo build --release -p shoal-protocol --features net --example chunk_speed --example plain_speed
	cargo build --release -p shoal-tests --example emulated_network
	-.venv/bin/python -m pip install --quiet --no-deps --target $(torchft) --upgrade torchft==0.2.0
	-.venv/bin/python -m pip install --quiet --target $(torchft) --upgrade opentelemetry-exporter-otlp-proto-http==1.39.0
	.venv/bin/python bench/chunks.py --speed target/release/examples/chunk_speed \
		--plain target/release/examples/plain_speed \
		--network target/release/examples/emulated_network --torchft $(torchft)

bench-convergence: build
	@scripts/setup.sh --tests
	.venv/bin/python bench/convergence.py --shoal target/release/shoal --data $(DATA) \
		--plot docs/benchmarks/convergence.svg

bench-workers: build
	@scripts/setup.sh --tests
	.venv/bin/python bench/workers.py --shoal target/release/shoal --data $(DATA) --plot docs/benchmarks/workers.svg

# The second text is this project's own.
bench-staleness: build
	@scripts/setup.sh --tests
	bench/text.sh target/generated/bench-text
	.venv/bin/python bench/staleness.py --shoal target/release/shoal --data $(DATA) \
		--data target/generated/bench-text --plot docs/benchmarks/staleness.svg

bench-subspace: build
	@scripts/setup.sh --tests
	.venv/bin/python bench/subspace.py --shoal target/release/shoal --data $(DATA)

datasets := bench/results/tools/datasets
smollm2 := bench/results/tools/smollm2
bench-prepare: build
	@scripts/setup.sh --tests
	.venv/bin/python -m pip install --quiet --target $(datasets) --upgrade datasets==5.2.0
	-.venv/bin/python scripts/check_real/fixtures.py bench/results/tools/real $(smollm2)
	.venv/bin/python bench/prepare.py --shoal target/release/shoal --datasets $(datasets) --tokenizer $(smollm2)

# DeepSpeed compiles its reads and writes of the disk when it first runs: ninja, a C++ compiler, libaio-dev.
deepspeed := bench/results/tools/deepspeed
bench-swap: build
	@scripts/setup.sh --tests
	-.venv/bin/python -m pip install --quiet --target $(deepspeed) --upgrade --no-deps deepspeed==0.19.8 \
		hjson==3.1.0 ninja py-cpuinfo msgpack einops psutil pydantic pydantic_core==2.50.5 annotated-types typing-inspection
	.venv/bin/python bench/swap.py --shoal target/release/shoal --peers $(deepspeed)

# The text of both sides.
island_text := bench/results/tools/text.txt
bench-island: build
	@scripts/setup.sh --tests
	bench/text.sh $(island_text)
	.venv/bin/python bench/island.py --shoal target/release/shoal --text $(island_text)

bench-generate: setup
	@scripts/setup.sh --tests
	cargo build --release -p shoal-engine --example generate_speed
	.venv/bin/python bench/generate.py --generate-speed target/release/examples/generate_speed

bench-placement:
	cargo run --release -p shoal-scheduler --example placement

bench-watching: build
	@scripts/setup.sh --tests
	.venv/bin/python bench/watching.py --shoal target/release/shoal

bench-hostile: build
	@scripts/setup.sh --tests
	cargo build --release -p shoal-protocol --features net --example hostile
	.venv/bin/python bench/hostile.py --shoal target/release/shoal \
		--hostile target/release/examples/hostile

bench-schedules:
	cargo run --release -p shoal-scheduler --example schedules

bench-spans:
	cargo run --release -p shoal-scheduler --example swapping -- docs/benchmarks/swapping.svg

screenshots: build
	python3 scripts/screenshots.py --shoal target/release/shoal

bench-routing:
	cargo run --release -p shoal-scheduler --example routing

bench-uneven: build
	@scripts/setup.sh --tests
	cargo build --release -p shoal-scheduler --example uneven
	.venv/bin/python bench/uneven.py --shoal target/release/shoal \
		--simulator target/release/examples/uneven

bench-storm: build
	@scripts/setup.sh --tests
	cargo run --release -p shoal-scheduler --example storm
	.venv/bin/python bench/storm.py --shoal target/release/shoal

bench-rebalance:
	cargo run --release -p shoal-scheduler --example rebalance

bench-scale:
	cargo run --release -p shoal-scheduler --example scale

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

.PHONY: help setup build wheel demo test programs test-system test-deployment bench-smoke bench bench-recovery \
	bench-overhead bench-codec bench-all-reduce bench-all-reduce-links bench-links bench-transport bench-chunks \
	bench-convergence bench-workers bench-syncs bench-span-choice bench-staleness bench-subspace bench-prepare bench-swap bench-island bench-spans bench-generate bench-placement bench-watching bench-hostile bench-schedules bench-routing \
	bench-uneven bench-storm bench-rebalance bench-scale screenshots fuzz soak drill lint check-gpu gpu-kit test-gpu-kit check-real
