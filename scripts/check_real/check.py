"""Fine-tunes a real model, SmolLM2-135M-Instruct, on real chats with Shoal's commands, and checks the result.

    make check-real
    .venv/bin/python scripts/check_real/check.py --shoal target/release/shoal

Imports, prepares data, trains in one process and in a swarm whose peers are killed, trains with PyTorch on the same
microbatches, exports, loads the export in transformers, and evaluates it with lm-eval. Needs 15 GB of disk, 16 GB of
memory and PyPI. Prints a line with a figure for each check. Exit code 1 if one fails, 77 if a fixture cannot be had.
"""

import argparse
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))
import evaluation
import fixtures
from model import edit_toml
from swarm import STAGES, Failed, local, swarm

STEPS, MICROBATCHES, CONTEXT = 30, 2, 128
WARMUP_STEPS = 3
# Several shards, so that peers fetch them while they train.
SHARD_BYTES = "64KiB"
CHECKPOINT_EVERY = 3
# The largest difference of a step's loss to PyTorch's.
LOSS_OFF = 1e-4
# The largest difference of logits to those of PyTorch's model, as a share of what the training moved them by.
LOGITS_OFF = 0.001
# The same for the norm of the difference of all weights.
WEIGHTS_OFF = 0.001
PROMPTS = [
    "What is the capital of France?",
    "Tell me a joke",
    "What is your favorite programming language",
]
SKIPPED = 77


class Checks:
    """Prints a line for each check and counts those that fail."""

    def __init__(self):
        self.failed = 0
        self.begun = time.monotonic()

    def say(self, text):
        print(f"check-real: {time.monotonic() - self.begun:5.0f} s  {text}", flush=True)

    def check(self, good, what, figure):
        self.failed += not good
        self.say(f"{'ok    ' if good else 'FAILED'}  {what}: {figure}")


