"""All benchmarks: what each runs, from which programs, beside which other libraries.

In the arguments `{shoal}` and the other names of `PROGRAMS` stand for built programs, those of `LIBRARIES` for folders of
other libraries, and these for places: `{text}` is a text, `{data}` the one that the user gives,
`{plots}` the folder of the pictures in the docs.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Program:
    """A binary or an example that cargo builds."""

    package: str
    name: str
    features: str = ""

    @property
    def is_binary(self):
        return self.name == "shoal"


NET = "net"
PROGRAMS = {
    "shoal": Program("shoal-node", "shoal"),
    "bare": Program("shoal-node", "bare_driver"),
    "network": Program("shoal-tests", "emulated_network"),
    "codec": Program("shoal-protocol", "codec_speed", NET),
    "speed": Program("shoal-protocol", "transport_speed", NET),
    "plain": Program("shoal-protocol", "plain_speed", NET),
    "chunk_speed": Program("shoal-protocol", "chunk_speed", NET),
    "hostile": Program("shoal-protocol", "hostile", NET),
    "arithmetic": Program("shoal-engine", "round_speed"),
    "trains": Program("shoal-engine", "train_rounds"),
    "generate_speed": Program("shoal-engine", "generate_speed"),
    **{name: Program("shoal-scheduler", name) for name in (
        "all_reduce", "placement", "schedules", "swapping", "routing", "uneven", "storm", "rebalance", "scale",
        "audits")},
}


@dataclasses.dataclass(frozen=True)
class Library:
    """What Shoal is compared with and no test needs, in a folder of its own."""

    # The arguments of each `pip install`.
    pip: tuple = ()
    # What fills the folder, its last argument, instead.
    script: str = ""
    # Whether a smoke test leaves it out: a large download.
    is_large: bool = False
    # Whether the benchmark is worth running without it.
    is_optional: bool = True


LIBRARIES = {
    "bitsandbytes": Library(("--no-deps bitsandbytes==0.50.2",)),
    "hivemind": Library(script="scripts/install-hivemind.sh", is_large=True, is_optional=False),
    "torchft": Library(("--no-deps torchft==0.2.0", "opentelemetry-exporter-otlp-proto-http==1.39.0"), is_large=True),
    "datasets": Library(("datasets==5.2.0",), is_optional=False),
    # It compiles its reads and writes of the disk when it first runs: ninja, a C++ compiler, libaio-dev.
    "deepspeed": Library(
        ("--no-deps deepspeed==0.19.8 hjson==3.1.0 ninja py-cpuinfo msgpack einops psutil pydantic pydantic_core==2.50.5 "
         "annotated-types typing-inspection",), is_large=True),
    "smollm2": Library(script=".venv/bin/python scripts/check_real/fixtures.py bench/results/tools/real", is_large=True),
}


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Commands that measure one thing. The first word of each is a script of this folder or a program's name."""

    name: str
    # For the list, with the time that it takes.
    about: str
    commands: tuple
    # Those of a smoke test, where they differ.
    smoke: tuple = ()
    needs_links: bool = False
    needs_text: bool = False


SHOAL = "--shoal {shoal}"
NETWORK = "--network {network}"

