"""Processes that train on demand, so that contenders can take turns."""

import contextlib
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))


class TrainingFailed(SystemExit):
    """A worker cannot train; ends the benchmark unless it is caught."""


class Worker:
    """A process that answers each line of JSON with one."""

    def __init__(self, command, preload=None, folder=None, environment=None):
        environment = {**os.environ, **(environment or {})}
        if preload:
            environment["LD_PRELOAD"] = preload
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )
        self.name = os.path.basename(next(part for part in reversed(command) if os.path.exists(part)))

    def ask(self, **order):
        """Sends an order and waits for its answer."""
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise TrainingFailed(f"{self.name} ended with {self.process.wait()} instead of training")
        answer = json.loads(answer)
        if "error" in answer:
            raise TrainingFailed(answer["error"])
        return answer

    def close(self):
        """Ends the process by ending its orders."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_ranks(script, model, text, ranks):
    """Starts the processes of a script that calls torch_ranks.serve, one thread each. The first one takes orders."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    described = json.dumps({**dataclasses.asdict(model), "device": "cpu", "threads": 1, "text": text})
    command = [sys.executable, f"{FOLDER}/{script}", described]
    return [Worker([*command, str(rank), str(ranks), str(port)]) for rank in range(ranks)]


@contextlib.contextmanager
def closing(workers):
    """Closes all workers at the end of a block."""
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()


def take_turns(contenders, rounds):
    """Calls each contender once a round. Every other round has the reverse order, so that none always follows the same
    one. Gives the results of each contender in order of rounds."""
    results = {name: [] for name in contenders}
    for index in range(rounds):
        order = list(contenders) if index % 2 == 0 else list(reversed(contenders))
        for name in order:
            results[name].append(contenders[name]())
    return results


def ratio(ours, theirs):
    """Median over the rounds of the ratio of our result to theirs in the same round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
