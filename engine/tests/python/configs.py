"""Random values of config.json for tiny models of every family, as transformers reads them.

make FOLDER SEED COUNT   writes COUNT models a family, and prints their logits for some tokens as JSON; a configuration that
                         transformers itself refuses is left out

Keys of other families are among them: what a class does not read must change nothing."""

import json
import pathlib
import random
import sys

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

TOKENS = [n * 17 % 64 for n in range(24)]
ABSENT = ...
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
YARNS = [YARN, YARN | {"original_max_position_embeddings": 32, "beta_fast": 4, "beta_slow": 0.5, "truncate": False},
         YARN | {"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.3}, YARN | {"mscale": 0.5, "attention_factor": 0.8}]
LONGROPES = [
    {"rope_type": "longrope", "short_factor": [1.0 + n / 8 for n in range(pairs)], "long_factor": [2 + n for n in range(pairs)],
     "original_max_position_embeddings": original} | more
    for pairs, original, more in [(4, 16, {}), (6, 32, {"factor": 3.0}), (4, 20, {"attention_factor": 1.3}), (3, 16, {})]
]
# Its wavelengths change where a text is longer than max_position_embeddings.
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 900.0}, "sliding_attention": {"rope_theta": 90.0}}
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             max_position_embeddings=64, initializer_range=0.2)
OLD_SIZES = dict(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=0.2)
VALUES = {
    "sliding_window": [None, 4, 4096],
    "use_sliding_window": [True, True, False],
    "max_window_layers": [0, 1, 28],
    "layer_types": [["full_attention", "sliding_attention", "full_attention"], ["full_attention"] * 3],
    "rope_theta": [500.0, 20000],
    "rope_scaling": [None, {}, LINEAR, {"type": "linear", "factor": 2.0}, LLAMA3 | {"original_max_position_embeddings": 16}, LLAMA3,
                     {"type": "su"} | {key: value for key, value in LONGROPES[0].items() if key != "rope_type"}, DYNAMIC, *YARNS, *LONGROPES],
    "rope_parameters": [None, {"rope_type": "default", "rope_theta": 700.0}, LINEAR | {"rope_theta": 300.0}, NESTED,
                        {"rope_type": "default", "partial_rotary_factor": 0.5}, DYNAMIC, DYNAMIC, *YARNS, *LONGROPES],
    "partial_rotary_factor": [0.5, 1.0],
    "rotary_pct": [0.5, 1.0],
    "rotary_emb_base": [300, 20000],
    "rope_local_base_freq": [300.0],
    "original_max_position_embeddings": [16],
    "sliding_window_pattern": [2, 6],
    "query_pre_attn_scalar": [13, 64],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "tie_word_embeddings": [True, False],
    "head_dim": [8, 12],
    "num_key_value_heads": [2, 4],
    "hidden_act": ["silu", "gelu", "gelu_pytorch_tanh"],
    "hidden_activation": ["silu", "gelu"],
    "activation_function": ["gelu", "silu"],
    "rms_norm_eps": [1e-2],
    "layer_norm_eps": [1e-2],
    "layer_norm_epsilon": [1e-2],
    "no_rope_layers": [[1, 0, 1], [0, 0, 1, 1]],
    "no_rope_layer_interval": [2],
    "use_parallel_residual": [True, False],
    "scale_attn_weights": [True, False],
    "n_inner": [None, 40],
    "pretraining_tp": [2],
    "use_cache": [False],
    "num_experts": [4],
    "num_local_experts": [4],
    "num_experts_per_tok": [1, 2, 4],
    "moe_intermediate_size": [16, 24],
    "shared_expert_intermediate_size": [16, 24],
    "norm_topk_prob": [True, False],
    "decoder_sparse_step": [1, 2, 3, 4],
    "mlp_only_layers": [None, [], [0, 2], [1, 7]],
    "qkv_bias": [True, False],
    "clip_qkv": [None],
    "router_jitter_noise": [0.0, 0.1],
    "output_router_logits": [False, False, True],
    "router_aux_loss_coef": [0.1],
    "n_routed_experts": [4],
    "n_shared_experts": [1, 2],
    "first_k_dense_replace": [0, 1, 4],
    "routed_scaling_factor": [1.0, 2.5],
    "topk_method": ["greedy", "group_limited_greedy"],
    "n_group": [2],
    "topk_group": [1, 2],
    "q_lora_rank": [None, 12],
    "kv_lora_rank": [20],
    "qk_nope_head_dim": [8],
    "qk_rope_head_dim": [4],
    "v_head_dim": [8, 10],
    "swiglu_alpha": [1.702, 1.0],
    "swiglu_limit": [7.0, 5.0],
    "mlp_layer_types": [["dense", "sparse", "sparse"], ["sparse", "dense", "sparse"], None],
    "rope_interleave": [True, False],
    "use_qk_norm": [True, False],
    "num_nextn_predict_layers": [0, 1],
}
# Without these a tiny model would have the sizes of a large one.
NEEDED = {"num_key_value_heads": 0.9, "head_dim": 0.8, "num_experts": 0.9, "num_experts_per_tok": 0.9,
          "n_routed_experts": 0.9, "n_group": 0.9, "q_lora_rank": 0.9, "kv_lora_rank": 0.9, "qk_nope_head_dim": 0.9, "qk_rope_head_dim": 0.9,
          "v_head_dim": 0.9, "moe_intermediate_size": 0.9, "shared_expert_intermediate_size": 0.9}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "olmo2", "gemma3_text", "gpt_neox", "gpt2", "mixtral",
            "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"]


def draw(family, dice):
    config = {"model_type": family, "pad_token_id": 0} | (OLD_SIZES if family == "gpt2" else SIZES)
    for key, values in VALUES.items():
        value = dice.choice(values)
        if dice.random() < NEEDED.get(key, 0.3):
            config[key] = value
    if family not in ["gemma3_text", "gpt2"] and (config.get("rope_scaling") or config.get("rope_parameters")) == DYNAMIC:
        config["max_position_embeddings"] = 12
    return config


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits.flatten()


def make(folder, seed, count):
    torch.set_num_threads(1)
    made = {}
    for family in FAMILIES:
        found, tries = 0, 0
        while found < int(count) and tries < 40 * int(count):
            name = f"{family}-{seed}-{tries}"
            dice = random.Random(name)
            torch.manual_seed(tries)
            config = draw(family, dice)
            tries += 1
            place = pathlib.Path(folder, name)
            try:
                kind = CONFIG_MAPPING[family].from_dict(json.loads(json.dumps(config)))
                model = AutoModelForCausalLM.from_config(kind)
                with torch.no_grad():
                    for key, weight in model.named_parameters():
                        if weight.dim() == 1 or key.endswith("_bias"):
                            weight.add_(torch.randn_like(weight) * 0.2)
                    for key, biases in model.named_buffers():
                        if key.endswith("e_score_correction_bias"):
                            biases.add_(torch.randn_like(biases) * 0.2)
                model.save_pretrained(place)
                (place / "config.json").write_text(json.dumps(config))
                values = logits(place)
            except Exception:  # transformers refuses it in many ways
                continue
            if torch.isfinite(values).all():
                made[name] = {"config": config, "logits": values.tolist()}
                found += 1
        assert found == int(count), (family, found)
    print(json.dumps({"tokens": TOKENS, "models": made}))


{"make": make}[sys.argv[1]](*sys.argv[2:])
