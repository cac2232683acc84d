"""Tokens, chats and masks of transformers, to compare with.

Usage: golden.py FOLDER TEXT...

Trains a small tokenizer on the texts, writes a model's folder for each family of chat templates into FOLDER, and
prints tokens and assistant masks as JSON.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<pad>",
]

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{{ tools | tojson }}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- generation %}
        {%- if message.reasoning_content is defined and loop.index0 == ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{ tool_call | tojson(sort_keys=true, indent=1, ensure_ascii=true) }}
        {%- endfor %}
        {{- content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined and false %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if role == "model" -%}
        {%- generation -%}
        {{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}
        {%- endgeneration -%}
    {%- else -%}
        {{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}
    {%- endif -%}
{%- endfor -%}
"""

PLAIN = """\
{% for message in messages %}
  {% if message['role'] == 'assistant' %}
Answer:{% generation %} {{ message['content'] }} {{ message | tojson }}
{{ eos_token }}{% endgeneration %}

  {% elif message['role'] == 'user' %}
Question: {{ message['content'] | tojson }}, {{ loop.first }}, {{ none }}, {{ undefined_name }}, {{ [1, 2.5, {"a": none}] | tojson(indent=2) }}
  {% else %}
    {% if loop.index > 5 %}{% break %}{% endif %}
{{ message['role'].upper() }}: {{ message.get('content', '').split('\\n')[0].title() }}
  {% endif %}
{% endfor %}
"""

FAMILIES = {
    "chatml": (CHATML, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "llama": (LLAMA, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "gemma": (GEMMA, {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}),
    "plain": (PLAIN, {"eos_token": "<|endoftext|>"}),
}

CHATS = [
    [("user", "What is a shoal?"), ("assistant", "A group of fish.")],
    [
        ("system", "Be brief."),
        ("user", "Count to three.\n"),
        ("assistant", "  1, 2, 3  "),
        ("user", "Again, with \"quotes\" & <tags>"),
        ("assistant", "1\n2\n3\n"),
    ],
    [("user", "日本語 🐟 für ß"), ("assistant", "さかな 🐠🐡 ok\u00e9e\u0301")],
    [("user", "a <|im_end|> b"), ("assistant", "c <|eot_id|><end_of_turn> d <|endoftext|>")],
    [("user", "empty"), ("assistant", "")],
    [("user", "private \U0010fffd \ue000"), ("assistant", "use \U0010fffd\U0010fffc \ue001 \x7f\x01")],
    [("user", "only a question")],
    [("user", "x" * 300), ("assistant", "y " * 300), ("user", "1"), ("assistant", "2")],
    [("assistant", "an answer first")],
]

TEXTS = [
    "",
    "one line",
    "  spaces   and\ttabs \n\n\nand lines\r\n",
    "日本語 🐟 für ß e\u0301",
    "a <|im_end|> special <bos> token <eos>",
    "fn main() { println!(\"{}\", 1 + 2); }\n" * 20,
]


def train(files):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(files, trainer)
    return tokenizer


def train_metaspace(files):
    """As SentencePiece does: words begin with U+2581, and unknown characters become bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=[*SPECIAL, "<unk>", *bytes_], show_progress=False, limit_alphabet=60
    )
    tokenizer.train(files, trainer)
    description = json.loads(tokenizer.to_str())
    plain = [token for token in description["added_tokens"] if token["content"] not in bytes_]
    description["added_tokens"] = plain
    return Tokenizer.from_str(json.dumps(description))


def with_bos(tokenizer, bos):
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def messages(chat):
    return [{"role": role, "content": content} for role, content in chat]


def family(folder, tokenizer, template, special):
    if "bos_token" in special:
        tokenizer = with_bos(tokenizer, special["bos_token"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(fast) + 5}))
    chats = []
    for chat in [*map(messages, CHATS), reasoning(), tools()]:
        try:
            text = fast.apply_chat_template(chat, tokenize=False)
        except Exception as error:
            chats.append({"messages": json.dumps(chat), "error": str(error)})
            continue
        masked = fast.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        chats.append(
            {"messages": json.dumps(chat), "text": text, "ids": masked["input_ids"], "mask": masked["assistant_masks"]}
        )
    return {
        "folder": str(folder),
        "bos": fast.bos_token_id,
        "eos": fast.eos_token_id,
        "pad": fast.pad_token_id,
        "vocabulary": len(fast) + 5,
        "texts": [
            {
                "text": text,
                "ids": fast(text)["input_ids"],
                "plain": fast(text, add_special_tokens=False)["input_ids"],
                "offsets": fast(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"],
                "decoded": fast.decode(fast(text)["input_ids"]),
            }
            for text in TEXTS
        ],
        "chats": chats,
    }


def reasoning():
    chat = messages([("user", "think"), ("assistant", "done")])
    chat[1]["thinking"] = "\nhm\n"
    chat[0]["name"] = None
    return chat


def tools():
    chat = messages([("user", "call"), ("assistant", None), ("tool", "21")])
    arguments = {"z": 1.0, "a": [True, None, "\u00e9<'>"], "m": {}, "b": 1e20, "c": -0.00001, "d": []}
    chat[1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    return chat


def main():
    folder, *files = map(Path, sys.argv[1:])
    tokenizer = train([str(file) for file in files])
    metaspace = train_metaspace([str(file) for file in files])
    result = {}
    for name, (template, special) in FAMILIES.items():
        for kind, trained in {"bytes": tokenizer, "metaspace": metaspace}.items():
            place = folder / f"{name}-{kind}"
            place.mkdir(parents=True)
            result[place.name] = family(place, trained, template, special)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
