"""Others' all-reduce among processes of this machine; prints the seconds of each round as a list.

    python bench/all_reduce_peers.py gloo PEERS VALUES
    python bench/all_reduce_peers.py hivemind PEERS VALUES COMPRESSION
"""

import json
import multiprocessing
import socket
import sys
import time

import torch

WARM, ROUNDS = 2, 8


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def gloo(rank, peers, values, port, results):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=peers)
    numbers = torch.randn(values)
    seconds = []
    for _ in range(WARM + ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(numbers)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        results.put(seconds[WARM:])


def hivemind(rank, peers, values, compression, first, barrier, results):
    import hivemind as library

    torch.set_num_threads(1)
    dht = library.DHT(
        initial_peers=[first] if first else [], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]
    )
    if not first:
        results.put(str(dht.get_visible_maddrs()[0]))
    averager = library.averaging.DecentralizedAverager(
        [torch.randn(values)], dht, prefix="bench", target_group_size=peers, min_group_size=peers,
        compression=library.compression.BASE_COMPRESSION_TYPES[compression],
        min_matchmaking_time=1.0, request_timeout=1.0, start=True, allow_state_sharing=False,
    )
    barrier.wait()
    seconds = []
    # Who averages with whom is found out before: only what follows is timed.
    for _ in range(WARM + ROUNDS):
        control = averager.step(wait=False, require_trigger=True, timeout=60)
        while not control.stage.name == "AWAITING_TRIGGER":
            time.sleep(0.001)
        barrier.wait()
        began = time.perf_counter()
        control.allow_allreduce()
        control.result()
        barrier.wait()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        results.put(seconds[WARM:])
    barrier.wait()
    averager.shutdown()
    dht.shutdown()


def main():
    what, peers, values = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    processes = []

    def start(target, *arguments):
        process = spawn.Process(target=target, args=arguments)
        process.start()
        processes.append(process)

    if what == "gloo":
        port = free_port()
        for rank in range(peers):
            start(gloo, rank, peers, values, port, results)
    else:
        barrier = spawn.Barrier(peers)
        start(hivemind, 0, peers, values, sys.argv[4], None, barrier, results)
        first = results.get(timeout=120)
        for rank in range(1, peers):
            start(hivemind, rank, peers, values, sys.argv[4], first, barrier, results)
    print(json.dumps(results.get(timeout=250)))
    for process in processes:
        process.join(timeout=20)
        process.kill()


if __name__ == "__main__":
    main()
