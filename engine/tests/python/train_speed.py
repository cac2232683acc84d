"""Training speed of eager PyTorch on the model of examples/train_speed.rs, with the same arguments:
[dtype] [threads] [hidden] [layers] [microbatches] [stages, ignored] [seconds]."""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig


def main():
    defaults = ["f32", "1", "256", "4", "4", "1", "10"]
    given = sys.argv[1:]
    dtype, *numbers = given + defaults[len(given):]
    threads, hidden, layers, microbatches, _, seconds = map(int, numbers)
    torch.set_num_threads(threads)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, max_position_embeddings=128, use_cache=False,
        attn_implementation="sdpa",
    )
    model = AutoModelForCausalLM.from_config(config).to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randint(0, 256, (microbatches, 8, 129))

    def step():
        optimizer.zero_grad()
        for batch in batches:
            logits = model(batch[:, :-1]).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss / microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(2):
        step()
    start, busy, steps = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - start < seconds:
        step()
        steps += 1
    tokens = steps * microbatches * 8 * 128
    rate = tokens / (time.perf_counter() - start)
    busy = tokens / (time.process_time() - busy)
    print(f"pytorch {dtype} threads {threads}: {rate:.0f} tokens/s, {busy:.0f} per processor second")


main()
