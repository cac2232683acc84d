"""Computes a model's logits with transformers, and the ids of texts, for `shoal import --check`.

Reads from stdin, as JSON: model (a folder), tokens (ids), texts, and logits (the file to write: f32 [tokens, vocabulary]).
Prints one JSON object: what was found, or `problem` with what its kind needs.
"""

import importlib
import importlib.util
import json
import os
import sys

OLDEST = 5


def answer():
    request = json.load(sys.stdin)
    for module in ["torch", "transformers"]:
        if importlib.util.find_spec(module) is None:
            return {"problem": "missing", "module": module}
    for module in ["torch", "transformers"]:
        try:
            importlib.import_module(module)
        except Exception as error:
            return {"problem": "broken", "module": module, "reason": reason(error)}
    import transformers

    if int(transformers.__version__.split(".")[0]) < OLDEST:
        return {"problem": "version", "found": transformers.__version__}
    try:
        return {"transformers": transformers.__version__, **logits(request), **ids(request)}
    except MemoryError:
        return {"problem": "memory"}
    except Exception as error:
        # torch has no error of its own for this.
        if "allocate memory" in str(error):
            return {"problem": "memory"}
        return {"problem": "failed", "reason": reason(error)}


def reason(error):
    return f"{type(error).__name__}: {error}"[:2000]


def logits(request):
    import torch
    from transformers import AutoModelForCausalLM

    # Nothing is fetched, and no code of the model's folder is run.
    model, report = AutoModelForCausalLM.from_pretrained(
        request["model"], dtype=torch.float32, attn_implementation="eager", use_safetensors=True,
        local_files_only=True, output_loading_info=True,
    )
    drawn = sorted(report["missing_keys"])
    if drawn:
        raise ValueError(f"no file has the weights {', '.join(drawn[:3])}, which transformers would draw at random")
    with torch.inference_mode():
        values = model.eval()(input_ids=torch.tensor([request["tokens"]]), use_cache=False).logits[0]
    values.float().contiguous().numpy().tofile(request["logits"])
    return {"shape": list(values.shape)}


def ids(request):
    """The ids by AutoTokenizer, and those by tokenizer.json alone."""
    if not request["texts"]:
        return {"ids": [], "plain": []}
    try:
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(request["model"], local_files_only=True)
        plain = Tokenizer.from_file(os.path.join(request["model"], "tokenizer.json"))
        return {
            "ids": [list(tokenizer(text)["input_ids"]) for text in request["texts"]],
            "plain": [plain.encode(text).ids for text in request["texts"]],
        }
    except Exception as error:
        return {"no_tokenizer": reason(error)}


def main():
    # What libraries print is no answer.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    out.write(json.dumps(answer()))
    out.close()


main()
