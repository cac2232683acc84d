"""A process of DDP, FSDP2 or tensor parallelism that trains the model over gloo, on demand (torch_ranks.py).

An order names the `strategy`. With DDP and FSDP2 each rank has its part of the microbatches, and gradients are reduced
once a step. With TP each rank has its part of every matrix of a layer.
"""

import contextlib

import torch
import torch.distributed as dist
from model import CLIP
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch_llama import Stage, loss_of
from torch_ranks import clip, serve
from torch_train import DTYPES, optimizer_of


class Trainer:
    """The model at this rank, and its optimizer. Each rank has the same samples, and takes its own."""

    def __init__(self, model, rank, microbatches, dtype):
        torch.manual_seed(1)
        self.rank, self.ranks, self.microbatches = rank, dist.get_world_size(), microbatches
        self.module = self.spread(Stage(model).place("cpu", DTYPES[dtype]))
        self.optimizer = optimizer_of(self.parameters())

    def parameters(self):
        return list(self.module.parameters())

    def own(self, parts):
        """The microbatches of this rank."""
        return parts[self.rank :: self.ranks]

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)

    def step(self, tokens, labels):
        self.optimizer.zero_grad(set_to_none=True)
        parts = self.own(list(zip(tokens.chunk(self.microbatches), labels.chunk(self.microbatches))))
        total = 0.0
        for index, part in enumerate(parts):
            with self.reducing(index == len(parts) - 1):
                loss = loss_of(self.module(part[0]), part[1])
                (loss / len(parts)).backward()
            total += loss.item()
        self.clip()
        self.optimizer.step()
        return total / len(parts) / self.ranks


class Replicated(Trainer):
    """DistributedDataParallel, with one all-reduce a step."""

    def spread(self, module):
        return DistributedDataParallel(module, gradient_as_bucket_view=True)

    def reducing(self, last):
        return contextlib.nullcontext() if last else self.module.no_sync()


class Sharded(Trainer):
    """FSDP2: a step gathers the weights once, and has one reduce-scatter of the gradients of each layer."""

    def spread(self, module):
        mesh = init_device_mesh("cpu", (self.ranks,))
        for layer in module.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        return fully_shard(module, mesh=mesh, reshard_after_forward=False)

    @contextlib.contextmanager
    def reducing(self, last):
        self.module.set_is_last_backward(last)
        self.module.set_requires_gradient_sync(last)
        self.module.set_reshard_after_backward(last)
        yield


class Split(Trainer):
    """Tensor parallelism: the first matrix of attention and feed-forward is split by rows, the second by columns.

    Queries, keys and values share the first matrix, and so do gate and up. A rank takes its rows for those of its own
    heads and channels. As initial weights are random, the model is the same with its rows in another order.
    """

    def spread(self, module):
        mesh = init_device_mesh("cpu", (self.ranks,))
        plan = {
            "attention.mix": ColwiseParallel(),
            "attention.output": RowwiseParallel(),
            "gate_up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        for layer in module.layers:
            parallelize_module(layer, mesh, plan)
            layer.attention.heads //= self.ranks
        return module

    def parameters(self):
        """In two groups: the fused optimizer takes no split tensors beside whole ones."""
        return [{"params": group} for group in self.groups()]

    def groups(self):
        """The parameters of which each rank has a part, and those that all ranks have alike."""
        groups = [], []
        for parameter in self.module.parameters():
            groups[not isinstance(parameter, DTensor)].append(parameter)
        return groups

    def own(self, parts):
        return parts

    def reducing(self, last):
        return contextlib.nullcontext()

    def clip(self):
        clip(*self.groups())


STRATEGIES = {"DDP": Replicated, "FSDP2": Sharded, "TP": Split}


def trainer_of(model, rank, strategy, microbatches, dtype):
    return STRATEGIES[strategy](model, rank, microbatches, dtype)


if __name__ == "__main__":
    serve(trainer_of)
