"""Trains a model with TRL 1.16 and with the loop of preferences.py, which a test compares Shoal with, and prints how far they
are apart after 20 steps. In a folder DIR, with a model of families.py:

    pip install --target DIR --no-deps trl==1.16.0 datasets dill multiprocess xxhash pyarrow pandas pytz tzdata aiohttp
    python families.py make MODELS llama
    PYTHONPATH=DIR python beside_trl.py MODELS/llama
"""

import random
import sys
import tempfile
import uuid

import datasets.fingerprint
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from preferences import both, load, loss_of

# Rows are not cached, and their hash would need all of this file.
datasets.fingerprint.Hasher.hash = classmethod(lambda *_: uuid.uuid4().hex)

STEPS, PAIRS, RATE, BETA = 20, 2, 1e-3, 0.1
NAMES = {"dpo": "sigmoid", "ipo": "ipo"}


def rows():
    dice = random.Random(1)
    return [
        {"prompt": f"what is {number}?", "chosen": f" it is {number}", "rejected": f" it may be {dice.randint(0, 9999)} or so"}
        for number in range(STEPS * PAIRS)
    ]


def trained_by_trl(folder, name, scratch):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    settings = DPOConfig(
        output_dir=scratch, per_device_train_batch_size=PAIRS, max_steps=STEPS, learning_rate=RATE, max_grad_norm=1.0,
        lr_scheduler_type="constant", loss_type=NAMES[name], beta=BETA, weight_decay=0.0, logging_steps=1, report_to=[],
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, save_strategy="no",
    )
    model, data = load(folder), Dataset.from_list(rows())
    trainer = DPOTrainer(
        model=model, ref_model=load(folder), args=settings, train_dataset=data, processing_class=tokenizer,
    )
    data = trainer.train_dataset
    trainer._get_train_sampler = lambda *_, **__: torch.utils.data.SequentialSampler(data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return model, losses, [{which: list(row[f"{which}_ids"]) for which in ("prompt", "chosen", "rejected")} for row in data]


def trained_by_the_loop(folder, name, pairs):
    model, reference = load(folder), load(folder)
    run = {"loss": name, "beta": BETA, "gamma": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for pair in pairs[step * PAIRS : (step + 1) * PAIRS]:
            with torch.no_grad():
                references = both(reference, pair)
            loss, _ = loss_of(run, pair, both(model, pair), references)
            (loss / PAIRS).backward()
            total += loss.item() / PAIRS
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return model, losses


def main(folder):
    torch.set_num_threads(1)
    for name in NAMES:
        with tempfile.TemporaryDirectory() as scratch:
            theirs, their_losses, pairs = trained_by_trl(folder, name, scratch)
        ours, our_losses = trained_by_the_loop(folder, name, pairs)
        losses = max(abs(one - other) for one, other in zip(our_losses, their_losses, strict=True))
        both_states = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
        weights = max((one - other).abs().max().item() for one, other in both_states)
        print(f"{name}: losses from {our_losses[0]:.4f} to {our_losses[-1]:.4f}, apart {losses:.1e}; weights apart {weights:.1e}")


main(sys.argv[1])
