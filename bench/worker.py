"""Processes that train on demand, so that contenders can take turns."""

import contextlib
import json
import os
import statistics
import subprocess

FOLDER = os.path.dirname(os.path.abspath(__file__))


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
        self.name = os.path.basename(command[-2])

    def ask(self, **order):
        """Sends an order and waits for its answer."""
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended with {self.process.wait()} instead of training")
        return json.loads(answer)

    def close(self):
        """Ends the process by ending its orders."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


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
