"""Tiny random models of every family that can be imported.

make FOLDER [NAME]   writes each model as transformers does, and prints their logits for some tokens as JSON
check RUNS.json      trains each with PyTorch alone on given batches, and compares with trained exports

A norm or bias that is left out or misplaced must show, so their weights are random too."""

import json
import pathlib
import sys

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from reference import train

SMALL = dict(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0}
LATENT = dict(num_key_value_heads=4, kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10, n_routed_experts=6,
              n_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=24, topk_method="greedy")
SIGMOID = {key: value for key, value in LATENT.items() if key != "topk_method"}
MODELS = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", dict(attention_bias=True, mlp_bias=True, head_dim=10, tie_word_embeddings=True)),
    "llama-scaled": ("Llama", dict(rope_parameters=LLAMA3)),
    "llama-linear": ("Llama", dict(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})),
    "mistral": ("Mistral", dict(head_dim=6, sliding_window=5)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-windows": ("Qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=2)),
    "qwen3": ("Qwen3", dict(head_dim=12)),
    "qwen3-biased": ("Qwen3", dict(head_dim=8, attention_bias=True, tie_word_embeddings=True)),
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 0, 1, 0], tie_word_embeddings=False, pad_token_id=0)),
    "phi3": ("Phi3", dict(pad_token_id=0, partial_rotary_factor=0.75)),
    "olmo2": ("Olmo2", {}),
    "gemma3": ("Gemma3", dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=13,
                              layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"])),
    "gemma3-untied": ("Gemma3", dict(head_dim=8, sliding_window=64, tie_word_embeddings=False)),
    "neox": ("GPTNeoX", dict(num_key_value_heads=None, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})),
    "neox-sequential": ("GPTNeoX", dict(num_key_value_heads=None, use_parallel_residual=False, tie_word_embeddings=True,
                                        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0})),
    "gpt2": ("GPT2", None),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "mixtral-windows": ("Mixtral", dict(num_local_experts=6, num_experts_per_tok=3, sliding_window=5, tie_word_embeddings=True)),
    "qwen2-moe": ("Qwen2Moe", dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
                                   shared_expert_intermediate_size=28, decoder_sparse_step=2)),
    "qwen2-moe-windows": ("Qwen2Moe", dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
                                           shared_expert_intermediate_size=16, norm_topk_prob=True, qkv_bias=False,
                                           use_sliding_window=True, sliding_window=4, max_window_layers=3)),
    "qwen3-moe": ("Qwen3Moe", dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
                                   head_dim=12, mlp_only_layers=[1])),
    "qwen3-moe-windows": ("Qwen3Moe", dict(num_experts=6, num_experts_per_tok=4, moe_intermediate_size=16, head_dim=8,
                                           attention_bias=True, tie_word_embeddings=True, use_sliding_window=True,
                                           sliding_window=4)),
    "olmoe": ("Olmoe", dict(num_experts=8, num_experts_per_tok=4, pad_token_id=0)),
    "olmoe-switch": ("Olmoe", dict(num_experts=6, num_experts_per_tok=1, pad_token_id=0)),
    "olmoe-normed": ("Olmoe", dict(num_experts=4, num_experts_per_tok=4, norm_topk_prob=True, attention_bias=True,
                                   pad_token_id=0)),
    "gpt-oss": ("GptOss", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=5, pad_token_id=0)),
    "gpt-oss-mxfp4": ("GptOss", dict(num_local_experts=3, num_experts_per_tok=2, head_dim=12, intermediate_size=64,
                                     sliding_window=128, attention_bias=False, tie_word_embeddings=True, pad_token_id=0,
                                     layer_types=["full_attention", "sliding_attention"] * 2,
                                     rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
    "deepseek-v2": ("DeepseekV2", LATENT | dict(q_lora_rank=None, first_k_dense_replace=1, rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.9})),
    "deepseek-v2-groups": ("DeepseekV2", LATENT | dict(q_lora_rank=18, v_head_dim=12, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3,
                                                       topk_method="group_limited_greedy", n_group=4, topk_group=2, attention_bias=True,
                                                       routed_scaling_factor=2.5, tie_word_embeddings=True)),
    "deepseek-v3": ("DeepseekV3", SIGMOID | dict(q_lora_rank=18, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, n_group=4, topk_group=2,
                                                 first_k_dense_replace=1, routed_scaling_factor=2.5, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.9})),
    "deepseek-v3-plain": ("DeepseekV3", SIGMOID | dict(q_lora_rank=None, n_group=1, topk_group=1, first_k_dense_replace=0, norm_topk_prob=False,
                                                       rope_interleave=False, tie_word_embeddings=True)),
    "glm4-moe": ("Glm4Moe", SIGMOID | dict(num_key_value_heads=2, head_dim=12, use_qk_norm=True, attention_bias=True, n_group=2, topk_group=1)),
    "glm4-moe-lite": ("Glm4MoeLite", SIGMOID | dict(q_lora_rank=None, mlp_layer_types=["sparse", "dense", "sparse", "sparse"])),
    "gemma3-yarn": ("Gemma3", dict(head_dim=8, sliding_window=6, tie_word_embeddings=False, query_pre_attn_scalar=13, rope_parameters={
        "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}},
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"])),
    "llama-yarn": ("Llama", dict(rope_parameters=YARN)),
    "llama-longrope": ("Llama", dict(rope_parameters={"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 12,
                                                      "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2, 3.5, 6.0]})),
    "llama-dynamic": ("Llama", dict(max_position_embeddings=10, rope_parameters={"rope_type": "dynamic", "factor": 12.8})),
    "qwen3-yarn": ("Qwen3", dict(head_dim=12, rope_parameters=YARN | {
        "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 4, "beta_slow": 0.5, "truncate": False})),
    # With its cache, transformers continues texts that become longer than the short factors are for as this engine does.
    "phi3-longrope": ("Phi3", dict(pad_token_id=0, partial_rotary_factor=0.75, original_max_position_embeddings=40, rope_parameters={
        "rope_type": "longrope", "short_factor": [1.0, 1.2, 1.4], "long_factor": [1.5, 3, 5.5]})),
    "olmo2-dynamic": ("Olmo2", dict(max_position_embeddings=8, rope_parameters={"rope_type": "dynamic", "factor": 16.0})),
    "neox-yarn": ("GPTNeoX", dict(num_key_value_heads=None, rope_parameters=YARN | {"partial_rotary_factor": 0.75, "attention_factor": 1.3})),
    "qwen3-moe-balanced": ("Qwen3Moe", dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0, 1, 3],
                                            output_router_logits=True, router_aux_loss_coef=0.3)),
    "mixtral-balanced": ("Mixtral", dict(num_local_experts=6, num_experts_per_tok=2, output_router_logits=True,
                                         router_aux_loss_coef=0.5)),
}


CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def small_tokenizer():
    """Bytes, a few merges and ChatML: 300 tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator([pathlib.Path(__file__).read_text()], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT
    )


def pack_experts(model):
    """Gives the experts random weights in MXFP4, and returns their blocks and scales by the names of tensors."""
    packed = {}
    for key, weight in model.named_parameters():
        if key.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            experts, inputs, outputs = weight.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(119, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
            packed |= {key + "_blocks": blocks, key + "_scales": scales}
            weight.copy_(convert_moe_packed_tensors(blocks, scales))
    return packed


def write_packed(place, packed):
    """Puts packed experts into the place of those of a model's files, as the files of GPT-OSS have them."""
    path = place / "model.safetensors"
    tensors = load_file(path)
    for key in packed:
        tensors.pop(key.removesuffix("_blocks").removesuffix("_scales"), None)
    save_file(tensors | packed, path, metadata={"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (place / "config.json").write_text(json.dumps(config))


def make(folder, *names):
    torch.manual_seed(1)
    tokenizer = small_tokenizer()
    logits = {}
    tokens = torch.arange(16).unsqueeze(0) * 17 % 300
    for name, (family, options) in MODELS.items():
        if names and name not in names:
            continue
        if options is None:
            config = transformers.GPT2Config(
                vocab_size=300, n_embd=32, n_layer=4, n_head=4, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, initializer_range=0.1,
            )
        else:
            options = {key: value for key, value in (SMALL | options).items() if value is not None or key == "q_lora_rank"}
            kind = family + ("TextConfig" if family == "Gemma3" else "Config")
            config = getattr(transformers, kind)(**options, initializer_range=0.1)
        model = getattr(transformers, family + ("LMHeadModel" if family == "GPT2" else "ForCausalLM"))(config).eval()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if weight.dim() == 1 or key.endswith("_bias"):
                    weight.add_(torch.randn_like(weight) * 0.2)
            for key, biases in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    biases.add_(torch.randn_like(biases) * 0.2)
            packed = pack_experts(model) if "mxfp4" in name else {}
            logits[name] = model(tokens).logits.flatten().tolist()
        place = pathlib.Path(folder, name)
        tokenizer.save_pretrained(place)
        model.save_pretrained(place, max_shard_size="40KB" if name == "llama" else "1GB")
        if packed:
            model.save_pretrained(place / "unpacked")
            write_packed(place, packed)
    print(json.dumps({"tokens": tokens.flatten().tolist(), "logits": logits}))


def check(path):
    torch.set_num_threads(1)
    results = {}
    for name, run in json.loads(pathlib.Path(path).read_text()).items():
        model = AutoModelForCausalLM.from_pretrained(run["source"], dtype=torch.float32)
        if run["untied"]:
            head = torch.nn.Parameter(model.get_output_embeddings().weight.detach().clone())
            model.get_output_embeddings().weight = head
        result = train(model, run)
        trained, report = AutoModelForCausalLM.from_pretrained(
            run["export"], dtype=torch.float32, output_loading_info=True
        )
        for what in ["missing_keys", "unexpected_keys", "mismatched_keys"]:
            assert not report[what], (name, what, report[what])
        assert type(trained) is type(model), (type(trained), type(model))
        mine, theirs = model.state_dict(), trained.state_dict()
        assert mine.keys() == theirs.keys(), (name, mine.keys() ^ theirs.keys())
        offs = {key: (mine[key] - theirs[key]).abs().max().item() for key in mine}
        result["furthest"] = max(offs, key=offs.get)
        result["off"] = offs[result["furthest"]]
        with torch.no_grad():
            result["logits"] = trained.eval()(torch.tensor([run["tokens"]])).logits.flatten().tolist()
        results[name] = result
    print(json.dumps(results))


{"make": make, "check": check}[sys.argv[1]](*sys.argv[2:])
