"""A process that prints its events as lines of JSON."""

import json
import os
import signal
import subprocess
import time

TICKS = os.sysconf("SC_CLK_TCK")


def address_of(folder, index):
    """The HTTP address of a peer of Shoal."""
    return (folder / f"peer-{index}" / "http").read_text(encoding="utf-8").strip()


class Peer:
    """A process, and its events with the times of their arrival."""

    def __init__(self, folder, index, command):
        self.log = open(folder / f"{index}.log", "ab")
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=self.log, text=True)

    @classmethod
    def of_shoal(cls, shoal, folder, index, what):
        """A peer of Shoal with a data directory of its own, on loopback."""
        return cls(folder, index, [
            shoal.binary, *what, "--data-dir", f"peer-{index}", "--listen", "127.0.0.1:0",
            "--no-mdns", "--device", "cpu", "--threads", "1", "--events", "-",
        ])

    def events(self):
        """The events of the process, each with its time."""
        for line in self.process.stdout:
            yield json.loads(line), time.monotonic()

    def wait(self, name, after=0.0):
        """Waits for the next event of a kind, and gives it with its time."""
        for event, now in self.events():
            if event["event"] == name and now >= after:
                return event, now
        raise SystemExit(f"a peer ended before its event {name!r}")

    def steps(self, count):
        """Waits for further commits, and gives their times."""
        return [self.wait("committed")[1] for _ in range(count)]

    def processor_seconds(self):
        """Processor seconds of all threads of the process so far."""
        with open(f"/proc/{self.process.pid}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return time.monotonic()
