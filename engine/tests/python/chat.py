"""Answers messages with the likeliest tokens, as JSON: model folder, system message, messages as JSON, tokens of an
answer. Also gives the answer to the bare first message, without the chat template."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    folder, system, messages, tokens = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def answer(prompt):
        ids = torch.tensor([prompt])
        result = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=int(tokens),
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
        return tokenizer.decode(result[0, len(prompt):], skip_special_tokens=True)

    conversation = [{"role": "system", "content": system}]
    answers = []
    for message in json.loads(messages):
        conversation.append({"role": "user", "content": message})
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        answers.append(answer(tokenizer.encode(text, add_special_tokens=False)))
        conversation.append({"role": "assistant", "content": answers[-1]})
    bare = answer(tokenizer.encode(json.loads(messages)[0]))
    print(json.dumps({"answers": answers, "bare": bare}))


main()
