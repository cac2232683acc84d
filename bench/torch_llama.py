"""The same model in eager PyTorch: as plain modules, and that of transformers."""

import torch
from torch import nn
from torch.nn import functional

# Rank of adapters; their alpha is twice as large.
LORA_RANK = 16


class Attention(nn.Module):
    """Causal self-attention with rotary embedding; queries, keys and values in one matrix."""

    def __init__(self, model):
        super().__init__()
        # Tensor parallelism leaves each process a part of the heads.
        self.heads, self.channels = model.heads, model.hidden // model.heads
        self.mix = nn.Linear(model.hidden, 3 * model.hidden, bias=False)
        self.output = nn.Linear(model.hidden, model.hidden, bias=False)

    def forward(self, x, cosine, sine):
        samples, tokens, _ = x.shape
        mixed = self.mix(x).view(samples, tokens, 3 * self.heads, self.channels)
        turned = rotate(mixed[:, :, : 2 * self.heads], cosine, sine)
        queries, keys = turned.split(self.heads, dim=2)
        attended = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            mixed[:, :, 2 * self.heads :].transpose(1, 2),
            is_causal=True,
        )
        return self.output(attended.transpose(1, 2).flatten(2))


def rotate(x, cosine, sine):
    """Rotary embedding of `[samples, tokens, heads, channels]` in the half-rotation layout."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)


class Layer(nn.Module):
    """One decoder layer; gate and up in one matrix."""

    def __init__(self, model):
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden, eps=1e-5)
        self.attention = Attention(model)
        self.feed_forward_norm = nn.RMSNorm(model.hidden, eps=1e-5)
        self.gate_up = nn.Linear(model.hidden, 2 * model.intermediate, bias=False)
        self.down = nn.Linear(model.intermediate, model.hidden, bias=False)

    def forward(self, x, cosine, sine):
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Stage(nn.Module):
    """Consecutive layers; the first stage embeds, the last gives logits."""

    def __init__(self, model, stage=0, stages=1):
        super().__init__()
        first, last = stage == 0, stage == stages - 1
        self.embedding = nn.Embedding(model.vocabulary, model.hidden) if first else None
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers // stages))
        self.norm = nn.RMSNorm(model.hidden, eps=1e-5) if last else None
        self.head = nn.Linear(model.hidden, model.vocabulary, bias=False) if last else None
        self.angles = rotary_angles(model)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def place(self, device, dtype):
        self.to(device, dtype)
        self.angles = [table.to(device, dtype) for table in self.angles]
        return self

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, *self.angles)
        return x if self.head is None else self.head(self.norm(x))


def rotary_angles(model):
    """Cosines and sines `[tokens, 1, channels / 2]`."""
    channels = model.hidden // model.heads
    frequencies = 10_000.0 ** (-torch.arange(0, channels, 2) / channels)
    angles = torch.arange(model.context).outer(frequencies).unsqueeze(1)
    return [angles.cos(), angles.sin()]


def shared_keys(model):
    """What the configurations of transformers' models have in common."""
    return {
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads or model.heads,
        "tie_word_embeddings": model.tied,
        "max_position_embeddings": model.context,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }


class Transformers(nn.Module):
    """LlamaForCausalLM with scaled_dot_product_attention."""

    def __init__(self, model):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(intermediate_size=model.intermediate, **shared_keys(model))
        self.llama = LlamaForCausalLM(config)

    def place(self, device, dtype):
        return self.to(device, dtype)

    def forward(self, x):
        return self.llama(x).logits


class Mixed(Transformers):
    """The same with weights in f32, computed in another dtype by autocast."""

    def place(self, device, dtype):
        self.kind = dtype
        return self.to(device)

    def forward(self, x):
        with torch.autocast(x.device.type, self.kind):
            return super().forward(x)


class Adapted(Transformers):
    """The same with frozen weights, and adapters of PEFT beside every matrix of a layer, in f32 as PEFT has them."""

    def place(self, device, dtype):
        from peft import LoraConfig, get_peft_model

        matrices = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules=matrices)
        self.llama = get_peft_model(self.llama.to(device, dtype), config)
        return self


def loss_of(logits, labels):
    """Mean cross-entropy in f32, as in Shoal."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
