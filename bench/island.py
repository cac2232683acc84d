"""Measures one peer of two workers (`--device cpu:2`), with microbatches of their own or a slice of each, beside the other
ways to train one model on two cores.

    make bench-island
    .venv/bin/python bench/island.py --shoal target/release/shoal --text FILE

Shoal has one process with two workers, with one worker of two threads or of one, and two peers that are replicas of
the whole model; in a run of two slices, one process with two workers or one; and, in a run of two stages, one process whose
two workers have a stage each (`--pipeline`), and two such peers. PyTorch has two processes over
gloo: DistributedDataParallel and FSDP2 with gradients summed over a rank's microbatches and reduced once a step, and
tensor parallelism, which reduces in every layer. All train the same model on the same text, with the same
microbatches, global clipping and AdamW. The benchmark fails if Shoal's checkpoint depends on the number of workers or
peers. At the end it prints the peak memory of one process with several workers.
"""

import argparse
import os
import statistics
import sys

import machine as machines
import table
from model import MEDIUM, SMALL
from shoal_run import SKIPPED_STEPS, Shoal
from sizes import size
from worker import TrainingFailed, closing, ratio, start_ranks, take_turns

# Two cores.
PROCESSES = 2
DTYPE = "f32"
# Of each number of microbatches a table.
MICROBATCHES = size((4, 16), (4,))
STEPS = size(6, 1)
ROUNDS = size(3, 1)
WORKERS_OF_PEAKS = size((1, 2, 4), (1, 2))
WORKERS = "Shoal, 1 process, 2 workers x 1 thread (cpu:2)"
THREADS = "Shoal, 1 process, 1 worker x 2 threads"
ONE = "Shoal, 1 process, 1 worker x 1 thread"
PEERS = "Shoal, 2 peers x 1 thread, each with the whole model"
SLICED = "Shoal, 1 process, 2 workers x 1 thread, with a slice each"
BOTH_SLICES = "Shoal, 1 process, 1 worker x 1 thread, with both slices"
PIPELINE = "Shoal, 1 process, 2 workers x 1 thread, with a stage each"
STAGES = "Shoal, 2 peers x 1 thread, with a stage each"
STRATEGIES = {
    "DDP": "PyTorch DDP, 2 processes x 1 thread",
    "FSDP2": "PyTorch FSDP2, 2 processes x 1 thread",
    "TP": "PyTorch tensor parallelism, 2 processes x 1 thread",
}
# Who is compared with whom.
TABLES = {
    WORKERS: [THREADS, ONE, PEERS, *STRATEGIES.values()],
    SLICED: [BOTH_SLICES, STRATEGIES["TP"]],
    PIPELINE: [STAGES],
}
# Beside those with a worker or a process for each core there is this goal.
LEAST = 1.0
GOALS = {PEERS, STAGES, *STRATEGIES.values()}
# Those whose passes have one thread give the same checkpoint, which depends on the slices.
ALIKE = ((WORKERS, ONE, PEERS), (SLICED, BOTH_SLICES), (PIPELINE, STAGES))
# Initial weights are random, so the first losses are about the same: nats per token.
LARGEST_GAP = 0.1


