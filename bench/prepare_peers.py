"""Tokenizes and packs text with Hugging Face's `datasets`, as its language modelling examples do: `map` with a
tokenizer, then `map` with `group_texts`. Prints a line of JSON with the number of tokens and of rows.

    python prepare_peers.py LIBRARIES TOKENIZER SOURCE OUT CONTEXT PROCESSES

LIBRARIES is a folder with `datasets`. Attention masks and copies of the tokens as labels, which the examples write too,
are left out.
"""

import json
import os
import sys

LIBRARIES, TOKENIZER, SOURCE, OUT, CONTEXT, PROCESSES = sys.argv[1:]
# After the packages of this Python, whose versions fit together.
sys.path.append(LIBRARIES)
os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
# Each process has a thread, as the examples' warnings recommend.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import datasets
import transformers

datasets.disable_progress_bars()
transformers.logging.set_verbosity_error()
tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)


def tokenize(batch):
    rows = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return {"input_ids": [row + [tokenizer.eos_token_id] for row in rows], "length": [len(row) + 1 for row in rows]}


def group_texts(batch):
    stream = [token for row in batch["input_ids"] for token in row]
    length = int(CONTEXT)
    whole = len(stream) // length * length
    return {"input_ids": [stream[start: start + length] for start in range(0, whole, length)]}


def main():
    options = {"batched": True, "num_proc": int(PROCESSES)}
    source = datasets.load_dataset("json", data_files=SOURCE, split="train", cache_dir=OUT)
    encoded = source.map(tokenize, remove_columns=source.column_names, **options)
    rows = encoded.map(group_texts, remove_columns=encoded.column_names, **options)
    tokens = sum(sum(batch["length"]) for batch in encoded.select_columns("length").iter(100_000))
    print(json.dumps({"tokens": tokens, "rows": len(rows)}))


if __name__ == "__main__":
    main()
