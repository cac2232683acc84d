"""Measures a run of two peers in turn with and without a load of hostile connections.

    make bench-hostile

The load is one process that attacks the first peer. It holds thousands of silent TCP connections, sends datagrams
that look like the first of a connection, and greets repeatedly as a peer without an invitation. It shares this
machine's processors with the run at the lowest priority, so the table has the processor time of the run's two
processes as well.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import urllib.request

import machine as machines
import table
from model import SMALL
from overhead import killed_in_the_end
from peer import Peer, address_of
from shoal_run import Shoal
from sizes import size

MICROBATCHES = 16
# Steps before the first measurement and after each change, and steps measured each time.
WARM, SETTLE, MEASURED = size((4, 1, 6), (1, 1, 5))


class Load:
    """The process of the hostile peer, for the duration of a block."""

    def __init__(self, binary, address, connections, rate):
        _, _, host, _, port, _, peer = address.split("/")
        self.command = ["nice", "-n", "19", binary, peer, f"{host}:{port}", str(connections), str(rate)]
        self.tally = {}

    def __enter__(self):
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_):
        said, _ = self.process.communicate()
        self.tally = json.loads(said)


def measure(peers):
    """Seconds and processor seconds for a token."""
    for peer in peers:
        peer.steps(SETTLE)
    began, before = time.monotonic(), sum(peer.processor_seconds() for peer in peers)
    for peer in peers:
        ended = peer.steps(MEASURED)[-1]
    spent = sum(peer.processor_seconds() for peer in peers) - before
    tokens = MEASURED * SMALL.tokens_per_step()
    return (ended - began) / tokens, spent / tokens


def refusals(folder):
    """The number of connections that the first peer refused, by reason."""
    address = address_of(folder, 0)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("shoal_connections_refused_total{"):
            count = float(line.rpartition(" ")[2])
            if count:
                found[line.partition('reason="')[2].partition('"')[0]] = int(count)
    return found


def invited(shoal, folder):
    """Two peers of a run that admits invited peers only."""
    config = folder / "run.toml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('mode = "open"', 'mode = "invite"'), encoding="utf-8")
    first = Peer.of_shoal(shoal, folder, 0, [
        "start", "run.toml", "--wait-for", "2", "--out", "out", "--stage", "0"])
    address = first.wait("listening")[0]["address"]
    ticket = subprocess.run([shoal.binary, "invite", "new", "--data-dir", "peer-0"], cwd=folder,
                            check=True, capture_output=True, text=True).stdout.strip()
    second = Peer.of_shoal(shoal, folder, 1, ["join", ticket, "--stage", "1"])
    return [first, second], address


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--hostile", required=True, help="the protocol's example hostile")
    parser.add_argument("--pairs", type=int, default=size(8, 1), help="alternated measurements without and with load")
    parser.add_argument("--connections", type=int, default=size(10_000, 50), help="TCP connections to hold at once")
    parser.add_argument("--rate", type=int, default=200, help="connections, datagrams and greetings a second")
    options = parser.parse_args()
    shoal = Shoal(options.shoal)
    steps = WARM + 2 * options.pairs * (SETTLE + MEASURED) + 1
    run = {"stages": 2, "steps": steps, "microbatches": MICROBATCHES, "dtype": "f32"}
    pairs, done = [], {}
    with shoal.folder(SMALL, run) as folder:
        swarm, address = invited(shoal, pathlib.Path(folder))
        with killed_in_the_end(swarm) as peers:
            for peer in peers:
                peer.steps(WARM)
            for index in range(options.pairs):
                costs = {}
                for hostile in (True, False) if index % 2 else (False, True):
                    if not hostile:
                        costs[hostile] = measure(peers)
                        continue
                    with Load(os.path.abspath(options.hostile), address, options.connections,
                              options.rate) as load:
                        costs[hostile] = measure(peers)
                    for name, count in load.tally.items():
                        done[name] = done.get(name, 0) + count
                pairs.append(costs)
            refused = refusals(pathlib.Path(folder))
    show(options, pairs, done, refused)


def show(options, pairs, done, refused):
    def row(name, which):
        each = [statistics.median(one[hostile][which] for one in pairs) for hostile in (False, True)]
        ratio = statistics.median(one[True][which] / one[False][which] for one in pairs)
        return [name, *(f"{value * 1e6:.1f} us" for value in each), f"{ratio:.3f}"]

    told = ", ".join(f"{count:,} {name}" for name, count in sorted(refused.items()))
    table.show(
        "A run under hostile connections",
        f"Two stages of one peer each, one thread each, {MICROBATCHES} microbatches, invited peers only; "
        f"{SMALL.describe()}; {machines.line(machines.describe(sys.executable))}. Under load the first peer "
        f"gets requests for {options.connections:,} TCP connections at once, and at most {options.rate} a second of "
        f"connections, datagrams and greetings each: {done['opened']:,} connections ({done['dropped']:,} "
        f"dropped by the peer), {done['datagrams']:,} datagrams and {done['greetings']:,} greetings "
        f"({done['refused']:,} refused) in all; it counted {told}. Medians of {len(pairs)} alternated "
        "pairs in one run; the ratio is the median of the pairs' ratios.",
        ["per token", "without load", "under load", "ratio"],
        [row("time", 0), row("processor time of the run's peers", 1)],
    )


if __name__ == "__main__":
    main()
