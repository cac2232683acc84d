"""Prints the keys that the classes of the families in engine/src/family read from config.json, as JSON.

    .venv/bin/python scripts/family-keys.py > engine/src/family/transformers.json

`fields` are those of the class with their defaults; `others` are what the class, its model or the rotary embeddings take
from a file besides. `cargo test -p shoal-engine family` compares engine/src/family/keys.rs with the file, so a new version of
transformers shows its differences."""

import dataclasses
import inspect
import json
import re
import sys

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers import modeling_rope_utils

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "olmo2", "gemma3_text", "gpt_neox", "gpt2", "mixtral",
            "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"]
# Of all models: labels, outputs and the like, which change no logits.
GENERAL = {field.name for field in dataclasses.fields(PreTrainedConfig)}
OTHER = re.compile(r"""(?:kwargs\.(?:pop|get)\(|getattr\((?:self\.)?config, |getattr\(self, )["']([a-z_]+)["']""")
# Names of attributes that no file has, or that only models of another kind read.
INTERNAL = {"layer_type", "is_causal", "per_layer_config", "cache_params", "mask_token_id", "num_labels", "token_type_ids", "output_attentions"}


def others(kind, model):
    sources = [inspect.getsource(kind), inspect.getsource(sys.modules[model.__module__])]
    if "rope_parameters" in {field.name for field in dataclasses.fields(kind)}:
        mixin = inspect.getsource(modeling_rope_utils.RotaryEmbeddingConfigMixin)
        sources += [mixin, 'getattr(self, "rope_scaling") getattr(self, "rope_theta")']
        sources += ['getattr(self, "original_max_position_embeddings")']
    return {name for source in sources for name in OTHER.findall(source)} | set(kind.attribute_map) | set(kind.attribute_map.values())


def main():
    found = {}
    for name in FAMILIES:
        kind = CONFIG_MAPPING[name]
        model = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
        model = model[0] if isinstance(model, tuple) else model
        fields = {
            field.name: None if field.default is dataclasses.MISSING else field.default
            for field in dataclasses.fields(kind)
            if (field.name not in GENERAL or field.name == "tie_word_embeddings") and not field.name.startswith("_")
        }
        rest = {key for key in others(kind, model) if not key.startswith("_")}
        found[name] = {"fields": fields, "others": sorted(rest - set(fields) - GENERAL - INTERNAL)}
    print(json.dumps(found, indent=1))


main()
