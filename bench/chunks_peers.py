"""Seconds of torchft's HTTP transport for MIB of tensors over loopback from another process:
`chunks_peers.py MIB CHUNKS`."""

import datetime
import multiprocessing
import sys
import time

import torch
from torchft.checkpointing.http_transport import HTTPTransport

TIMEOUT = datetime.timedelta(seconds=60)
TENSORS = 64


def serve(mib, chunks, pipe):
    state = {str(i): torch.rand((mib << 18) // TENSORS) for i in range(TENSORS)}
    transport = HTTPTransport(timeout=TIMEOUT, num_chunks=chunks)
    transport.send_checkpoint(dst_ranks=[1], step=1, state_dict=state, timeout=TIMEOUT)
    pipe.send(transport.metadata())
    pipe.recv()
    transport.shutdown()


def main():
    mib, chunks = int(sys.argv[1]), int(sys.argv[2])
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(mib, chunks, there))
    server.start()
    metadata = here.recv()
    transport = HTTPTransport(timeout=TIMEOUT, num_chunks=chunks)
    times = []
    for _ in range(3):
        start = time.monotonic()
        transport.recv_checkpoint(src_rank=0, metadata=metadata, step=1, timeout=TIMEOUT)
        times.append(time.monotonic() - start)
    here.send("done")
    server.join()
    print(sorted(times)[1])
    transport.shutdown()


if __name__ == "__main__":
    main()
