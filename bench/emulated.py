"""Machines joined by emulated links, in which programs can be measured. Needs root, /dev/net/tun and `ip`."""

import contextlib
import json
import subprocess
import sys

# The share of content in a packet of 1500 bytes. Its headers are IPv4, UDP, QUIC's with an 8-byte connection id and
# a 2-byte number, the authentication tag, and the header of a stream frame.
CONTENT = (1500 - 20 - 8 - 11 - 16 - 9) / 1500


@contextlib.contextmanager
def machines(program, ends, link):
    """Machines with these rates. Gives for each the prefix of a command that runs in it, and its address."""
    process = subprocess.Popen(
        [program, json.dumps({"ends": ends, **link})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    if not line:
        sys.exit("no emulated network: it needs root and /dev/net/tun")
    said = json.loads(line)
    inside = [["ip", "netns", "exec", name] for name in said["namespaces"]]
    try:
        yield list(zip(inside, said["addresses"]))
    finally:
        process.stdin.close()
        process.wait()


@contextlib.contextmanager
def network(program, ends, link):
    """The same. Gives a function that starts a command in a machine, and the addresses."""
    with machines(program, ends, link) as all_machines:

        def start(end, *command):
            return subprocess.Popen(
                [*all_machines[end][0], *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

        yield start, [address for _, address in all_machines]
