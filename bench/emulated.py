"""Machines joined by emulated links, for programs that are measured over them. Needs root, /dev/net/tun
and `ip`."""

import contextlib
import json
import subprocess
import sys

# What a packet's headers leave of its 1500 bytes: IPv4, UDP, QUIC's header with an 8-byte connection id
# and a 2-byte number, its authentication tag, and the header of a stream frame.
CONTENT = (1500 - 20 - 8 - 11 - 16 - 9) / 1500


@contextlib.contextmanager
def machines(program, ends, link):
    """So many machines, each with its rates; gives for each what a command begins with that is to run in
    it, and its address."""
    process = subprocess.Popen(
        [program, json.dumps({"ends": ends, **link})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    if not line:
        sys.exit("no emulated network here: is this root, with /dev/net/tun?")
    said = json.loads(line)
    inside = [["ip", "netns", "exec", name] for name in said["namespaces"]]
    try:
        yield list(zip(inside, said["addresses"]))
    finally:
        process.stdin.close()
        process.wait()


@contextlib.contextmanager
def network(program, ends, link):
    """The same; gives how to start something in each, and their addresses."""
    with machines(program, ends, link) as all_machines:

        def start(end, *command):
            return subprocess.Popen(
                [*all_machines[end][0], *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

        yield start, [address for _, address in all_machines]
