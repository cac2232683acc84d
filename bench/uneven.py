"""Measures a swarm of peers of different speeds against the sum of their speeds, and the time until a stage with one
peer left gets another.

    make bench-uneven

Three stages have six peers, two of them four times slower. Every pass waits for a stated time, so that two cores
can represent six devices. *Fluid* is the throughput of the slowest stage with the best placement, if work were
infinitely divisible; each peer reports the duration of its passes. *Best* is the share of it in which a step loses
only the transfer of its first activation to the last stage, and of its last gradient back, through the fastest
peers (docs/internals/routing.md). *Simulated* is the share in the simulator with the same placement and passes.
"""

import argparse
import itertools
import re
import statistics
import subprocess
import sys
import urllib.request

import machine as machines
import table
from model import Model
from overhead import killed_in_the_end
from peer import Peer, address_of
from shoal_run import Shoal
from sizes import size

STAGES = 3
MICROBATCHES = size(128, 12)
# The wait of each pass in milliseconds, and the factor of the slow peers.
FAST, SLOWER = size((25, 4), (5, 4))
PEERS = [FAST] * 4 + [FAST * SLOWER] * 2
# The placement of the six peers with the most throughput.
BEST_STAGES = [0, 0, 1, 2, 1, 2]
# The steps of warm-up, in which the swarm learns the speeds; those of warm-up with moves, which are compared three
# steps after the last move; and the measured steps.
WARM, SETTLED, MEASURED = size((5, 15, 8), (1, 2, 1))
# More steps than measured: a run moves no peer near its end.
STEPS = 10_000
# The seconds between two comparisons of the stages.
REBALANCE = 3
GOAL = 0.95

# The refilled swarm: two stages of three equal peers each, of which two die at one stage.
REFILL_PEERS, REFILL_STEPS, REFILL_ROUNDS = size((6, 200, 3), (6, 2000, 1))


def started(shoal, folder, stages, waits, flags):
    """Starts the peers of a run, each with a stage and the wait of its passes."""
    first = ["start", "run.toml", "--address-file", "address", "--wait-for", str(len(waits)),
             "--out", "out"]
    commands = itertools.chain([first], itertools.repeat(["join", f"@{folder}/address"]))
    return [
        Peer.of_shoal(shoal, folder, index, [
            *what, "--stage", str(stage), "--slow-down", str(wait), *flags])
        for index, (what, stage, wait) in enumerate(zip(commands, stages, waits))
    ]


def run_of(stages, steps, microbatches, staleness=0):
    """A model with very short passes, and its run."""
    model = Model(hidden=64, layers=stages, heads=2, intermediate=64, context=32, batch=microbatches)
    return model, {"stages": stages, "steps": steps, "microbatches": microbatches, "dtype": "f32",
                   "staleness": staleness}


def seen_of(folder, index):
    """The stage of a peer, and the mean seconds of its forward and its backward pass."""
    with urllib.request.urlopen(f"http://{address_of(folder, index)}/metrics", timeout=10) as answer:
        text = answer.read().decode()

    def mean(phase):
        part = r'shoal_phase_duration_seconds_{}{{[^}}]*phase="{}"[^}}]*}} (\S+)'
        total, count = (float(re.search(part.format(of, phase), text)[1]) for of in ("sum", "count"))
        return total / count

    stage = re.search(r'shoal_stage_hosted{[^}]*stage="(\d+)"[^}]*} 1', text)[1]
    return int(stage), mean("forward"), mean("backward")


def slowest_stage(placement, speeds):
    """The throughput of the slowest stage, in microbatches a second."""
    stages = [0.0] * STAGES
    for stage, speed in zip(placement, speeds):
        stages[stage] += speed
    return min(stages)


def swarm(shoal, stages, rebalance, staleness):
    """Microbatches a second, the number of moves, and the stage and passes of each peer."""
    steps = MEASURED + (SETTLED if rebalance else WARM)
    model, run = run_of(STAGES, STEPS, MICROBATCHES, staleness)
    with shoal.folder(model, run) as folder:
        flags = ["--rebalance", str(rebalance)]
        with killed_in_the_end(started(shoal, folder, stages, PEERS, flags)) as peers:
            seconds, moves = [], 0
            for event, _ in peers[0].events():
                moves += event["event"] == "moves"
                if event["event"] == "committed":
                    seconds.append(event["seconds"])
                if len(seconds) == steps:
                    break
            else:
                raise SystemExit((folder / "0.log").read_text(encoding="utf-8")[-2000:])
            seen = [seen_of(folder, index) for index in range(len(PEERS))]
    return MICROBATCHES * MEASURED / sum(seconds[-MEASURED:]), moves, seen


