"""Trains with DeepSpeed's ZeRO-Infinity (arXiv 2104.07857): weights and moments on a disk, on the processor.

The first argument is the folder that DeepSpeed is installed in, the second an order as JSON. Prints what was measured.
"""

import json
import os
import resource
import sys
import time

sys.path.insert(0, sys.argv[1])
os.environ["PATH"] = f"{sys.argv[1]}/bin:{os.environ['PATH']}"
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}

import deepspeed
import torch
from model import BETAS, CLIP, LEARNING_RATE, WEIGHT_DECAY, Model
from torch_llama import Stage, loss_of
from torch.utils.checkpoint import checkpoint

BLOCK = 1 << 20


class Recomputed(Stage):
    """The same model, whose layers run again before their backward passes."""

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = checkpoint(layer, x, *self.angles, use_reentrant=False)
        return self.head(self.norm(x))


def settings(order, samples):
    nvme = {"device": "nvme", "nvme_path": order["folder"], "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": order["microbatches"],
        "gradient_clipping": CLIP,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {
            "lr": LEARNING_RATE, "betas": BETAS, "weight_decay": WEIGHT_DECAY, "torch_adam": False}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**nvme, "buffer_count": 8, "buffer_size": 4_000_000},
            "offload_optimizer": {**nvme, "buffer_count": 5},
            "sub_group_size": 5_000_000,
            "stage3_max_live_parameters": 10_000_000,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 5_000_000,
            "stage3_param_persistence_threshold": 2000,
        },
        "aio": {"block_size": BLOCK, "queue_depth": 16, "overlap_events": True, "single_submit": False},
    }


def main():
    order = json.loads(sys.argv[2])
    torch.set_num_threads(order["threads"])
    model = Model(**order["model"])
    samples = model.batch // order["microbatches"]
    torch.manual_seed(1)
    deepspeed.init_distributed("gloo")
    module = Recomputed(model).place("cpu", torch.float32)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=settings(order, samples))
    tokens, begun = 0, None
    for step in range(order["steps"] + 1):
        if step == 1:
            begun = time.perf_counter()
        for _ in range(order["microbatches"]):
            batch = torch.randint(0, model.vocabulary, (samples, model.context + 1))
            engine.backward(loss_of(engine(batch[:, :-1]), batch[:, 1:]))
            engine.step()
        tokens += model.tokens_per_step() if step else 0
    print(json.dumps({
        "tokens": tokens, "seconds": time.perf_counter() - begun, "version": deepspeed.__version__,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }))


if __name__ == "__main__":
    main()
