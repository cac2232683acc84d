"""Measures all-reduces of gradients on loopback: Shoal's swarm, beside gloo and hivemind.

    make bench-all-reduce
    make bench-all-reduce-links

A swarm with a single stage trains a model; every peer is a replica. The time of a step's all-reduce runs from
the end of the last microbatch until every replica holds the result. It includes packing, encryption, the proof and
the hash of the result at each replica. hivemind encrypts as well; gloo does not.

Over emulated links (root, /dev/net/tun and `ip`) every peer is on a machine of its own. The least time for
those links is that of the best shares: a member that reduces the share w of N numbers sends (1 - w) p + w (n - 1) r
bytes for each number, and receives w (n - 1) p + (1 - w) r. A number takes p bytes in a part and r in a result.
"""

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys

import emulated
import machine as machines
import table
from model import TINY, Model
from shoal_run import SKIPPED_STEPS, Shoal
from sizes import size

STEPS = size(8, 1) + SKIPPED_STEPS
# About 10 and 100 million parameters, with little computation for each.
MODELS = {
    10: size(Model(hidden=320, layers=8, heads=5, intermediate=860, context=16, batch=1), TINY),
    100: Model(hidden=1024, layers=8, heads=8, intermediate=2752, context=16, batch=1),
}
# Microbatches of a step for each peer, and the wait of each pass in milliseconds, which spreads them over all peers.
EACH, PASS = 3, 30
OURS = size(["exact", "f32", "bf16", "int8"], ["exact", "int8"])
# Compressions of hivemind, and its names for them.
THEIRS = {"f32": "NoCompression", "f16": "Float16Compression"}
# For each mode of Shoal, the mode to compare with and the wanted ratio of speeds.
GOALS = {"exact": ("f32", 1.5), "f32": ("f32", 1.5), "bf16": ("f16", 2.5), "int8": ("f16", 2.5)}


# Up and down rate of each machine, in Mbit/s. Two cores carry about 1600 in all.
LINKS = size(
    {"even": [200, 200, 200, 200], "1:2:4": [50, 100, 200], "1:1:2:4": [50, 50, 100, 200]},
    {"1:2": [100, 200]},
)
DELAY = 5  # ms, each way
FEW_STEPS = size(3, 1) + SKIPPED_STEPS
# The goal: the least share of the links' best time.
LEAST_SHARE = 0.9


def shoal_seconds(shoal, model, peers, mode, steps=STEPS, inside=None):
    # Every member has counted a microbatch: one that counted none would send next to nothing.
    microbatches = EACH * peers
    outcome = shoal.swarm(
        dataclasses.replace(model, batch=microbatches), replicas=peers, machines=inside, stages=1,
        microbatches=microbatches, steps=steps, dtype="f32", all_reduce=mode,
        flags=["--slow-down", str(PASS)],
    )
    sent = sum(peer.get("tensor", 0) for peer in outcome.sent) / steps
    return statistics.median(outcome.all_reduce_seconds), sent


def least_seconds(rates, numbers, part, result):
    """Seconds of the best shares over links with these rates in bytes a second, by bisection."""
    others = len(rates) - 1

    def feasible(seconds):
        low, high = [], []
        for rate in rates:
            # Both (1 - w) p + w (n - 1) r and w (n - 1) p + (1 - w) r within the time.
            least, most, budget = 0.0, 1.0, seconds * rate / numbers
            for fixed, slope in [(part, others * result - part), (result, others * part - result)]:
                if slope > 0:
                    most = min(most, (budget - fixed) / slope)
                elif slope < 0:
                    least = max(least, (budget - fixed) / slope)
                elif budget < fixed:
                    return False
            low.append(least)
            high.append(most)
        shares = all(least <= most for least, most in zip(low, high))
        return shares and sum(low) <= 1 <= sum(high)

    short, long = 0.0, 1e6
    for _ in range(100):
        middle = (short + long) / 2
        short, long = (short, middle) if feasible(middle) else (middle, long)
    return long


def gloo_over(inside, count):
    """Seconds of gloo's all-reduce among these machines."""
    here = os.path.dirname(os.path.abspath(__file__))
    script = os.path.join(here, "all_reduce_peers.py")
    address = f"{inside[0][1]}:7500"
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, script, "gloo-rank", str(len(inside)), str(count), str(rank),
             address],
            stdout=subprocess.PIPE, text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "link", "OMP_NUM_THREADS": "1"},
        )
        for rank, (prefix, _) in enumerate(inside)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    return statistics.median(json.loads(outputs[0].splitlines()[-1]))


def rows_over_links(options, name, rates):
    model = MODELS[10]
    count, peers = model.parameters(), len(rates)
    ends = [{"up_mbit": rate, "down_mbit": rate} for rate in rates]
    link = {"delay_ms": DELAY, "queue_ms": 50}
    bytes_per_second = [rate * 1e6 / 8 * emulated.CONTENT for rate in rates]
    with emulated.machines(options.network, ends, link) as inside:
        gloo = gloo_over(inside, count)
    shoal, found = Shoal(options.shoal), []
    for mode in OURS:
        with emulated.machines(options.network, ends, link) as inside:
            seconds, sent = shoal_seconds(shoal, model, peers, mode, FEW_STEPS, inside)
        # Every number goes to the member that adds it up and comes back, n - 1 times each.
        both = sent / (peers - 1) / count
        result = {"exact": 4, "f32": 4}.get(mode, both / 2)
        least = least_seconds(bytes_per_second, count, both - result, result)
        share = least / seconds
        ahead = mode in ("exact", "f32") or seconds < gloo
        found.append([
            f"{name}, {peers} peers", mode, f"{both:.2f}", f"{least:.2f} s", f"{seconds:.2f} s",
            f"{share:.2f}", f"{gloo / seconds:.2f}x",
            "met" if share >= LEAST_SHARE and ahead else "NOT met",
        ])
        print("  ".join(found[-1]), file=sys.stderr, flush=True)
    return found