def row(shoal, simulator, how, stages, rebalance, staleness):
    """A line of the table."""
    rate, moves, seen = swarm(shoal, stages, rebalance, staleness)
    speeds = [1 / (forward + backward) for _, forward, backward in seen]
    placements = itertools.product(range(STAGES), repeat=len(PEERS))
    fluid = max(slowest_stage(placement, speeds) for placement in placements)
    placed = slowest_stage([stage for stage, _, _ in seen], speeds)
    fill = (STAGES - 1) / max(speeds)
    best = 1 if staleness else 1 / (1 + fill * fluid / MICROBATCHES)
    peers = [f"{stage}:{forward * 1e6:.0f}:{backward * 1e6:.0f}" for stage, forward, backward in seen]
    numbers = [MICROBATCHES, WARM + MEASURED + 1, MEASURED, staleness]
    said = subprocess.run(
        [simulator, *map(str, numbers), *peers], check=True, capture_output=True, text=True).stdout
    share = rate / fluid
    print(how, f"{share:.3f}", peers, file=sys.stderr, flush=True)
    return [how, staleness, moves, f"{rate:.2f}/s", f"{fluid:.2f}/s", f"{placed / fluid:.3f}",
            f"{share:.3f}", f"{float(said) / fluid:.3f}", f"{best:.3f}",
            f"{'met' if share >= GOAL else 'NOT met'} (at least {GOAL})"]


def refill(shoal):
    """Seconds from two deaths at a stage until the decision of a move, and until the moved peer serves there."""
    model, run = run_of(2, REFILL_STEPS, 24)
    waits, stages = [FAST] * REFILL_PEERS, ["auto:1"] * REFILL_PEERS
    with shoal.folder(model, run) as folder:
        flags = ["--rebalance", "1"]
        with killed_in_the_end(started(shoal, folder, stages, waits, flags)) as peers:
            stages = [peer.wait("joined")[0]["span"][0] for peer in peers]
            starved = [peer for peer, stage in zip(peers, stages) if stage != stages[0]]
            peers[0].steps(5)
            killed = [peer.kill() for peer in starved[1:]][-1]
            event, decided = peers[0].wait("moves", killed)
            mover = next(peer for index, peer in enumerate(peers)
                         if shoal.peer_id(folder / f"peer-{index}") == event["peer"])
            _, moved = mover.wait("moved", killed)
    return decided - killed, moved - killed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--simulator", required=True, help="the scheduler's example uneven")
    options = parser.parse_args()
    shoal = Shoal(options.shoal)
    rows = [
        row(shoal, options.simulator, how, stages, rebalance, staleness)
        for how, stages, rebalance, staleness in [
            ("by hand", BEST_STAGES, 0, 0),
            ("by the swarm", ["auto:1"] * len(PEERS), REBALANCE, 0),
            ("by hand", BEST_STAGES, 0, 1),
        ]
    ]
    table.show(
        "Peers of different speeds",
        f"{STAGES} stages, {len(PEERS)} peers, {MICROBATCHES} microbatches a step; passes wait {FAST} ms, of "
        f"two peers {SLOWER} times as long; means of {MEASURED} steps. Placed: the share of the fluid "
        f"optimum that the placement allows. {machines.line(machines.describe(sys.executable))}.",
        ["placed", "staleness", "moves", "microbatches", "fluid", "placed", "share", "simulated", "best",
         "goal"],
        rows,
    )
    refills = [refill(shoal) for _ in range(REFILL_ROUNDS)]
    table.show(
        "A stage with one peer left",
        f"Two stages of three peers each, all passes wait {FAST} ms; two of one stage die at once, and the "
        f"stages are compared every second. From the deaths, median and worst of {REFILL_ROUNDS} runs.",
        ["what", "median", "worst"],
        [[what, f"{statistics.median(times):.2f} s", f"{max(times):.2f} s"]
         for what, times in zip(["until the decision of a move", "until the moved peer serves"],
                                zip(*refills))],
    )


if __name__ == "__main__":
    main()
