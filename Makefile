# Everything starts with the set-up, which does nothing where it is done.
# rustup puts cargo here; a shell that was open before does not know yet.
export PATH := $(PATH):$(HOME)/.cargo/bin

help:
	@echo 'make demo       train a small model with a swarm of processes on this machine, and show it'
	@echo 'make test       run every test'
	@echo 'make test-system  and those of what is around it: routers, Prometheus, docker, a browser (each where it can run)'
	@echo 'make build      build target/release/shoal'
	@echo 'make bench      measure Shoal beside PyTorch (at most 15 minutes)'
	@echo 'make bench-recovery  how long a death and a newcomer take (5 minutes)'
	@echo 'make bench-overhead  what exactly-once costs when nothing dies (15 minutes)'
	@echo 'make bench-codec     how fast numbers are rounded for a link (2 minutes)'
	@echo 'make bench-all-reduce how fast replicas add up gradients, beside gloo and hivemind (20 minutes)'
	@echo 'make bench-all-reduce-links the same over emulated links, beside gloo, and in virtual time (10 minutes; root)'
	@echo 'make bench-links     what a swarm keeps of its speed over links (17 minutes; root)'
	@echo 'make bench-transport how fast long, full and lossy links are filled (13 minutes; root)'
	@echo 'make bench-convergence DATA=TEXT  what that rounding, and compressing, does to training (19 minutes)'
	@echo 'make bench-chunks    how fast a file comes from those who have it (10 minutes; root)'
	@echo 'make bench-placement where a model puts 64 devices, beside DT-FM (3 minutes)'
	@echo 'make bench-watching  what being watched costs a swarm (4 minutes)'
	@echo 'make bench-hostile   what a run keeps of its speed with strangers at its doors (4 minutes)'
	@echo 'make bench-schedules what orders of passes keep of engines over slow links (1 minute)'
	@echo 'make bench-routing   what unlike replicas keep of their speeds together (1 minute)'
	@echo 'make bench-uneven    what a swarm of unlike peers keeps of their speeds (7 minutes)'
	@echo 'make bench-storm     what a crowd of newcomers costs (2 minutes)'
	@echo 'make bench-rebalance what a spot fleet keeps of the best placement (10 minutes)'
	@echo 'make bench-scale     what words weigh in swarms of 100, 1,000 and 10,000 peers (20 minutes)'
	@echo 'make fuzz SECONDS=N  look for bytes that break a decoder, for so long each (an hour); a nightly compiler'
	@echo 'make soak SECONDS=N  look for failures for so long: faulty swarms, demos with deaths'
	@echo 'make screenshots     pictures of a run that is watched (3 minutes; Chromium, tmux)'
	@echo 'make lint       formatting, clippy, and what we depend on'
	@echo 'make check-gpu  the checks that need an NVIDIA GPU'

setup:
	@scripts/setup.sh

build: setup
	cargo build --release -p shoal-node
	scripts/split-debug.sh target/release/shoal

demo: build
	target/release/shoal demo --out demo

# The whole-swarm tests start the binary that the first line builds.
test:
	@scripts/setup.sh --tests
	cargo build --workspace
	cargo test --workspace

kubernetes := $(CURDIR)/bench/results/tools/kubernetes
# What wants root, routers, Prometheus, docker or a browser: each check says why it does not run where it cannot.
test-system: build
	@scripts/setup.sh --tests
	cargo test -p shoal-tests --test netns --test nat --test monitoring -- --nocapture
	-.venv/bin/python -m pip install --quiet --target $(kubernetes) --upgrade kubernetes-validate==1.37.0
	PYTHONPATH=$(kubernetes) docker/check.sh .venv/bin/python
	docker/try.sh
	scripts/newcomer.sh
	python3 scripts/screenshots.py --shoal target/release/shoal --out target/screenshots

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

# What is measured beside Shoal, apart from what tests need.
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
		--plot docs/convergence.svg

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

# Two minutes for each decoder unless told otherwise.
fuzz: SECONDS := $(if $(filter command line environment,$(origin SECONDS)),$(SECONDS),120)
fuzz:
	scripts/fuzz.sh $(SECONDS)

lint:
	@scripts/setup.sh --lint
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	scripts/check-imports.py
	scripts/check-dependencies.sh

check-gpu:
	scripts/check-gpu.sh

.PHONY: help setup build demo test test-system bench bench-recovery bench-overhead bench-codec \
	bench-all-reduce bench-all-reduce-links bench-links bench-transport bench-chunks bench-convergence bench-placement \
	bench-watching bench-hostile bench-schedules bench-routing bench-uneven bench-storm bench-rebalance bench-scale screenshots fuzz soak lint check-gpu
