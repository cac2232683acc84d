"""Evaluates models with lm-eval on a task made of the chats, without a network."""

import json
import os
import random
import subprocess
import sys

import fixtures

VERSION = "0.4.13"
QUESTIONS, CHOICES = 40, 4
TASK = """task: chats
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


def evaluate(tools, models, chats, work, checks):
    """Chooses the answer of a dialogue among four. Skips, with the reason, where lm-eval cannot run."""
    try:
        fixtures.install(tools, [f"lm-eval=={VERSION}", "transformers==5.23.0"],
                         [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade"])
        fixtures.install(tools / "more", ["accelerate==1.15.0", "psutil==7.2.2"])
    except fixtures.Missing as missing:
        checks.say(f"skipped: lm-eval: {missing}")
        return
    work.mkdir()
    make_task(chats, work)
    for name, model in models.items():
        problem, accuracy = run(tools, model, work, name)
        if problem:
            checks.check(False, f"lm-eval runs on the {name}", problem)
        else:
            checks.check(True, f"lm-eval runs on the {name}", f"accuracy {accuracy:.3f}, by chance {1 / CHOICES}")


def make_task(chats, work):
    """Writes questions with the right answer and others from the same chats."""
    dice = random.Random(0)
    rows = [json.loads(line)["messages"] for line in chats.read_text(encoding="utf-8").splitlines()]
    pairs = list({row[0]["content"]: row[1]["content"] for row in rows if len(row) == 2}.items())
    with open(work / "chats.jsonl", "w", encoding="utf-8") as out:
        for question, answer in pairs[:QUESTIONS]:
            others = sorted({other for _, other in pairs} - {answer})
            choices = [answer, *dice.sample(others, CHOICES - 1)]
            dice.shuffle(choices)
            row = {"question": question, "choices": choices, "label": choices.index(answer)}
            out.write(json.dumps(row) + "\n")
    (work / "chats.yaml").write_text(TASK.format(data=work / "chats.jsonl"), encoding="utf-8")


def run(tools, model, work, name):
    """Gives the reason why lm-eval failed, or the accuracy."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tools), str(tools / "more")]), "HF_HOME": str(work / "cache"),
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }
    out = work / name
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32",
        "--device", "cpu", "--batch_size", "4", "--include_path", str(work), "--tasks", "chats",
        "--apply_chat_template", "--output_path", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = sorted(out.rglob("results_*.json"))
    if done.returncode != 0 or not found:
        return f"exit code {done.returncode}: {done.stderr.strip()[-1500:]}", None
    return None, json.loads(found[-1].read_text(encoding="utf-8"))["results"]["chats"]["acc,none"]
