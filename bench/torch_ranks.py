"""One of several processes that train one model together over gloo, on demand.

Arguments: a model as JSON, the rank of this process, the number of processes, a free port of this machine. Rank 0 reads
an order from each line of stdin, sends it to the others, and answers on stdout. If a rank cannot train, the answer
has the first line of rank 0's error, and all ranks end.
"""

import json
import os
import sys
import time
import traceback

import torch
import torch.distributed as dist
from model import CLIP, Model
from torch_train import Samples


def serve(trainer_of):
    """Trains as ordered. `trainer_of(model, rank, **order)` gives a trainer, whose `step(tokens, labels)` gives this
    rank's part of the loss; the loss is the sum over all ranks."""
    wanted, rank, ranks, port = json.loads(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(wanted.pop("threads"))
    wanted.pop("device")
    path = wanted.pop("text")
    model = Model(**wanted)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    samples = Samples(path, model, "cpu")
    trainers = {}
    try:
        for order in orders(rank):
            steps, key = order.pop("steps"), json.dumps(order)
            trainer = trainers.get(key) or trainers.setdefault(key, trainer_of(model, rank, **order))
            answer = train(trainer, samples, steps)
            if rank == 0:
                print(json.dumps({**answer, "tokens": steps * model.tokens_per_step()}), flush=True)
    except Exception as error:
        traceback.print_exc()
        if rank == 0:
            first = next(iter(str(error).splitlines()), "")
            print(json.dumps({"error": f"{type(error).__name__}: {first}"}), flush=True)
        os._exit(1)
    dist.barrier()
    # The end of the interpreter sometimes waits for gloo's threads, or aborts in them.
    os._exit(0)


def orders(rank):
    """The orders that rank 0 reads, at all ranks."""
    while True:
        order = [sys.stdin.readline() if rank == 0 else None]
        dist.broadcast_object_list(order, src=0)
        if not order[0]:
            return
        yield json.loads(order[0])


def train(trainer, samples, steps):
    """Trains for some steps. Gives their seconds, and the loss of the last one."""
    dist.barrier()
    start, loss = time.perf_counter(), 0.0
    for _ in range(steps):
        loss = trainer.step(*samples.batch())
    dist.barrier()
    seconds = time.perf_counter() - start
    sum_of_losses = torch.tensor(loss)
    dist.all_reduce(sum_of_losses)
    return {"seconds": seconds, "loss": sum_of_losses.item()}


def clip(apart, alike=()):
    """Clips gradients by the norm of the whole gradient, as Shoal does. Each rank has other parameters `apart` or
    other parts of them, and the same parameters `alike`."""
    square = norm_of(apart).square()
    dist.all_reduce(square)
    if alike:
        square += norm_of(alike).square()
    for parameters in (apart, alike):
        torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, square.sqrt())


def norm_of(parameters):
    """The norm of what this rank has of the gradients, in f32."""
    gradients = [parameter.grad for parameter in parameters]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
    return torch.nn.utils.get_total_norm(local).float()
