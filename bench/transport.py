"""Measures the throughput of tensors from one peer to another: over loopback, over emulated links with delay, full
queues and loss, with each congestion control, and beside a TCP connection with Cubic.

    python bench/transport.py --speed target/release/examples/transport_speed \
        --plain target/release/examples/plain_speed \
        --network target/release/examples/emulated_network [--seconds 12]

On loopback it takes turns with quinn alone and TLS over TCP, all with the limits of the allocator that the node
sets (engine/src/device/setup.rs).

Needs root, /dev/net/tun and `ip`. A share is of the rate that a link leaves for the content of packets of 1500
bytes. Packets sent again are those that the sender considered lost.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time

import emulated
import machine
import table
from sizes import size

PORT = 7400
RATE = 200  # Mbit/s
DELAY = 50  # ms, each way
LINKS = [
    ("no loss, queue of 5 ms", {"queue_ms": 5}),
    ("no loss, queue of 50 ms", {"queue_ms": 50}),
    ("no loss, queue of 200 ms", {"queue_ms": 200}),
    ("0.1% loss, queue of 50 ms", {"queue_ms": 50, "loss": 0.001}),
    ("1% loss, queue of 50 ms", {"queue_ms": 50, "loss": 0.01}),
][size(0, -1):]
CONTROLS = size(["tolerant", "cubic", "bbr"], ["tolerant"])
# The goal on loopback: the least share of quinn alone.
LEAST_SHARE = 0.9
# The goals for the default control, on links whose queue holds at least a quarter of the round trip: the least share
# without and with loss, the largest share of packets sent again, and the share of a TCP connection beside it.
DEFAULT = CONTROLS[0]
LEAST_QUEUE = DELAY / 2  # ms
LEAST_OF_LINK, LEAST_WITH_LOSS = 0.92, 0.85
MOST_AGAIN = 0.05
TCP_PART = (0.35, 0.65)
TURNS = size(5, 1)
# Sent over loopback in a turn.
MEBIBYTES = size("2048", "32")
TCP = """
import socket, sys, time
if sys.argv[1] == "receive":
    with socket.create_server(("0.0.0.0", int(sys.argv[2]))) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        total, began, counting = 0, time.monotonic(), float(sys.argv[3])
        while data := connection.recv(1 << 20):
            if time.monotonic() - began >= counting:
                total += len(data)
        print(total * 8e-6 / (time.monotonic() - began - counting), flush=True)
else:
    with socket.socket() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        client.connect((sys.argv[2], int(sys.argv[3])))
        block, end = bytes(1 << 18), time.monotonic() + float(sys.argv[4])
        while time.monotonic() < end:
            client.sendall(block)
"""


def network(program, link):
    """Two machines joined by a link."""
    ends = [{"up_mbit": RATE}, {"up_mbit": RATE}]
    return emulated.network(program, ends, {"delay_ms": DELAY, **link})


def loopback(args):
    """Measures Shoal on loopback in turns with libraries alone."""
    programs = {
        "Shoal": [args.speed, "loopback", MEBIBYTES, "2"],
        "quinn alone": [args.plain, "quinn", MEBIBYTES, "2"],
        "TLS over TCP": [args.plain, "tls", MEBIBYTES, "2"],
    }
    rates = {name: [] for name in programs}
    for _ in range(TURNS):
        for name, command in programs.items():
            env = {**os.environ, **machine.ALLOCATOR}
            said = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
            rates[name].append(float(re.search(r"([0-9.]+) MB/s", said)[1]))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    share = medians["Shoal"] / medians["quinn alone"]
    goal = "met" if share >= LEAST_SHARE else "NOT met"
    rows = [
        [name, f"{rate:.0f}", f"{min(rates[name]):.0f} to {max(rates[name]):.0f}",
         f"{rate / medians['quinn alone']:.2f}"]
        for name, rate in medians.items()
    ]
    notes = (
        f"{MEBIBYTES} MiB in pieces of 2 MiB, both ends in one process, medians of {TURNS} turns. Shoal should have at "
        f"least {LEAST_SHARE} of quinn alone: {goal}."
    )
    table.show("On loopback", notes, ["", "MB/s", "from, to", "of quinn alone"], rows)
    return rates


def send(start, speed, address, control, seconds, *size):
    """Sends tensors of `size` KiB over the link for `seconds`, and gives the sender's report."""
    receiver = start(1, speed, "receive", f"0.0.0.0:{PORT}")
    peer = receiver.stdout.readline().strip()
    sender = start(0, speed, "send", peer, f"{address}:{PORT}", control, str(seconds), *map(str, size))
    output, _ = sender.communicate()
    if sender.returncode != 0:
        sys.exit(f"the sender failed: {output}")
    receiver.communicate()
    return json.loads(output)


