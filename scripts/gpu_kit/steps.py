"""The steps of a kit, the most valuable first: a name, a limit in seconds, and the command."""

import dataclasses
import json

# Names of tests of the engine, which need neither Python nor files of the project.
BITS = [
    "stages::several_in_flight_in_any_order",
    "islands::islands_compute_the_bits_of_one_device_in_bf16",
]
TIERS = ["device_memory::with_bf16_too", "device_memory::weights_that_pass_through"]
SLICES = ["slices::devices_that_share_slices_compute_the_bits_of_one_within_a_subspace"]
ADAPTERS = ["device_memory::with_adapters_too"]
GENERATION = ["generation::a_long_prompt"]

SEVEN = {"hidden": 4096, "layers": 1, "heads": 32, "intermediate": 11008, "context": 2048, "batch": 8,
         "vocabulary": 32000, "key_value_heads": 32}
ONE = {"hidden": 2048, "layers": 22, "heads": 32, "intermediate": 5632, "context": 2048, "batch": 16,
       "vocabulary": 32000, "key_value_heads": 4}
# With figures that mean nothing.
TINY = {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 128, "context": 32, "batch": 4,
        "vocabulary": 256, "key_value_heads": 2}


@dataclasses.dataclass(frozen=True)
class Step:
    name: str
    limit: int
    command: list
    # Lines for its standard input.
    orders: tuple = ()


def tests(kit, name, names, limit=60):
    return Step(name, limit, [f"{kit}/tests", *names, "--test-threads", "4"])


def training(kit, name, model, microbatches, packed=False, limit=60):
    """A step of warm-up, then measured ones."""
    asked = {**model, "device": "cuda:0", "threads": 1, "text": f"{kit}/text.txt", "tied": False, "packed": packed}
    order = json.dumps({"dtype": "bf16", "microbatches": microbatches, "steps": 1})
    return Step(name, limit, [f"{kit}/train_rounds", json.dumps(asked)], (order,) * 3)


def peer(kit, name, model, microbatches, variant, python, device):
    asked = {**model, "device": device, "threads": 1, "text": f"{kit}/text.txt", "tied": False}
    order = {"dtype": "bf16", "microbatches": microbatches, "steps": 1, "variant": variant}
    if name.endswith("compiled"):
        order["compiled"] = True
    return Step(name, 60, [python, f"{kit}/torch_train.py", json.dumps(asked)], (json.dumps(order),) * 3)


def all_steps(kit, python, stand_in):
    seven, one = (TINY, TINY) if stand_in else (SEVEN, ONE)
    device = "cpu" if stand_in else "cuda:0"
    ceilings = [python, f"{kit}/ceilings.py", device, "256" if stand_in else "8192"]
    several = [("7B, one layer: PyTorch, eager", "plain"), ("7B, one layer: transformers", "transformers")]
    if not stand_in:
        several.insert(1, ("7B, one layer: PyTorch, compiled", "plain"))
    return [
        Step("device", 60, [f"{kit}/shoal", "doctor", "--device", "cuda:0", "--data-dir", f"{kit}/data"]),
        tests(kit, "bits", BITS),
        Step("ceilings", 30, ceilings),
        training(kit, "7B, one layer: Shoal", seven, 2),
        training(kit, "1B: Shoal", one, 4, limit=75),
        tests(kit, "tiers", TIERS),
        *(peer(kit, name, seven, 2, variant, python, device) for name, variant in several),
        training(kit, "1B, packed: Shoal", one, 4, packed=True, limit=75),
        tests(kit, "slices", SLICES),
        tests(kit, "adapters", ADAPTERS),
        tests(kit, "generation", GENERATION),
    ]
