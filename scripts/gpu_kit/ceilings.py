"""What a device reaches at most: products of random matrices, and copies from pinned memory. Prints JSON."""

import json
import sys
import time

import torch

SECONDS = 1.0


def rate(work, wait):
    """Calls in a second."""
    for _ in range(3):
        work()
    wait()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        work()
        wait()
        calls += 1
    return calls / (time.perf_counter() - start)


def main():
    device, side = torch.device(sys.argv[1]), int(sys.argv[2])
    is_gpu = device.type == "cuda"
    wait = torch.cuda.synchronize if is_gpu else (lambda: None)
    # Constants are multiplied faster: they need less power.
    left, right = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    product = 2 * side**3 * rate(lambda: left @ right, wait)
    kept = torch.zeros(256 * side * side // 64, dtype=torch.uint8)
    kept = kept.pin_memory() if is_gpu else kept
    there = torch.empty_like(kept, device=device)
    copied = kept.numel() * rate(lambda: there.copy_(kept, non_blocking=True), wait)
    name = torch.cuda.get_device_name(device) if is_gpu else "processor"
    print(json.dumps({"device": name, "torch": torch.__version__, "tflops": product / 1e12, "copy GB/s": copied / 1e9}))


if __name__ == "__main__":
    main()
