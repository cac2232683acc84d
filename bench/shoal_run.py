"""Runs the real processes of Shoal, and reads their events."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

import model as models
from sizes import size

LIMIT_SECONDS = 300
# The first steps are a warm-up.
SKIPPED_STEPS = size(3, 1)


@dataclasses.dataclass
class Outcome:
    """A finished run."""

    # Seconds of each step after the warm-up.
    seconds: list
    # The part of these from the end of all passes until every replica had the gradient.
    all_reduce_seconds: list
    tokens_per_step: int
    # The tokens of all steps.
    tokens: int
    # The loss of the first step, before any update.
    first_loss: float
    # The bytes that each peer sent, by kind, in order of stages.
    sent: list
    # The peak memory of each process, in bytes.
    peak: list
    checkpoint_hash: str
    # What each process swapped, in order of stages.
    swapped: list

    def rate(self):
        """Tokens per second."""
        return self.tokens_per_step * len(self.seconds) / sum(self.seconds)


class Shoal:
    """The binary, its device, and the text to train on: by default the one in the binary."""

    def __init__(self, binary, device="cpu", text=None):
        self.binary = os.path.abspath(binary)
        self.device = device
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "run.toml")
            data = ["--data", os.path.abspath(text)] if text else []
            subprocess.run([self.binary, "init", "-o", path, *data], check=True, capture_output=True)
            self.default = path.read_text(encoding="utf-8")

    def swarm(self, model, replicas=1, machines=None, flags=(), stage=None, **run):
        """Trains with `replicas` peers of each stage, one thread each, on loopback or each in a machine, which is
        the prefix of a command and an address. With `stage`, as many peers all host those stages."""
        peers = run["stages"] * replicas
        machines = machines or [([], "127.0.0.1")] * peers
        with self.folder(model, run) as folder:
            commands = []
            for index, (inside, address) in enumerate(machines):
                what = ["start", "run.toml", "--address-file", "address", "--out", "out",
                        "--wait-for", str(peers)]
                what = what if index == 0 else ["join", f"@{folder}/address"]
                commands.append([
                    *inside, self.binary, *what, "--stage", stage or str(index % run["stages"]),
                    "--data-dir", f"peer-{index}", "--listen", f"{address}:0", "--no-mdns",
                    *flags, *self.compute(1, index),
                ])
            return self.finish(folder, commands)

    def local(self, model, threads, flags=(), **run):
        """Trains in one process."""
        with self.folder(model, run) as folder:
            command = [self.binary, "local", "run.toml", "--out", "out", *flags, *self.compute(threads, 0)]
            return self.finish(folder, [command])

    @contextlib.contextmanager
    def folder(self, model, run):
        """A folder with the run's configuration, for the duration of a block."""
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
            text = models.run_toml(self.default, model, **run)
            # Its peers are processes of this machine, and any of them may die.
            text = text.replace('mode = "invite"', 'mode = "open"')
            pathlib.Path(name, "run.toml").write_text(text, encoding="utf-8")
            yield pathlib.Path(name)

    def peer_id(self, data_dir):
        """The id of the peer with this data directory."""
        command = [self.binary, "id", "--data-dir", data_dir]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def compute(self, threads, index):
        return ["--device", self.device, "--threads", str(threads), "--events", f"{index}.events"]

    def finish(self, folder, commands):
        """Runs the commands concurrently until all have ended."""
        processes = []
        try:
            for index, command in enumerate(commands):
                with open(folder / f"{index}.log", "wb") as log:
                    process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
                processes.append(process)
            peaks = wait_for(processes, folder)
        finally:
            for process in processes:
                if process.returncode is None:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
        return read_outcome(folder, peaks)


def wait_for(processes, folder):
    """Waits until all have ended successfully, and gives the peak memory of each in bytes."""
    peaks = {}
    end = time.monotonic() + LIMIT_SECONDS
    while len(peaks) < len(processes):
        for index, process in enumerate(processes):
            if index in peaks:
                continue
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if not ended:
                continue
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode != 0:
                fail(folder, index, f"ended with {process.returncode}")
            peaks[index] = usage.ru_maxrss * 1024
        if time.monotonic() > end:
            late = next(index for index in range(len(processes)) if index not in peaks)
            fail(folder, late, f"did not end within {LIMIT_SECONDS} s")
        time.sleep(0.05)
    return [peaks[index] for index in range(len(processes))]


def fail(folder, index, what):
    log = (folder / f"{index}.log").read_text(encoding="utf-8", errors="replace")
    raise SystemExit(f"{what}: process {index} of Shoal, whose output ends with:\n{log[-2000:]}")


def read_outcome(folder, peaks):
    events = []
    for index in range(len(peaks)):
        text = (folder / f"{index}.events").read_text(encoding="utf-8")
        events.append([json.loads(line) for line in text.splitlines()])
    steps = [event for event in events[0] if event["event"] == "committed"]
    report = json.loads((folder / "out" / "report.json").read_text(encoding="utf-8"))
    missing = report["microbatches"]["missing"]
    assert missing == 0, f"{missing} microbatches are missing"
    return Outcome(
        seconds=[step["seconds"] for step in steps[SKIPPED_STEPS:]],
        all_reduce_seconds=[step.get("all_reduce_seconds") for step in steps[SKIPPED_STEPS:]],
        tokens_per_step=steps[0]["tokens"],
        tokens=sum(step["tokens"] for step in steps),
        first_loss=steps[0]["loss"],
        sent=[last(one, "finished").get("sent", {}) for one in events],
        peak=peaks,
        checkpoint_hash=report["checkpoint_hash"],
        swapped=[last(one, "finished").get("swapped", {}) for one in events],
    )


def last(events, name):
    return next((event for event in reversed(events) if event["event"] == name), {})
