"""All-reduce of other libraries among local processes. Prints the seconds of each round as a list.

    python bench/all_reduce_peers.py gloo PEERS VALUES
    python bench/all_reduce_peers.py gloo-rank PEERS VALUES RANK ADDRESS:PORT   (one process of gloo)
    python bench/all_reduce_peers.py hivemind PEERS VALUES COMPRESSION
"""

import json
import multiprocessing
import socket
import sys
import time

import torch
from sizes import size

WARM, ROUNDS = size((2, 8), (1, 1))
# The rounds over links, which take seconds each.
FEW_ROUNDS = size(3, 1)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def gloo(rank, peers, values, address, rounds=ROUNDS):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{address}", rank=rank, world_size=peers)
    numbers = torch.randn(values)
    seconds = []
    for _ in range(WARM + rounds):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(numbers)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    return seconds[WARM:]


def gloo_process(rank, peers, values, address, results):
    seconds = gloo(rank, peers, values, address)
    if rank == 0:
        results.put(seconds)


def hivemind(peers, values, compression):
    """hivemind starts each averager and each of its daemons as a process of its own."""
    import hivemind as library

    torch.set_num_threads(1)
    address = {"start": True, "host_maddrs": ["/ip4/127.0.0.1/tcp/0"]}
    tables = [library.DHT(**address)]
    first = [str(address) for address in tables[0].get_visible_maddrs()]
    tables += [library.DHT(initial_peers=first, **address) for _ in range(1, peers)]
    averagers = [
        library.averaging.DecentralizedAverager(
            [torch.randn(values)], table, prefix="bench", target_group_size=peers,
            min_group_size=peers,
            compression=getattr(library.compression, compression)(),
            min_matchmaking_time=2.0, request_timeout=1.0, start=True, allow_state_sharing=False,
        )
        for table in tables
    ]
    seconds = []
    # The time does not include matchmaking.
    for _ in range(WARM + ROUNDS):
        steps = [averager.step(wait=False, require_trigger=True, timeout=60) for averager in averagers]
        while any(step.stage.name != "AWAITING_TRIGGER" for step in steps):
            time.sleep(0.001)
        began = time.perf_counter()
        for step in steps:
            step.allow_allreduce()
        for step in steps:
            step.result()
        seconds.append(time.perf_counter() - began)
    for other in [*averagers, *tables]:
        other.shutdown()
    return seconds[WARM:]


def main():
    what, peers, values = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if what == "hivemind":
        print(json.dumps(hivemind(peers, values, sys.argv[4])), flush=True)
        return
    if what == "gloo-rank":
        rank, address = int(sys.argv[4]), sys.argv[5]
        print(json.dumps(gloo(rank, peers, values, address, FEW_ROUNDS)), flush=True)
        return
    spawn = multiprocessing.get_context("spawn")
    results, address = spawn.Queue(), f"127.0.0.1:{free_port()}"
    processes = [
        spawn.Process(target=gloo_process, args=(rank, peers, values, address, results))
        for rank in range(peers)
    ]
    for process in processes:
        process.start()
    print(json.dumps(results.get(timeout=250)), flush=True)
    for process in processes:
        process.join(timeout=20)
        process.kill()


if __name__ == "__main__":
    main()
