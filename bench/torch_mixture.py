"""The same mixture of experts in eager PyTorch: Qwen3-MoE's model of transformers."""

import torch
from torch import nn

from torch_llama import shared_keys

# What transformers computes experts with on a processor.
IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")


class Mixture(nn.Module):
    """Qwen3MoeForCausalLM with scaled_dot_product_attention, without an auxiliary loss."""

    def __init__(self, model):
        super().__init__()
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            moe_intermediate_size=model.intermediate,
            num_experts=model.experts,
            num_experts_per_tok=model.experts_per_token,
            norm_topk_prob=True,
            head_dim=model.hidden // model.heads,
            **shared_keys(model),
        )
        self.mixture = Qwen3MoeForCausalLM(config)

    def compute_experts_by(self, implementation):
        self.mixture.set_experts_implementation(implementation)

    def place(self, device, dtype):
        return self.to(device, dtype)

    def forward(self, x):
        return self.mixture(x).logits


class MixedMixture(Mixture):
    """The same with weights in f32, computed in another dtype by autocast, as far as it reaches: grouped products of
    experts stay in f32."""

    def place(self, device, dtype):
        self.kind = dtype
        return self.to(device)

    def forward(self, x):
        with torch.autocast(x.device.type, self.kind):
            return super().forward(x)
