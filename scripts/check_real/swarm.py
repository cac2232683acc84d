"""A swarm on loopback whose computing peers are killed at random and replaced."""

import dataclasses
import json
import random
import re
import shutil
import signal
import subprocess
import time

STAGES = 3
# Seconds from a death to the next at least.
KILL_SECONDS = 20
LIMIT_SECONDS = 1800
COMPUTE = ["--device", "cpu", "--threads", "1"]
# Older checkpoints are removed from the archive, which would need 2 GB for each.
KEPT_CHECKPOINTS = 2


class Failed(Exception):
    """A command of Shoal that failed, with the end of its output."""


@dataclasses.dataclass
class Outcome:
    """A finished run."""

    hash: str
    losses: list
    seconds: float
    kills: int = 0
    # Commits of a step that a return to a checkpoint repeated.
    repeated: int = 0


class Peer:
    """A process with its events in a file."""

    def __init__(self, folder, name, command):
        self.folder, self.name = folder / name, name
        self.folder.mkdir()
        self.events_path = self.folder / "events"
        self.log = self.folder / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*command, "--events", self.events_path], cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def events(self):
        if not self.events_path.exists():
            return []
        lines = self.events_path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def kill(self):
        """Kills the process and removes its data, so that nothing of it comes back."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    def check(self):
        """Gives whether the process has ended, and refuses one that failed."""
        code = self.process.poll()
        if code:
            end = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise Failed(f"{self.name} ended with {code}:\n{end}")
        return code == 0


def local(shoal, config, folder):
    """Trains in one process, with one thread as each peer of the swarm: another number changes the order of sums."""
    begun = time.monotonic()
    command = [shoal, "local", config, "--out", "out", *COMPUTE]
    folder.mkdir()
    peer = Peer(folder, "local", command)
    while not peer.check():
        time.sleep(0.2)
    return outcome(folder / "out", peer.events(), begun)


def swarm(shoal, config, folder, report, seed=0):
    """Trains with three peers in three stages; another one archives and coordinates. A random one of the three is
    killed every 20 s, but not before a checkpoint newer than the last death is complete: each death loses a stage
    and takes the run back to the newest one. Gives the outcome."""
    begun = time.monotonic()
    folder.mkdir()
    dice = random.Random(seed)
    common = ["--listen", "127.0.0.1:0", "--no-mdns", "--no-upnp", *COMPUTE]
    data_dir = lambda name: ["--data-dir", f"{name}/data"]
    first = Peer(folder, "first", [
        shoal, "start", config, "--stage", "none", "--address-file", "address", "--out", "out",
        "--wait-for", str(STAGES + 1), *data_dir("first"), *common])
    names = (f"peer-{index}" for index in range(1000))
    join = lambda name: Peer(folder, name, [shoal, "join", f"@{folder}/address", *data_dir(name), *common])
    peers = [join(next(names)) for _ in range(STAGES)]
    kills, last, version = 0, time.monotonic(), -1
    try:
        while not first.check():
            time.sleep(0.2)
            for peer in peers:
                peer.check()
            if time.monotonic() - begun > LIMIT_SECONDS:
                raise Failed(f"the swarm did not end within {LIMIT_SECONDS} s: {first.log}")
            newest = forget_old_checkpoints(folder / "out" / "checkpoints")
            if time.monotonic() - last < KILL_SECONDS or newest <= version:
                continue
            victim = peers.pop(dice.randrange(STAGES))
            victim.kill()
            kills, last, version = kills + 1, time.monotonic(), newest
            peers.append(join(next(names)))
            report(f"killed {victim.name} after checkpoint {newest}, started {peers[-1].name}")
        for peer in peers:
            peer.process.wait(timeout=60)
            peer.check()
    finally:
        for peer in [first, *peers]:
            if peer.process.poll() is None:
                peer.kill()
    return dataclasses.replace(outcome(folder / "out", first.events(), begun), kills=kills)


def forget_old_checkpoints(archive):
    """Removes all but the newest checkpoints. Gives the newest version, or -1."""
    versions = []
    for path in archive.glob("version-*") if archive.exists() else []:
        if re.fullmatch(r"version-\d+", path.name):
            versions.append(int(path.name.removeprefix("version-")))
    versions.sort()
    for version in versions[:-KEPT_CHECKPOINTS]:
        shutil.rmtree(archive / f"version-{version}", ignore_errors=True)
    return versions[-1] if versions else -1


def outcome(out, events, begun):
    losses, repeated = {}, 0
    for event in events:
        if event["event"] != "committed":
            continue
        step = event["step"]
        if step in losses:
            repeated += 1
            if losses[step] != event["loss"]:
                raise Failed(f"step {step} was repeated with another loss: {losses[step]} and {event['loss']}")
        losses[step] = event["loss"]
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return Outcome(
        hash=report["checkpoint_hash"], losses=[losses[step] for step in sorted(losses)],
        seconds=time.monotonic() - begun, repeated=repeated)