class Contest:
    """All contenders with one number of microbatches. `failures` says of contenders why they cannot train."""

    def __init__(self, options, ranks, failures, microbatches):
        self.plain = Shoal(options.shoal, text=options.text)
        self.several = Shoal(options.shoal, device=f"cpu:{PROCESSES}", text=options.text)
        self.ranks, self.failures, self.microbatches = ranks, failures, microbatches
        # By the contender: the loss of its first step, and its last checkpoint.
        self.losses, self.hashes = {}, {}

    def contenders(self):
        """Those that train here, each as a function that gives tokens per second. PyTorch's are warm."""
        run = {"dtype": DTYPE, "stages": 1, "microbatches": self.microbatches, "steps": SKIPPED_STEPS + STEPS}
        staged = run | {"stages": PROCESSES}
        runs = {
            WORKERS: lambda: self.several.local(SMALL, PROCESSES, **run),
            THREADS: lambda: self.plain.local(SMALL, PROCESSES, **run),
            ONE: lambda: self.plain.local(SMALL, 1, **run),
            PEERS: lambda: self.plain.swarm(SMALL, replicas=PROCESSES, **run),
            SLICED: lambda: self.several.local(SMALL, PROCESSES, slices=PROCESSES, **run),
            BOTH_SLICES: lambda: self.plain.local(SMALL, 1, slices=PROCESSES, **run),
            PIPELINE: lambda: self.several.local(SMALL, PROCESSES, ["--pipeline"], **staged),
            STAGES: lambda: self.plain.swarm(SMALL, **staged),
        }
        contenders = {name: lambda name=name: self.rate_of_shoal(name, runs[name]()) for name in runs}
        for strategy, name in STRATEGIES.items():
            if name in self.failures:
                continue
            try:
                self.losses[name] = self.ask(strategy, 1)["loss"]
                self.ask(strategy, SKIPPED_STEPS)
            except TrainingFailed as failure:
                self.failures[name] = str(failure)
                continue
            contenders[name] = lambda strategy=strategy: self.rate_of_torch(strategy)
        return contenders

    def rate_of_shoal(self, name, outcome):
        self.losses[name], self.hashes[name] = outcome.first_loss, outcome.checkpoint_hash
        return outcome.rate()

    def rate_of_torch(self, strategy):
        answer = self.ask(strategy, STEPS)
        return answer["tokens"] / answer["seconds"]

    def ask(self, strategy, steps):
        order = {"strategy": strategy, "microbatches": self.microbatches, "dtype": DTYPE}
        return self.ranks[strategy].ask(**order, steps=steps)

    def check(self):
        """Ends the benchmark if checkpoints or first losses show that contenders train another model."""
        for names in ALIKE:
            hashes = {name: self.hashes[name] for name in names}
            if len(set(hashes.values())) != 1:
                raise SystemExit(f"the checkpoints differ: {hashes}")
        if max(self.losses.values()) - min(self.losses.values()) > LARGEST_GAP:
            raise SystemExit(f"the losses of the first step differ by more than {LARGEST_GAP}: {self.losses}")


def report(contest, results, machine):
    losses = contest.losses.values()
    notes = (
        f"{SMALL.describe()}, in {contest.microbatches} microbatches; {DTYPE}. {machine}, MKL's stock dispatch in all. "
        f"Tokens per second, median of {len(results[WORKERS])} alternated rounds of {STEPS} steps; the ratio is the "
        "median of the rounds' ratios. Peers are connected by QUIC on loopback, PyTorch's processes by gloo. Shoal's "
        "checkpoint is the same with two workers, one worker of one thread, and two peers, that of slices with two "
        f"workers and one, and that of two stages with two workers and two peers. Losses of the first step: {min(losses):.3f} to {max(losses):.3f}."
    )
    for ours, others in TABLES.items():
        table.show(
            f"{ours}: {contest.microbatches} microbatches a step", notes,
            ["contender", "tokens/s", "the first to it", "goal"],
            [row(contest, results, ours, name) for name in [ours, *others]],
        )


def row(contest, results, ours, name):
    if name not in results:
        return [name, f"does not train here: {contest.failures[name]}", "", ""]
    rates = results[name]
    gain = ratio(results[ours], rates)
    goal = table.goal(gain, LEAST) if name in GOALS else ""
    return [name, table.rate(statistics.median(rates)), table.times(gain), goal]


def report_peaks(options, machine):
    """The peak memory of one process, by its workers."""
    slices = max(WORKERS_OF_PEAKS)
    kinds = {"f32": {"dtype": "f32"}, f"bf16, {slices} slices": {"dtype": "bf16", "slices": slices}}
    rows = []
    for workers in WORKERS_OF_PEAKS:
        shoal = Shoal(options.shoal, device=f"cpu:{workers}", text=options.text)
        run = {"stages": 1, "microbatches": max(MICROBATCHES), "steps": 2}
        peaks = [shoal.local(MEDIUM, workers, **kind, **run).peak[0] for kind in kinds.values()]
        rows.append([f"{workers}", *(f"{peak / 2**20:,.0f} MiB" for peak in peaks)])
    notes = f"{MEDIUM.describe()}, in {max(MICROBATCHES)} microbatches; workers of one thread. {machine}."
    table.show("Peak memory of one process", notes, ["workers", *kinds], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--text", required=True, help="the text to train on")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="alternated rounds of each table")
    options = parser.parse_args()
    options.text = os.path.abspath(options.text)
    # PyTorch has MKL's stock dispatch.
    os.environ["SHOAL_MKL_AVX512"] = "0"
    machine = machines.line(machines.describe(sys.executable))
    started = {name: start_ranks("torch_parallel.py", SMALL, options.text, PROCESSES) for name in STRATEGIES}
    with closing([worker for workers in started.values() for worker in workers]):
        ranks, failures = {name: workers[0] for name, workers in started.items()}, {}
        for microbatches in MICROBATCHES:
            contest = Contest(options, ranks, failures, microbatches)
            results = take_turns(contest.contenders(), options.rounds)
            contest.check()
            report(contest, results, machine)
    report_peaks(options, machine)


if __name__ == "__main__":
    main()
