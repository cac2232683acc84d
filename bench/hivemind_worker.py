"""One of several peers of hivemind's Optimizer with local steps: they average their weights now and then.

    python bench/hivemind_worker.py '{"model": {...}, "peers": 2, "every": 100, "address": "10.0.0.1", ...}'

Prints the addresses at which it listens and reads those of the first peer from stdin, an empty line if it is the first.
Ends after some averages, and prints the seconds, tokens and bytes of all but the first ones.
"""

import json
import os
import sys
import time

import torch
from model import Model
from torch_llama import Stage, loss_of
from torch_train import optimizer_of

LONGEST = 300  # seconds


def sent_bytes(over_loopback):
    """The bytes that left this machine, or those of all processes over its loopback."""
    with open("/proc/net/dev") as file:
        lines = [line.split() for line in file.readlines()[2:]]
    return sum(int(fields[9]) for fields in lines if (fields[0] == "lo:") == over_loopback)


def main():
    import hivemind

    options = json.loads(sys.argv[1])
    model, over_loopback = Model(**options["model"]), options["address"] == "127.0.0.1"
    torch.set_num_threads(1)
    table_options = {"start": True, "host_maddrs": [f"/ip4/{options['address']}/tcp/0"]}
    table = None
    if options["first"]:
        table = hivemind.DHT(**table_options)
        print(json.dumps([str(address) for address in table.get_visible_maddrs()]), flush=True)
    first = json.loads(sys.stdin.readline())
    table = table or hivemind.DHT(initial_peers=first, **table_options)

    torch.manual_seed(0)
    stage = Stage(model).place("cpu", torch.float32)
    optimizer = hivemind.Optimizer(
        dht=table, run_id="bench", target_batch_size=options["peers"] * options["every"] * model.batch,
        batch_size_per_step=model.batch, params=stage.parameters(), optimizer=optimizer_of, use_local_updates=True,
        matchmaking_time=options["matchmaking"], averaging_timeout=60.0,
        state_averaging_compression=getattr(hivemind.compression, options["compression"])(),
        averager_opts={"request_timeout": 1.0},
    )
    random = torch.Generator().manual_seed(options["rank"])
    began, limit = None, time.monotonic() + LONGEST
    # A peer may miss averages, and catch up by several.
    while began is None or optimizer.local_epoch < first_epoch + options["averages"]:
        if time.monotonic() > limit:
            sys.exit(f"{optimizer.local_epoch} averages in {LONGEST} s")
        if began is None and optimizer.local_epoch >= options["skipped"]:
            began, first_epoch = time.perf_counter(), optimizer.local_epoch
            tokens, sent = 0, sent_bytes(over_loopback)
        windows = torch.randint(model.vocabulary, (model.batch, model.context + 1), generator=random)
        loss_of(stage(windows[:, :-1]), windows[:, 1:].contiguous()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if began is not None:
            tokens += model.tokens_per_step()
    seconds, sent = time.perf_counter() - began, sent_bytes(over_loopback) - sent
    print(json.dumps({"seconds": seconds, "tokens": tokens, "sent": sent}), flush=True)
    # The others may still average. The end of the interpreter waits for threads of the library.
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main()
