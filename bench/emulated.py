"""Machines joined by emulated links, for programs that are measured over them. Needs root, /dev/net/tun
and `ip`."""

import contextlib
import json
import subprocess
import sys


@contextlib.contextmanager
def network(program, ends, link):
    """So many machines, each with its rates; gives how to start something in each, and their addresses."""
    process = subprocess.Popen(
        [program, json.dumps({"ends": ends, **link})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    if not line:
        sys.exit("no emulated network here: is this root, with /dev/net/tun?")
    machines = json.loads(line)

    def start(end, *command):
        inside = ["ip", "netns", "exec", machines["namespaces"][end], *command]
        return subprocess.Popen(
            inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    try:
        yield start, machines["addresses"]
    finally:
        process.stdin.close()
        process.wait()