BENCHMARKS = [
    Benchmark(
        "all", "Shoal beside PyTorch: processes, swarm, traffic, memory, data plane (at most 15 minutes)",
        (f"bench.py {SHOAL} --train-rounds {{trains}} --preload {{preload}} --text {{text}} --codec-speed {{codec}} "
         "--speed {speed} --plain {plain} --arithmetic {arithmetic}",)),
    Benchmark("mixture", "a mixture of experts beside transformers (8 minutes; 17 GB of memory)",
              ("mixture.py --train-rounds {trains} --text {text}",)),
    Benchmark("mixture-round", "the bytes of a round of a mixture beside those of a dense model (1 minute)",
              (f"mixture_round.py {SHOAL}",)),
    Benchmark("recovery", "how long a death and a newcomer take (5 minutes)", (f"recovery.py {SHOAL}",)),
    Benchmark("overhead", "the cost of exactly-once in a run without deaths (15 minutes)",
              (f"overhead.py {SHOAL} --bare {{bare}}",)),
    Benchmark("documents", "attention over packed documents, by document, masked and padded (3 minutes)",
              ("documents.py",)),
    Benchmark("codec", "the speed of the codecs (2 minutes)",
              ("codec.py --codec-speed {codec} --peers {bitsandbytes}",)),
    Benchmark("all-reduce", "all-reduces beside gloo and hivemind (20 minutes)",
              (f"all_reduce.py {SHOAL} --hivemind {{hivemind}} --speed {{speed}} --arithmetic {{arithmetic}}",),
              smoke=(f"all_reduce.py {SHOAL} --speed {{speed}} --arithmetic {{arithmetic}}",)),
    Benchmark("all-reduce-links", "all-reduces over emulated links and in virtual time (10 minutes; root)",
              ("all_reduce", f"all_reduce.py {SHOAL} {NETWORK}"),
              smoke=("all_reduce 10", f"all_reduce.py {SHOAL} {NETWORK}"), needs_links=True),
    Benchmark("links", "the share of its speed that a swarm keeps over links (17 minutes; root)",
              (f"links.py {SHOAL} {NETWORK}",), needs_links=True),
    Benchmark("split", "gradients that are sent before those of weights are computed (15 minutes; root)",
              (f"split.py {SHOAL} {NETWORK} --text {{text}}",), needs_links=True),
    Benchmark("transport", "throughput over long, full and lossy links (13 minutes; root)",
              (f"transport.py --speed {{speed}} --plain {{plain}} {NETWORK}",), needs_links=True),
    Benchmark("convergence", "the effect of codecs on the loss (19 minutes; DATA=TEXT)",
              (f"convergence.py {SHOAL} --data {{data}} --plot {{plots}}/convergence.svg",), needs_text=True),
    Benchmark("subspace", "the effect of subspace boundaries on the loss (20 minutes; DATA=TEXT)",
              (f"subspace.py {SHOAL} --data {{data}}",), needs_text=True),
    Benchmark("workers", "what workers that sync now and then do to the loss (10 minutes; DATA=TEXT)",
              (f"workers.py {SHOAL} --data {{data}} --plot {{plots}}/workers.svg",), needs_text=True),
    Benchmark("syncs", "bytes and speed of such workers over links, beside hivemind (15 minutes; root)",
              (f"syncs.py {SHOAL} --hivemind {{hivemind}} {NETWORK}",), smoke=(f"syncs.py {SHOAL} {NETWORK}",),
              needs_links=True),
    Benchmark("span-choice", "spans that the coordinator chooses, over links (15 minutes; root)",
              (f"span_choice.py {SHOAL} {NETWORK}",), needs_links=True),
    Benchmark("staleness", "what delayed updates do to AdamW and Muon (20 minutes; DATA=TEXT)",
              (f"staleness.py {SHOAL} --data {{data}} --data {{text}} --plot {{plots}}/staleness.svg",),
              smoke=(f"staleness.py {SHOAL} --data {{data}} --plot {{plots}}/staleness.svg",), needs_text=True),
    Benchmark("prepare", "the preparation of data beside datasets (30 minutes)",
              (f"prepare.py {SHOAL} --datasets {{datasets}} --tokenizer {{smollm2}}",),
              smoke=(f"prepare.py {SHOAL} --datasets {{datasets}}",)),
    Benchmark("swap", "training with a third of its memory, beside DeepSpeed (15 minutes)",
              (f"swap.py {SHOAL} --peers {{deepspeed}}",), smoke=(f"swap.py {SHOAL}",)),
    Benchmark("island", "a peer of two workers beside DDP, FSDP2 and tensor parallelism (11 minutes)",
              (f"island.py {SHOAL} --text {{text}}",)),
    Benchmark("generate", "the generation of text beside transformers (4 minutes)",
              ("generate.py --generate-speed {generate_speed}",)),
    Benchmark("chunks", "downloads of a file from several peers (10 minutes; root)",
              (f"chunks.py --speed {{chunk_speed}} --plain {{plain}} {NETWORK} --torchft {{torchft}}",),
              smoke=(f"chunks.py --speed {{chunk_speed}} --plain {{plain}} {NETWORK}",), needs_links=True),
    Benchmark("placement", "placements of 64 devices beside DT-FM (3 minutes)", ("placement",),
              smoke=("placement 1 1 1",)),
    Benchmark("watching", "the cost of status and metrics (4 minutes)", (f"watching.py {SHOAL}",)),
    Benchmark("hostile", "a run under hostile connections (4 minutes)",
              (f"hostile.py {SHOAL} --hostile {{hostile}}",)),
    Benchmark("schedules", "pipeline schedules over slow links (1 minute)", ("schedules",)),
    Benchmark("spans", "one stage at each peer beside all of them, swapped (1 minute)",
              ("swapping {plots}/swapping.svg",)),
    Benchmark("routing", "ways of routing to replicas of different speeds (1 minute)", ("routing",),
              smoke=("routing 1",)),
    Benchmark("uneven", "a swarm of peers of different speeds (7 minutes)",
              (f"uneven.py {SHOAL} --simulator {{uneven}}",)),
    Benchmark("storm", "many simultaneous newcomers (2 minutes)", ("storm", f"storm.py {SHOAL}"),
              smoke=("storm 10", f"storm.py {SHOAL}")),
    Benchmark("audit", "the cost of audits, in the simulator (1 minute)", ("audits",)),
    Benchmark("rebalance", "placement in a spot fleet beside the optimum (10 minutes)", ("rebalance",),
              smoke=("rebalance 1 1 16 g4dn",)),
    Benchmark("scale", "control traffic with 100, 1,000 and 10,000 peers (20 minutes)", ("scale",),
              smoke=("scale 50 --until 130",)),
]
