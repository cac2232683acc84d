"""Random tokenizers of all classes that are read, as AutoTokenizer reads their folders.

Usage: tokenizer_walk.py FOLDER SEED COUNT

Writes COUNT folders with random added tokens, flags and special tokens, and prints their ids of random texts as JSON."""

import json
import os
import pathlib
import random
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import tokenizers as t
from transformers import AutoTokenizer

WORDS = ["heron", "river", "the", "Boat", "12", "é", "\u65e5\u672c", "\U0001f41f", "\n", "  ", "def", "(", "!", "\t"]
NEW = ["<n>", "<|x|>", "[A]", "heron", " gap ", "<e>", "\u00e9t\u00e9"]
CORPUS = ["the heron waits at the river while small fish swim past the reeds", "a boat with red sails left the harbour"] * 4


def byte_level():
    tokenizer = t.Tokenizer(t.models.BPE())
    tokenizer.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = t.decoders.ByteLevel()
    alphabet = t.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, t.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False, special_tokens=["<|endoftext|>", "<s>", "</s>"]))
    return tokenizer


def sentence_piece():
    tokenizer = t.Tokenizer(t.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = t.normalizers.Sequence([t.normalizers.Prepend("\u2581"), t.normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = t.decoders.Sequence([t.decoders.Replace("\u2581", " "), t.decoders.ByteFallback(), t.decoders.Fuse()])
    byte = [f"<0x{i:02X}>" for i in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(["\u2581" + c.replace(" ", "\u2581") for c in CORPUS], t.trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*special, *byte], show_progress=False))
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [one for one in data["added_tokens"] if one["content"] in special]
    return t.Tokenizer.from_str(json.dumps(data))


def write(folder, dice):
    folder.mkdir(parents=True)
    pieces = dice.random() < 0.4
    tokenizer = sentence_piece() if pieces else byte_level()
    if dice.random() < 0.5:
        tokenizer.post_processor = t.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    config = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>" if pieces else "<|endoftext|>"}
    model = {"model_type": dice.choice(["llama", "qwen3", "mistral", "olmo2", "gpt2"]), "vocab_size": 1000}
    config["tokenizer_class"] = "LlamaTokenizer" if pieces else dice.choice(["GPT2Tokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"])
    if dice.random() < 0.3:
        config["add_prefix_space"] = dice.choice([True, False])
    if dice.random() < 0.3:
        config["legacy"] = dice.choice([True, False])
    flags = lambda text: {"content": text, "lstrip": dice.random() < 0.3, "rstrip": dice.random() < 0.3,
                          "single_word": dice.random() < 0.2, "normalized": dice.random() < 0.4, "special": dice.random() < 0.5}
    size, new = tokenizer.get_vocab_size(), dice.sample(NEW, 3)
    kind = dice.choice(["decoder", "file", "extra", "map", "names", "none"])
    if kind == "decoder":
        decoder = {str(one.pop("id")): one for one in json.loads(tokenizer.to_str())["added_tokens"]}
        config["added_tokens_decoder"] = decoder | {str(size + at): flags(text) for at, text in enumerate(new)}
    elif kind == "file":
        (folder / "added_tokens.json").write_text(json.dumps({text: size + at for at, text in enumerate(new)}))
    elif kind == "extra":
        config[dice.choice(["extra_special_tokens", "additional_special_tokens"])] = new
    elif kind == "map":
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": new[0], "additional_special_tokens": new[1:]}))
    elif kind == "names":
        config |= {"eos_token": new[0], "pad_token": new[1], "image_token": new[2]}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(model))
    return {"config": config, "model": model["model_type"], "kind": kind}


def main(folder, seed, count):
    found = []
    for number in range(int(count)):
        dice = random.Random(f"{seed}-{number}")
        place = pathlib.Path(folder, str(number))
        about = write(place, dice)
        tokenizer = AutoTokenizer.from_pretrained(place)
        texts = ["".join(dice.choice(WORDS + NEW + [" "]) for _ in range(dice.randint(1, 12))) for _ in range(8)]
        ids = [[tokenizer(text)["input_ids"], tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]
        found.append({"about": about, "eos": tokenizer.eos_token_id, "texts": texts, "ids": ids})
    print(json.dumps(found))


main(*sys.argv[1:])
