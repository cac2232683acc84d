"""The side of PyTorch: trains the same model on the same microbatches, and compares the exported model with the result.

The one argument is a JSON file: `model` and `export` are folders, `untied` says that the head has a matrix of its own,
`train` is the order for the tests' loop, `prompts` are questions. Prints JSON.
"""

import json
import os
import pathlib
import sys

import torch
import transformers

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "engine" / "tests" / "python"))
import reference

ANSWER_TOKENS = 32


def main():
    order = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.disable_progress_bar()
    base, _ = load(order["model"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(order["export"])
    answers = {"base": [answer(base, tokenizer, prompt) for prompt in order["prompts"]]}
    untie(base)
    # With a padding index, PyTorch does not train the embedding of that token, which here also ends each answer.
    base.model.embed_tokens.padding_idx = None
    start = reference.copy(base)
    result = reference.train(base, order["train"])
    export, loading = load(order["export"])
    answers["export"] = [answer(export, tokenizer, prompt) for prompt in order["prompts"]]
    result |= {
        "missing": sorted(loading["missing_keys"]),
        "unexpected": sorted(loading["unexpected_keys"]),
        "answers": answers,
        **compare(base, export, start, order["train"]["steps"][0]["microbatches"]),
    }
    print(json.dumps(result))


def load(folder):
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True)
    return model.eval(), loading


def untie(model):
    """Gives the head a matrix of its own with the embedding's values, as `shoal import --untie` does."""
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())


def answer(model, tokenizer, prompt):
    """The most likely answer to a question."""
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True).strip()


def compare(trained, export, start, microbatches):
    """Differences of logits and weights between PyTorch's model and the exported one. The logits are those of the
    first step's samples. `shift` is how far training moved them."""
    ours, theirs = export.state_dict(), trained.state_dict()
    samples = torch.cat([torch.tensor(batch["inputs"]) for batch in microbatches])
    moved = distance(start, theirs)
    off = distance(ours, theirs)
    with torch.no_grad():
        ours_logits, theirs_logits = export(samples).logits, trained(samples).logits
        trained.load_state_dict(start)
        before = trained(samples).logits
    same = ours_logits.argmax(-1) == theirs_logits.argmax(-1)
    return {
        "logits_off": (ours_logits - theirs_logits).abs().max().item(),
        "logits_largest": theirs_logits.abs().max().item(),
        "logits_shift": (theirs_logits - before).abs().max().item(),
        "logits_same": same.float().mean().item(),
        "weights_off": off,
        "weights_moved": moved,
        "names_equal": ours.keys() == theirs.keys(),
    }


def distance(some, others):
    """The norm of the difference of all weights."""
    squares = [(some[name] - others[name]).double().square().sum() for name in others]
    return torch.stack(squares).sum().sqrt().item()


if __name__ == "__main__":
    main()
