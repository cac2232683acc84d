"""Measures the cost of status and metrics: a swarm whose peers answer for both every second, beside one without HTTP.

    make bench-watching

Two processes with a stage and a thread each run on loopback, in alternated pairs. The measurement is the processor
seconds of both processes, from one end of a step to another, without the client. A second table has the response
times of an observer of a larger swarm, which trains on the same two cores.
"""

import argparse
import contextlib
import statistics
import sys
import threading
import time
import urllib.request

import machine as machines
import table
from model import SMALL
from overhead import killed_in_the_end
from peer import Peer, address_of
from shoal_run import Shoal
from sizes import size
from uneven import run_of, started

MICROBATCHES = 16
# The steps of warm-up, and the measured steps.
WARM, MEASURED = size((4, 16), (1, 2))
EVERY = size(1.0, 0.01)
GOAL = 1.01

# The larger swarm: its stages and peers, the wait of a pass in milliseconds, microbatches and queries.
STAGES, PEERS, WAIT, LARGE_MICROBATCHES, QUESTIONS = size((4, 32, 40, 64, 200), (2, 4, 5, 8, 5))
# The goal for a scrape, in milliseconds.
SCRAPE_GOAL = 50.0


def swarm(shoal, folder, watched):
    """Two peers of a run, with or without HTTP."""
    http = ["--http", "127.0.0.1:0" if watched else "none"]
    first = Peer.of_shoal(shoal, folder, 0, [
        "start", "run.toml", "--address-file", "address", "--wait-for", "2", "--out", "out",
        "--stage", "0", *http])
    second = Peer.of_shoal(shoal, folder, 1, ["join", f"@{folder}/address", "--stage", "1", *http])
    return [first, second]


@contextlib.contextmanager
def watching(folder, watched):
    """Queries both peers every second during its block, and counts the answers."""
    done, answers = threading.Event(), [0]

    def look():
        while not done.wait(EVERY):
            for index in range(2):
                address = address_of(folder, index)
                for path in ("status", "metrics"):
                    with urllib.request.urlopen(f"http://{address}/{path}", timeout=10) as answer:
                        answers[0] += len(answer.read()) > 0

    watcher = threading.Thread(target=look)
    if watched:
        watcher.start()
    try:
        yield answers
    finally:
        done.set()
        if watched:
            watcher.join()


def cost(shoal, watched):
    """Processor seconds for a token, and the number of answers."""
    run = {"stages": 2, "steps": WARM + MEASURED + 1, "microbatches": MICROBATCHES, "dtype": "f32"}
    with shoal.folder(SMALL, run) as folder:
        with killed_in_the_end(swarm(shoal, folder, watched)) as peers:
            for peer in peers:
                peer.steps(WARM)
            before = sum(peer.processor_seconds() for peer in peers)
            with watching(folder, watched) as answers:
                for peer in peers:
                    peer.steps(MEASURED)
                after = sum(peer.processor_seconds() for peer in peers)
    assert (answers[0] > 0) == watched, "only watched peers answer"
    return (after - before) / (MEASURED * SMALL.tokens_per_step()), answers[0]


def answers_of(shoal):
    """Response times of an observer of the larger swarm in milliseconds, by path."""
    model, run = run_of(STAGES, 10_000, LARGE_MICROBATCHES)
    with shoal.folder(model, run) as folder:
        peers = started(shoal, folder, ["auto"] * PEERS, [WAIT] * PEERS, [])
        with killed_in_the_end(peers):
            peers.append(Peer.of_shoal(shoal, folder, PEERS, [
                "join", f"@{folder}/address", "--observer", "--http", "127.0.0.1:0"]))
            peers[PEERS].steps(3)
            address, times = address_of(folder, PEERS), {"metrics": [], "status": []}
            for _ in range(QUESTIONS):
                for path, taken in times.items():
                    began = time.monotonic()
                    with urllib.request.urlopen(f"http://{address}/{path}", timeout=10) as answer:
                        size = len(answer.read())
                    taken.append((time.monotonic() - began) * 1000)
                    assert size > 0
    return times


def show_answers(shoal):
    """Prints the table of the larger swarm."""
    rows = []
    for path, taken in answers_of(shoal).items():
        taken.sort()
        late = taken[len(taken) * 99 // 100]
        goal = f"{'met' if late < SCRAPE_GOAL else 'NOT met'} (under {SCRAPE_GOAL:.0f} ms)"
        rows.append([f"/{path}", f"{statistics.median(taken):.1f} ms", f"{late:.1f} ms", goal])
    table.show(
        f"Response times of the observer of a swarm of {PEERS}",
        f"{STAGES} stages, {LARGE_MICROBATCHES} microbatches a step, passes wait {WAIT} ms; {QUESTIONS} "
        "queries of each kind while the swarm trains. The goal is for 99 of 100.",
        ["path", "median", "99 of 100 within", "goal"],
        rows,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--pairs", type=int, default=size(10, 1), help="alternated pairs")
    options = parser.parse_args()
    shoal = Shoal(options.shoal)
    pairs, answered = [], 0
    for index in range(options.pairs):
        costs = {}
        for watched in (True, False) if index % 2 else (False, True):
            costs[watched], answers = cost(shoal, watched)
            answered += answers
        pairs.append(costs)
    ratio = statistics.median(one[True] / one[False] for one in pairs)
    each = {which: statistics.median(one[which] for one in pairs) for which in (True, False)}
    table.show(
        "The cost of status and metrics",
        f"Two stages of one peer each, one thread each, {MICROBATCHES} microbatches; "
        f"{SMALL.describe()}; {machines.line(machines.describe(sys.executable))}. Each peer answers for "
        f"/status and /metrics every second, {answered} answers in all. Medians of {len(pairs)} alternated "
        "pairs, of the processor per token; the ratio is the median of the pairs' ratios.",
        ["watched", "without HTTP", "ratio", "goal"],
        [[f"{each[True] * 1e6:.1f} us", f"{each[False] * 1e6:.1f} us", f"{ratio:.3f}",
          f"{'met' if ratio <= GOAL else 'NOT met'} (at most {GOAL})"]],
    )
    show_answers(shoal)


if __name__ == "__main__":
    main()
