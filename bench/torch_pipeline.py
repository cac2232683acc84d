"""One of two processes of torch.distributed.pipelining that train the model in two stages on demand.

Arguments: a model as JSON, the rank of this process, a free port of this machine. Rank 0 reads an order from each
line of stdin, sends it to rank 1, and answers on stdout. Both train a stage over gloo.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from model import CLIP, Model
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch_llama import Stage, loss_of
from torch_train import DTYPES, Samples, optimizer_of

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
STAGES = 2


class Trainer:
    """This rank's stage, trained by one schedule with one number of microbatches."""

    def __init__(self, model, rank, schedule, microbatches, dtype):
        torch.manual_seed(1)
        self.rank = rank
        self.module = Stage(model, rank, STAGES).place("cpu", DTYPES[dtype])
        self.optimizer = optimizer_of(self.module.parameters())
        stage = PipelineStage(self.module, rank, STAGES, torch.device("cpu"))
        self.schedule = SCHEDULES[schedule](stage, microbatches, loss_fn=loss_of)

    def step(self, tokens, labels):
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        if self.rank == 0:
            self.schedule.step(tokens)
        else:
            self.schedule.step(target=labels, losses=losses)
        self.clip()
        self.optimizer.step()
        return torch.stack(losses).mean().item() if losses else 0.0

    def clip(self):
        """Clips gradients by the norm over both stages, as Shoal does."""
        parameters = list(self.module.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        square = norm.float().square()
        dist.all_reduce(square)
        torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, square.sqrt())


def orders(rank):
    """The orders that rank 0 reads, at both ranks."""
    while True:
        order = [sys.stdin.readline() if rank == 0 else None]
        dist.broadcast_object_list(order, src=0)
        if not order[0]:
            return
        yield json.loads(order[0])


def main():
    wanted, rank, port = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(wanted.pop("threads"))
    wanted.pop("device")
    path = wanted.pop("text")
    model = Model(**wanted)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=STAGES)
    samples = Samples(path, model, "cpu")
    trainers = {}
    for order in orders(rank):
        key = (order["schedule"], order["microbatches"], order["dtype"])
        trainer = trainers.get(key) or trainers.setdefault(key, Trainer(model, rank, *key))
        dist.barrier()
        start, loss = time.perf_counter(), 0.0
        for _ in range(order["steps"]):
            loss = trainer.step(*samples.batch())
        dist.barrier()
        seconds = time.perf_counter() - start
        sum_of_losses = torch.tensor(loss)
        dist.all_reduce(sum_of_losses)
        if rank == 0:
            tokens = order["steps"] * model.tokens_per_step()
            answer = {"tokens": tokens, "seconds": seconds, "loss": sum_of_losses.item()}
            print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
