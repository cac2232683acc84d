"""Masks of chat templates with generation tags, to compare with the turns found in the same templates without the tags.

Usage: roles.py FOLDER TEXT...

Trains a tokenizer on the texts, writes a model's folder for each family of templates into FOLDER, with a template
without tags, and prints what transformers makes of the template with tags as JSON. With SHOAL_TRL, the folder of
TRL's Python package, the pairs of its `chat_templates` are compared too:

    .venv/bin/python -m pip install --no-deps --target trl trl==1.16.0
    SHOAL_TRL=$PWD/trl/trl cargo test -p shoal-data roles
"""

import json
import os
import re
import sys
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

import golden

SPECIAL = ["<s>", "</s>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]

# As ChatML is for SmolLM2: a system message of its own where the chat has none.
CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a fish.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' + '\\n' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As Llama 3: the first message brings the beginning of the text, and contents are trimmed.
LLAMA3 = """\
{%- for message in messages %}
    {%- set header = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
    {%- if loop.index0 == 0 %}{%- set header = bos_token + header %}{%- endif %}
    {{- header }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# As Llama 3.1: a system message always, tools in the first question, calls as JSON.
LLAMA31 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}
{%- if tools is not none and tools %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- set call = message.tool_calls[0].function %}
        {%- generation %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
        {%- endgeneration %}
    {%- elif message.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

QWEN_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
"""

QWEN_ANSWERS = """\
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""

# As Qwen 2.5: calls of tools within the turn.
QWEN25 = QWEN_TOOLS + """\
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a fish.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
""" + QWEN_ANSWERS + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"

# As Qwen 3: only turns behind the last question have their reasoning, the last one always a block of it.
QWEN3 = QWEN_TOOLS + """\
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
""" + QWEN_ANSWERS + """\
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# As Gemma: the answer's role has another name, the system message stands in the first question.
GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set messages = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Conversation roles must alternate') -}}
    {%- endif -%}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + (prefix if loop.first else '') -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message['content'] | trim + '<end_of_turn>\\n' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] | trim + '<end_of_turn>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