def tcp(start, address, seconds, settling):
    """Sends over a TCP connection for `seconds`, and gives Mbit/s after the first `settling` seconds."""
    receiver = start(1, sys.executable, "-c", TCP, "receive", str(PORT + 1), str(settling))
    receiver.stdout.readline()
    client = start(0, sys.executable, "-c", TCP, "send", address, str(PORT + 1), str(seconds))
    client.communicate()
    return float(receiver.communicate()[0])


def alone(args):
    rows = []
    for name, link in LINKS:
        for control in CONTROLS:
            with network(args.network, link) as (start, addresses):
                told = send(start, args.speed, addresses[1], control, args.seconds)
            again = told["lost_packets"] / told["sent_packets"]
            lossless = 1 - link.get("loss", 0)
            share = told["mbit"] / (RATE * emulated.CONTENT * lossless)
            least = LEAST_WITH_LOSS if link.get("loss") else LEAST_OF_LINK
            reached = "met" if share >= least and again < MOST_AGAIN else "NOT met"
            goal = reached if control == DEFAULT and link["queue_ms"] >= LEAST_QUEUE else ""
            rows.append([name, control, f"{told['mbit']:.1f}", f"{share:.3f}", f"{again:.2%}", goal])
    headers = ["link of 200 Mbit/s, 50 ms each way", "control", "Mbit/s", "share", "sent again", "goal"]
    notes = (
        f"Shares are of the {RATE * emulated.CONTENT:.0f} Mbit/s that packets of 1500 bytes leave for content, "
        f"less the loss; the first three seconds do not count. The goal for {DEFAULT}, where the queue takes at "
        f"least {LEAST_QUEUE:.0f} ms: {LEAST_OF_LINK} without loss, {LEAST_WITH_LOSS} with, less than {MOST_AGAIN:.0%} "
        "sent again."
    )
    table.show("Alone on a link", notes, headers, rows)


def large(args):
    """Sends one large tensor at a time over a long and fast link, where streams and windows limit the throughput."""
    rate, delay, mebi = 1000, 50, 32
    rows = []
    for queue in size((20, 100), (100,)):
        link = {"delay_ms": delay, "queue_ms": queue}
        with emulated.network(args.network, [{"up_mbit": rate}, {"up_mbit": rate}], link) as (start, addresses):
            told = send(start, args.speed, addresses[1], "tolerant", 2 * args.seconds, mebi << 10)
        again = told["lost_packets"] / told["sent_packets"]
        share = told["mbit"] / (rate * emulated.CONTENT)
        rows.append([f"{queue} ms", f"{told['mbit']:.0f}", f"{share:.2f}", f"{again:.2%}"])
    # The time of a tensor, and the round trip of its acknowledgement.
    wire = mebi * 8.388608 / (rate * emulated.CONTENT)
    most = wire / (wire + 2e-3 * delay)
    notes = (
        f"Tensors of {mebi} MiB over {rate} Mbit/s, {delay} ms each way, each once the one before is "
        f"acknowledged: a share of {most:.2f} is the maximum."
    )
    table.show("One large tensor at a time", notes, ["queue", "Mbit/s", "share", "sent again"], rows)


def shared(args):
    """Starts a TCP connection, and a second later the sender of tensors."""
    rows = []
    for queue in size((20, 50, 100), (50,)):
        for control in CONTROLS:
            with network(args.network, {"queue_ms": queue}) as (start, addresses):
                seconds = 3 * args.seconds
                result = {}

                def competitor():
                    result["tcp"] = tcp(start, addresses[1], seconds + 3, 4)

                thread = threading.Thread(target=competitor)
                thread.start()
                time.sleep(1)
                told = send(start, args.speed, addresses[1], control, seconds - 1)
                thread.join()
            share = result["tcp"] / (result["tcp"] + told["mbit"])
            least, most = TCP_PART
            reached = "met" if least <= share <= most else "NOT met"
            goal = reached if control == DEFAULT else ""
            rows.append(
                [f"{queue} ms", control, f"{told['mbit']:.1f}", f"{result['tcp']:.1f}", f"{share:.2f}", goal]
            )
    headers = ["queue", "control", "Mbit/s", "TCP Cubic beside it", "TCP's share", "goal"]
    notes = (
        f"TCP (Cubic) begins a second earlier. The link is the same: {RATE} Mbit/s, {DELAY} ms. The goal: "
        f"{least} to {most} for TCP."
    )
    table.show("Beside a TCP connection on a link without loss", notes, headers, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", required=True)
    parser.add_argument("--plain", required=True)
    parser.add_argument("--network", required=True)
    parser.add_argument("--only", choices=["loopback", "large"])
    parser.add_argument("--seconds", type=int, default=size(12, 2))
    args = parser.parse_args()
    if args.only == "large":
        large(args)
        return
    loopback(args)
    if args.only == "loopback":
        return
    alone(args)
    large(args)
    shared(args)


if __name__ == "__main__":
    main()
