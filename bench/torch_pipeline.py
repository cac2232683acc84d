"""A process of torch.distributed.pipelining that trains a stage of the model over gloo, on demand (torch_ranks.py)."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch_llama import Stage, loss_of
from torch_ranks import clip, serve
from torch_train import DTYPES, optimizer_of

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


class Trainer:
    """This rank's stage, trained by one schedule with one number of microbatches."""

    def __init__(self, model, rank, schedule, microbatches, dtype):
        torch.manual_seed(1)
        self.rank, stages = rank, dist.get_world_size()
        self.module = Stage(model, rank, stages).place("cpu", DTYPES[dtype])
        self.optimizer = optimizer_of(self.module.parameters())
        stage = PipelineStage(self.module, rank, stages, torch.device("cpu"))
        self.schedule = SCHEDULES[schedule](stage, microbatches, loss_fn=loss_of)

    def step(self, tokens, labels):
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        if self.rank == 0:
            self.schedule.step(tokens)
        else:
            self.schedule.step(target=labels, losses=losses)
        clip(list(self.module.parameters()))
        self.optimizer.step()
        return torch.stack(losses).mean().item() if losses else 0.0


if __name__ == "__main__":
    serve(Trainer)