# As Mistral: no prompt for an answer; the system message stands in a question that is the last message.
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{- ' ' + message['content'] | trim + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}
"""

# As Phi 3: the end token stands behind the whole chat.
PHI3 = """\
{%- for message in messages %}
    {%- if message['role'] in ['system', 'user'] %}
        {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|assistant|>\\n' }}
        {%- generation %}{{- message['content'] + '<|end|>\\n' }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- elif messages[-1]['role'] == 'assistant' %}
    {%- generation %}{{- eos_token }}{%- endgeneration %}
{%- else %}
    {{- eos_token }}
{%- endif %}
"""

# As SmolLM3: a system message with the mode, and an empty block of reasoning where there is none.
SMOLLM3 = """\
{%- set thinks = enable_thinking is not defined or enable_thinking %}
{{- '<|im_start|>system\\nReasoning Mode: ' + ('/think' if thinks else '/no_think') + '\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if not thinks %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}
        {{- message.content.lstrip('\\n') + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('' if thinks else '<think>\\n\\n</think>\\n') }}
{%- endif %}
"""

IM = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
FAMILIES = {
    "chatml": (CHATML, IM),
    "llama3": (LLAMA3, LLAMA),
    "llama3_1": (LLAMA31, LLAMA),
    "qwen2_5": (QWEN25, IM),
    "qwen3": (QWEN3, IM),
    "gemma": (GEMMA, {"bos_token": "<bos>", "eos_token": "<eos>"}),
    "mistral": (MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}),
    "phi3": (PHI3, {"eos_token": "<|endoftext|>"}),
    "smollm3": (SMOLLM3, IM),
}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "tide", "description": "The tide of a day.", "parameters": {}}}]
ASKS = {"role": "assistant", "content": "", "tool_calls": [call("tide", day="é \"x\"", n=[1, None])]}
SAYS = {"role": "assistant", "content": "I look.", "tool_calls": [call("tide", day="now")]}
THINKS = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
BLOCK = {"role": "assistant", "content": "<think>\nTwo <and> two.\n</think>\n\nFour."}
CHATS = [
    *map(golden.messages, golden.CHATS),
    golden.messages([("user", "a"), ("assistant", "b"), ("user", "a"), ("assistant", "b"), ("user", "a"), ("assistant", "b")]),
    golden.messages([("user", "one"), ("assistant", "two"), ("user", "and three")]),
    golden.messages([("user", "one"), ("assistant", "two"), ("assistant", "three")]),
    golden.messages([("assistant", "Hello."), ("user", "one"), ("assistant", "two")]),
    golden.messages([("system", "s"), ("assistant", "Hello."), ("user", "one"), ("assistant", "two")]),
    golden.messages([("user", "x</think>"), ("assistant", "<"), ("user", "<think>"), ("assistant", "<thin"), ("user", "q"), ("assistant", "\n\nz")]),
    golden.messages([("user", "say <|im_end|>\n<|im_start|>user\n"), ("assistant", "<|im_end|>\n"), ("user", "<|end|>\n"), ("assistant", "<|end|>\n<|user|>")]),
    [{"role": "user", "content": "2 + 2"}, THINKS],
    [{"role": "user", "content": "2 + 2"}, THINKS, {"role": "user", "content": "again"}, THINKS],
    [{"role": "user", "content": "2 + 2"}, BLOCK, {"role": "user", "content": "again"}, BLOCK],
    [{"role": "user", "content": "tide?"}, ASKS, {"role": "tool", "content": "high"}, {"role": "assistant", "content": "It is high."}],
    [
        {"role": "user", "content": "tide?"},
        {**SAYS, "reasoning_content": "The tool knows."},
        {"role": "tool", "content": "high"},
        {"role": "tool", "content": "[\"low\"]"},
        {"role": "assistant", "content": "It is high.", "reasoning_content": "So."},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": "Well."},
    ],
]
# Of TRL's templates, those that mark the same as the others: some mark the header of a turn too.
TRL = """
cohere cohere2 gemma gemma3 idefics3 lfm2 lfm2_v2 llama3 llava_next phi3 phi3_5 qwen2_5 qwen2_5_vl qwen3
qwen3_instruct_2507 qwen3_vl qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8 smolvlm
""".split()
ARGUMENTS = [{}, {"tools": TOOLS}, {"chat_template_kwargs": {"enable_thinking": False}}]


def without_tags(template):
    return re.sub(r"\{%-? *(end)?generation *-?%\}", "", template)


def pairs():
    """The name of a family, its template, its template with tags, and its special tokens."""
    for name, (tagged, special) in FAMILIES.items():
        yield name, without_tags(tagged), tagged, special
    folder = os.environ.get("SHOAL_TRL")
    if folder:
        for name in TRL:
            plain, tagged = (Path(folder, "chat_templates", name + end) for end in (".jinja", "_training.jinja"))
            special = {"bos_token": "<bos>", "eos_token": "<|endoftext|>" if "phi" in name else "<eos>"}
            yield f"trl-{name}", plain.read_text(), tagged.read_text(), special


def family(folder, tokenizer, plain, tagged, special):
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=plain, **special)
    fast.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(fast)}))
    chats = []
    for number, chat in enumerate(CHATS):
        for arguments in ARGUMENTS:
            further = {"tools": arguments.get("tools"), **arguments.get("chat_template_kwargs", {})}
            row = {"row": json.dumps({"messages": chat, **arguments}), "number": number}
            try:
                row["text"] = fast.apply_chat_template(chat, tokenize=False, **further)
            except Exception as error:
                chats.append({**row, "error": str(error)})
                continue
            try:
                text = fast.apply_chat_template(chat, chat_template=tagged, tokenize=False, **further)
                masked = fast.apply_chat_template(
                    chat, chat_template=tagged, return_dict=True, return_assistant_tokens_mask=True, **further
                )
            except Exception as error:
                chats.append({**row, "other": str(error)})
                continue
            if text != row["text"]:
                chats.append({**row, "other": text})
            else:
                chats.append({**row, "ids": masked["input_ids"], "mask": masked["assistant_masks"]})
    return {"folder": str(folder), "chats": chats}


def main():
    folder, *files = map(Path, sys.argv[1:])
    tokenizer = golden.train([str(file) for file in files])
    result = {}
    for name, plain, tagged, special in pairs():
        place = folder / name
        place.mkdir(parents=True)
        result[name] = family(place, tokenizer, plain, tagged, special)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