def command(*arguments):
    """Runs a command, and gives its output."""
    done = subprocess.run([str(part) for part in arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shown = " ".join(str(part) for part in arguments)
        raise Failed(f"{shown}\nended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def check_template(model, template, chats, checks):
    """The training template renders the same text as the model's."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    marked = template.read_text(encoding="utf-8")
    rows = [json.loads(line)["messages"] for line in chats.read_text(encoding="utf-8").splitlines()]
    render = lambda row, **which: tokenizer.apply_chat_template(row, tokenize=False, **which)
    equal = sum(render(row) == render(row, chat_template=marked) for row in rows)
    checks.check(equal == len(rows), "the training template renders the model's text", f"{equal} of {len(rows)} chats")


def prepare(shoal, work, checks):
    """From the model's folder and the chats to run.toml."""
    base, data, config = work / "base", work / "data", work / "run.toml"
    checks.say(command(shoal, "import", work / "model", "-o", base, "--untie").splitlines()[0])
    checks.say(command(
        shoal, "data", "prepare", work / "chats.jsonl", "--tokenizer", base, "--context", CONTEXT, "--pack", "best-fit",
        "--chat-template", work / "training.jinja", "--shard-bytes", SHARD_BYTES, "-o", data).splitlines()[0])
    command(shoal, "init", "--from", base, "--data", data, "-o", config)
    text = re.sub(r"^epochs = .*$", "steps = 0", config.read_text(encoding="utf-8"), flags=re.M)
    text = edit_toml(text, {
        "training": {
            "steps": STEPS, "stages": STAGES, "microbatches": MICROBATCHES, "dtype": '"f32"', "recompute": "false",
        },
        "optimizer": {"warmup_steps": WARMUP_STEPS},
        "evaluation": {"every": 0},
        "checkpoint": {"every": CHECKPOINT_EVERY},
    })
    config.write_text(text, encoding="utf-8")
    return config


def learning_rate(optimizer, step):
    """As docs/reference/configuration.md has it: a linear warm-up, then half a cosine."""
    high, low, warmup = (optimizer[key] for key in ("learning_rate", "final_learning_rate", "warmup_steps"))
    if step < warmup:
        return high * (step + 1) / warmup
    progress = (step - warmup) / (STEPS - 1 - warmup)
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * progress))


def training_order(shoal, config):
    """The run for the tests' PyTorch loop: microbatches and constants."""
    optimizer = tomllib.loads(config.read_text(encoding="utf-8"))["optimizer"]
    shown = lambda step, index: json.loads(
        command(shoal, "data", "show", config, "--step", step, "--microbatch", index))
    steps = [
        {
            "microbatches": [shown(step, index) for index in range(MICROBATCHES)],
            "learning_rate": learning_rate(optimizer, step),
        }
        for step in range(STEPS)
    ]
    constants = ("beta1", "beta2", "epsilon", "weight_decay", "gradient_clip")
    return {"staleness": 0, "steps": steps, **{key: optimizer[key] for key in constants}}


def train(shoal, config, work, checks):
    """Trains alone and in a swarm. Gives the losses and the swarm's checkpoint."""
    # The weights do not depend on the interval of checkpoints, and one process needs none.
    text = edit_toml(config.read_text(encoding="utf-8"), {"checkpoint": {"every": 0}})
    without = work / "without-checkpoints.toml"
    without.write_text(text, encoding="utf-8")
    alone = local(shoal, without, work / "local")
    checks.say(f"one process, one thread: {STEPS} steps in {alone.seconds:.0f} s, "
               f"losses {alone.losses[0]:.3f} to {alone.losses[-1]:.3f}")
    outcome = swarm(shoal, config, work / "swarm", checks.say)
    checks.say(f"swarm of {STAGES} peers in {STAGES} stages: {STEPS} steps and {outcome.repeated} repeated ones in "
               f"{outcome.seconds:.0f} s")
    checks.check(outcome.kills > 0, "peers were killed and replaced", f"{outcome.kills} times")
    checks.check(outcome.hash == alone.hash, "the swarm's checkpoint is that of one process",
                 f"{outcome.hash[:16]} and {alone.hash[:16]}")
    return outcome.losses, work / "swarm" / "out" / "checkpoint"


def compare(shoal, config, work, losses, checkpoint, checks):
    """Exports, and compares losses, logits and answers with PyTorch's."""
    export = work / "export"
    checks.say(command(shoal, "export", checkpoint, "-o", export).strip())
    order = work / "pytorch.json"
    fixtures.write_json(order, {
        "model": str(work / "model"), "export": str(export), "prompts": PROMPTS,
        "train": training_order(shoal, config),
    })
    begun = time.monotonic()
    script = pathlib.Path(__file__).with_name("pytorch.py")
    theirs = json.loads(command(sys.executable, script, order).splitlines()[-1])
    checks.say(f"PyTorch: {STEPS} steps and the comparison in {time.monotonic() - begun:.0f} s")
    off = max(abs(a - b) for a, b in zip(losses, theirs["losses"], strict=True))
    checks.check(off < LOSS_OFF, "losses are PyTorch's", f"largest difference {off:.1e}")
    keys = len(theirs["missing"]) + len(theirs["unexpected"]) + (not theirs["names_equal"])
    checks.check(keys == 0, "transformers loads the export", f"{keys} missing or unexpected keys")
    checks.check(
        theirs["logits_off"] < LOGITS_OFF * theirs["logits_shift"], "logits are those of PyTorch's model",
        f"largest difference {theirs['logits_off']:.1e} where training moved them by {theirs['logits_shift']:.1f}; "
        f"the largest is {theirs['logits_largest']:.1f}; {100 * theirs['logits_same']:.1f}% of the argmaxes are equal")
    share = theirs["weights_off"] / theirs["weights_moved"]
    checks.check(share < WEIGHTS_OFF, "weights are PyTorch's", f"{100 * share:.4f}% of the movement apart, as norms")
    for index, prompt in enumerate(PROMPTS):
        checks.say(f"prompt  {prompt}")
        for who in ("base", "export"):
            checks.say(f"{who:>6}  {theirs['answers'][who][index]!r}")
    return export


def run(options, checks):
    work, tools = options.out.resolve(), ROOT / "bench" / "results" / "tools"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    real = tools / "real"
    fixtures.install(real)
    sys.path.append(str(real))
    fixtures.make_model(real, work / "model")
    fixtures.training_template(work / "model", work / "training.jinja")
    chats = work / "chats.jsonl"
    fixtures.make_chats(real, chats)
    check_template(work / "model", work / "training.jinja", chats, checks)
    shoal = options.shoal.resolve()
    config = prepare(shoal, work, checks)
    losses, checkpoint = train(shoal, config, work, checks)
    export = compare(shoal, config, work, losses, checkpoint, checks)
    models = {"base": work / "model", "export": export}
    evaluation.evaluate(tools / "lm-eval", models, chats, work / "lm-eval", checks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shoal", type=pathlib.Path, default=ROOT / "target" / "release" / "shoal")
    out = ROOT / "target" / "check-real"
    parser.add_argument("--out", type=pathlib.Path, default=out, help="a folder that is replaced at the start")
    options = parser.parse_args()
    checks = Checks()
    try:
        run(options, checks)
    except fixtures.Missing as missing:
        checks.say(f"skipped: {missing}")
        sys.exit(SKIPPED)
    except Failed as failed:
        checks.check(False, "a command", failed)
    checks.say("all checks passed" if not checks.failed else f"{checks.failed} checks FAILED")
    sys.exit(1 if checks.failed else 0)


if __name__ == "__main__":
    main()