def peers_seconds(what, folder, *arguments):
    """Seconds of another library's all-reduce, whose program prints a list of them."""
    here = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, os.path.join(here, "all_reduce_peers.py"), what, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if not lines:
        raise SystemExit(f"{what} failed: {done.stderr[-2000:]}")
    return statistics.median(json.loads(lines[-1]))


def bulk_rate(speed):
    """Bytes a second of the transport alone over loopback."""
    env = {**os.environ, **machines.ALLOCATOR}
    command, rates = [speed, "loopback", size("2048", "32"), "2"], []
    for _ in range(size(3, 1)):
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        rates.append(float(re.search(r"([0-9.]+) MB/s", done.stdout)[1]) * 1e6)
    return statistics.median(rates)


def arithmetic_seconds(arithmetic, mode, count, peers):
    """Seconds of the arithmetic of a round, of all peers on the cores of this machine."""
    env = {**os.environ, **machines.ALLOCATOR}
    command = [arithmetic, mode, str(count), str(peers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return float(done.stdout) / min(peers, os.cpu_count())


def rows(options, millions, peers, bulk):
    model = MODELS[millions]
    count = model.parameters()
    gloo = peers_seconds("gloo", "", peers, count)
    theirs = {name: peers_seconds("hivemind", options.hivemind, peers, count, called)
              for name, called in THEIRS.items()} if options.hivemind else {}
    shoal = Shoal(options.shoal)
    found = []
    for mode in OURS:
        seconds, sent = shoal_seconds(shoal, model, peers, mode)
        name, goal = GOALS[mode]
        beside = theirs.get(name)
        carried = sent / bulk if bulk else 0
        both = carried + arithmetic_seconds(options.arithmetic, mode, count, peers) if bulk else 0
        found.append([
            f"{count / 1e6:.1f}M, {peers}", mode, f"{1e3 * seconds:.0f} ms", f"{sent / 1e6:.0f} MB",
            f"{sent / seconds / 1e6:.0f} MB/s", f"{carried / seconds:.2f}" if bulk else "",
            f"{both / seconds:.2f}" if bulk else "",
            f"{gloo / seconds:.2f}x", f"{beside / seconds:.2f}x {name}" if beside else "",
            "" if not beside else "met" if beside / seconds >= goal else f"NOT met ({goal}x)",
        ])
        print("  ".join(found[-1]), file=sys.stderr, flush=True)
    found.append([f"{count / 1e6:.1f}M, {peers}", "gloo, f32", f"{1e3 * gloo:.0f} ms"] + [""] * 7)
    found += [[f"{count / 1e6:.1f}M, {peers}", f"hivemind, {name}", f"{1e3 * seconds:.0f} ms"] + [""] * 7
              for name, seconds in theirs.items()]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--hivemind", help="a folder with hivemind")
    parser.add_argument("--network", help="the example emulated_network: measure over its links instead of loopback")
    parser.add_argument("--speed", help="the example transport_speed")
    parser.add_argument("--arithmetic", help="the example round_speed, required with --speed")
    parser.add_argument("--only", help="MILLIONS,PEERS")
    options = parser.parse_args()
    if options.network:
        return over_links(options)
    cases = size([(10, 2), (10, 4), (10, 8), (100, 2), (100, 4)], [(10, 2)])
    if options.only:
        cases = [tuple(int(number) for number in options.only.split(","))]
    loopback(options, cases)


def over_links(options):
    table.show(
        "All-reduce over emulated links",
        f"{MODELS[10].parameters() / 1e6:.1f}M values; rates up and down of each machine in Mbit/s: "
        + "; ".join(f"{name}: {rates}" for name, rates in LINKS.items())
        + f"; {DELAY} ms each way. Medians of {FEW_STEPS - SKIPPED_STEPS} rounds. The least time is that of "
        "the best shares for the bytes of the mode.",
        ["links", "mode", "bytes a number", "least", "time", "share", "of gloo's speed", "goal"],
        [row for name, rates in LINKS.items() for row in rows_over_links(options, name, rates)],
    )


def loopback(options, cases):
    """Prints the table of these cases, and gives its rows. A case is the millions of values and the number of peers."""
    bulk = bulk_rate(options.speed) if options.speed else None
    found = [row for case in cases for row in rows(options, *case, bulk)]
    of_bulk = (f" The transport alone carries {bulk / 1e6:.0f} MB/s. The arithmetic is that of all peers, on "
               "this machine's cores and without links." if bulk else "")
    table.show(
        "All-reduce on loopback",
        f"Seconds are medians of {STEPS - SKIPPED_STEPS} rounds; the bytes are those of all peers in one "
        f"of them. One thread each.{of_bulk} {machines.line(machines.describe(sys.executable))}.",
        ["values, peers", "mode", "time", "sent", "sent by all", "of bulk", "of bulk and arithmetic",
         "of gloo's speed", "of hivemind's", "goal"],
        found,
    )
    return found


if __name__ == "__main__":
    main()
