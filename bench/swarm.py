"""Tables of a swarm: its speed beside one process and torch.distributed.pipelining, and its traffic."""

import statistics

import table
from machine import line as machine_line
from model import SMALL
from shoal_run import SKIPPED_STEPS
from sizes import size
from worker import closing, ratio, start_ranks, take_turns

STAGES = 2
MICROBATCHES = size((8, 16, 32), (8,))
STEPS = size(10, 1) + SKIPPED_STEPS
PROBE_STEPS = size(5, 1) + SKIPPED_STEPS
PIPELINE_STEPS = size(8, 2)
SWARM, LOCAL = "Shoal, 2 processes x 1 thread", "Shoal, 1 process x 2 threads"
SCHEDULES = {
    "1F1B": "torch.distributed.pipelining, 1F1B, 2 processes x 1 thread",
    "GPipe": "torch.distributed.pipelining, GPipe, 2 processes x 1 thread",
}


class Contest:
    """All contenders that train the model on two cores in one dtype."""

    def __init__(self, shoal, pipeline, dtype):
        self.shoal, self.pipeline, self.dtype = shoal, pipeline, dtype
        # The last run of the swarm for each number of microbatches.
        self.swarms = {}

    def runs(self):
        """Each contender as a function of a number of microbatches and of whether it is a probe."""
        return {
            SWARM: self.swarm,
            LOCAL: self.local,
            **{
                name: lambda count, probe, which=which: self.pipelined(which, count, probe)
                for which, name in SCHEDULES.items()
            },
        }

    def swarm(self, count, probe):
        outcome = self.shoal.swarm(SMALL, stages=STAGES, **self.run(count, probe))
        self.swarms[count] = outcome
        return outcome.rate()

    def local(self, count, probe):
        return self.shoal.local(SMALL, 2, stages=1, **self.run(count, probe)).rate()

    def run(self, count, probe):
        steps = PROBE_STEPS if probe else STEPS
        return {"dtype": self.dtype, "microbatches": count, "steps": steps}

    def pipelined(self, schedule, count, probe):
        order = {"schedule": schedule, "microbatches": count, "dtype": self.dtype}
        if probe:
            self.pipeline.ask(**order, steps=1)
        answer = self.pipeline.ask(**order, steps=PIPELINE_STEPS // 2 if probe else PIPELINE_STEPS)
        return answer["tokens"] / answer["seconds"]


def measure(shoal, tools, dtype, machine):
    """Measures in one dtype and prints the tables. Gives their numbers, the swarm's best run and its microbatches."""
    workers = start_ranks("torch_pipeline.py", SMALL, tools.text, STAGES)
    with closing(workers):
        contest = Contest(shoal, workers[0], dtype)
        runs = contest.runs()
        chosen = {}
        for name, run in runs.items():
            probes = {count: run(count, True) for count in MICROBATCHES}
            chosen[name] = max(probes, key=probes.get)
        results = take_turns(
            {name: lambda name=name: runs[name](chosen[name], False) for name in runs}, tools.rounds
        )
    best = contest.swarms[chosen[SWARM]]
    rows = speed_rows(results, chosen)
    report_speed(rows, dtype, machine)
    traffic = report_bytes(best, dtype)
    numbers = {"dtype": dtype, "speed": rows, "bytes": traffic}
    return numbers, best, chosen[SWARM]


def speed_rows(results, chosen):
    goals = {LOCAL: 0.95, SCHEDULES["1F1B"]: 1.0, SCHEDULES["GPipe"]: 1.0}
    return [
        {
            "contender": name,
            "microbatches": chosen[name],
            "tokens_per_second": statistics.median(rates),
            "swarm_to_it": ratio(results[SWARM], rates),
            "goal": goals.get(name),
            "rounds": rates,
        }
        for name, rates in results.items()
    ]


def report_speed(rows, dtype, machine):
    notes = (
        f"{SMALL.describe()}; {dtype}. {machine_line(machine)}, MKL's stock dispatch. Median of "
        f"{len(rows[0]['rounds'])} alternated rounds, each contender with its best of "
        f"{', '.join(map(str, MICROBATCHES))} microbatches of the same step. Shoal keeps its "
        "graphs; its two processes are `shoal start` and `shoal join` over QUIC on loopback, the "
        "one process is `shoal local`; PyTorch's are connected by gloo."
    )
    lines = [
        [
            row["contender"],
            row["microbatches"],
            table.rate(row["tokens_per_second"]),
            table.times(row["swarm_to_it"]),
            table.goal(row["swarm_to_it"], row["goal"]) if row["goal"] else "",
        ]
        for row in rows
    ]
    header = ["contender", "microbatches", "tokens/s", "swarm to it", "goal"]
    table.show(f"A swarm of two stages, {dtype}", notes, header, lines)


def report_bytes(outcome, dtype):
    """Prints the table of bytes sent for each token, and gives its numbers."""
    size = {"f32": 4, "bf16": 2}[dtype]
    floor = 2 * SMALL.hidden * size * (STAGES - 1)
    kinds = {
        kind: sum(sent.get(kind, 0) for sent in outcome.sent) for kind in ("tensor", "control", "file")
    }
    training = (kinds["tensor"] + kinds["control"]) / outcome.tokens
    rows = [
        ["activations and gradients", f"{kinds['tensor'] / outcome.tokens:,.1f}"],
        ["control messages", f"{kinds['control'] / outcome.tokens:,.1f}"],
        ["both", f"{training:,.1f}"],
        ["floor", f"{floor:,.1f}"],
        ["both to floor", table.times(training / floor)],
    ]
    notes = (
        f"Bytes for each token trained on, all peers together, {dtype}, {outcome.tokens:,} tokens. "
        "The floor is one activation and its gradient for each token and stage boundary. Headers of "
        "QUIC and UDP are not counted. Files "
        f"(the checkpoint's parts at the end) are {kinds['file']:,} bytes once a run."
    )
    table.show(f"Bytes sent, {dtype}", notes, ["what", "bytes per token"], rows)
    return {"sent": kinds, "tokens": outcome.tokens, "per_token": training, "floor": floor}
