"""Measures the download of a file from its holders: over loopback from 1, 2 and 4 processes, beside TLS over TCP
and torchft's HTTP transport; over emulated links of 200 Mbit/s each; and with one holder that dies half-way and one
that sends wrong bytes.

    python bench/chunks.py --speed target/release/examples/chunk_speed \\
        --plain target/release/examples/plain_speed \\
        --network target/release/examples/emulated_network [--torchft DIR] [--mib 1024]

The emulated links need root, /dev/net/tun and `ip`.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

import emulated
import table
from sizes import size

PORT = 7400
RATE = 200  # Mbit/s
DELAY = 25  # ms, each way
QUEUE = 50  # ms
LINK_MIB = size(128, 32)
PAIRS = size(3, 1)
# Numbers of processes that a file comes from.
HOLDERS = size((1, 2, 4), (2,))


def spawn(_end, *command):
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Holder:
    """A process that serves a file."""

    def __init__(self, start, end, speed, address, file, *lie):
        self.process = start(end, speed, "serve", address, file, *lie)
        self.told = json.loads(self.process.stdout.readline())

    def stop(self):
        if self.process.poll() is None:
            self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def holders(count, speed, file, start=spawn, addresses=None, lies=0):
    """Starts a number of holders, of which the last `lies` send wrong bytes."""
    at = lambda index: f"{addresses[index + 1]}:{PORT}" if addresses else "127.0.0.1:0"
    lie = lambda index: ["lie"] if index >= count - lies else []
    started = [
        Holder(start, index + 1, speed, at(index), file, *lie(index)) for index in range(count)
    ]
    try:
        yield started
    finally:
        for holder in started:
            holder.stop()


def begin(speed, some, to, start=spawn):
    """Starts a process that fetches a file from holders."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(to)
    told = some[0].told
    at = [holder.told["peer"] for holder in some]
    return start(0, speed, "fetch", told["hash"], str(told["length"]), to, *at)


def finish(process):
    output, _ = process.communicate()
    if process.returncode != 0:
        sys.exit(f"the fetch failed: {output}")
    return json.loads(output)


def make(folder, mib):
    """Writes a file of random bytes, which do not compress."""
    path = os.path.join(folder, f"file-{mib}")
    with open(path, "wb") as file:
        for _ in range(mib):
            file.write(os.urandom(1 << 20))
    return path


def loopback(args, folder):
    file, to = make(folder, args.mib), os.path.join(folder, "fetched")
    megabytes = args.mib * 1.048576
    rows = []
    for count in HOLDERS:
        with holders(count, args.speed, file) as some:
            seconds = statistics.median([finish(begin(args.speed, some, to))["seconds"] for _ in range(PAIRS)])
        rows.append([f"Shoal, {count} holders", f"{seconds:.2f}", f"{megabytes / seconds:,.0f}"])
    plain = [args.plain, "tls", str(args.mib)]
    told = subprocess.run(plain, capture_output=True, text=True, check=True).stdout
    rate = float(re.search(r"([\d.,]+) MB/s", told)[1].replace(",", ""))
    rows.append(["TLS over TCP, bytes discarded", f"{megabytes / rate:.2f}", f"{rate:,.0f}"])
    for chunks in (0, 4):
        seconds = torchft(args, chunks)
        if seconds:
            name = f"torchft's HTTP transport, {chunks or 'no'} chunks"
            rows.append([name, f"{seconds:.2f}", f"{megabytes / seconds:,.0f}"])
    notes = (
        f"{args.mib} MiB; medians of {PAIRS}. Shoal reads the file, encrypts, checks each piece by its hash, "
        "and writes and flushes it. torchft neither encrypts nor checks, and keeps the tensors in memory. Load at the "
        f"end {os.getloadavg()[0]:.1f}."
    )
    table.show("A file over loopback", notes, ["from", "s", "MB/s"], rows)
    os.remove(file)


def torchft(args, chunks):
    """Seconds of torchft for as many bytes, where it is installed."""
    if not args.torchft:
        return None
    here = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, os.path.join(here, "chunks_peers.py"), str(args.mib), str(chunks)]
    environment = {**os.environ, "PYTHONPATH": args.torchft}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"torchft is not measured: {last}", file=sys.stderr)
        return None
    return float(done.stdout)


def links(args, folder):
    file, to = make(folder, LINK_MIB), os.path.join(folder, "fetched")
    rows = []
    for count in HOLDERS:
        ends = [{}] + [{"up_mbit": RATE}] * count
        with emulated.network(args.network, ends, {"delay_ms": DELAY, "queue_ms": QUEUE}) as net:
            start, addresses = net
            with holders(count, args.speed, file, start, addresses) as some:
                told = finish(begin(args.speed, some, to, start))
        mbit = LINK_MIB * 8.388608 / told["seconds"]
        share = mbit / (RATE * emulated.CONTENT * count)
        rows.append([count, f"{told['seconds']:.2f}", f"{mbit:.0f}", f"{share:.2f}"])
    notes = (
        f"{LINK_MIB} MiB; each holder sends {RATE} Mbit/s at most, {DELAY} ms each way, a queue of {QUEUE} ms. "
        "The share is of the content that packets of 1500 bytes leave. Connections exist before."
    )
    table.show("A file over links", notes, ["holders", "s", "Mbit/s", "share of the links"], rows)


def trouble(args, folder):
    """Kills one of four holders; another sends wrong bytes."""
    file, to = make(folder, LINK_MIB), os.path.join(folder, "fetched")
    ends = [{}] + [{"up_mbit": RATE}] * 4
    with emulated.network(args.network, ends, {"delay_ms": DELAY, "queue_ms": QUEUE}) as net:
        start, addresses = net
        with holders(4, args.speed, file, start, addresses, lies=1) as some:
            process = begin(args.speed, some, to, start)
            # Half-way, by the blocks on the disk.
            while not os.path.exists(to + ".part") or (
                os.stat(to + ".part").st_blocks * 512 < LINK_MIB << 19
            ):
                time.sleep(0.01)
            some[0].process.kill()
            told = finish(process)
    with open(file, "rb") as one, open(to, "rb") as other:
        same = one.read() == other.read()
    rows = [["s", f"{told['seconds']:.2f}"], ["wrong pieces refused", told["wrong_files"]]]
    rows.append(["bytes fetched beyond the file's", f"{told['received'] / (LINK_MIB << 20) - 1:.1%}"])
    rows.append(["the file is right", "yes" if same else "NO"])
    notes = f"{LINK_MIB} MiB from four holders on such links. One sends wrong bytes, one is killed half-way."
    table.show("A file from a wrong holder, a dying one and two others", notes, ["what", "value"], rows)
    if not same or told["wrong_files"] == 0:
        sys.exit("the file is wrong, or no wrong piece was counted")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", required=True)
    parser.add_argument("--plain", required=True)
    parser.add_argument("--network", required=True)
    parser.add_argument("--torchft")
    parser.add_argument("--mib", type=int, default=size(1024, 32))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loopback(args, folder)
        links(args, folder)
        trouble(args, folder)


main()
