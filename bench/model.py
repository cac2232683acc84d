"""The models of the benchmarks, and their run configuration."""

import dataclasses
import re

from sizes import size


@dataclasses.dataclass(frozen=True)
class Model:
    """A Llama-shaped decoder over bytes, and the samples of one optimizer step."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    context: int
    batch: int
    vocabulary: int = 256
    key_value_heads: int | None = None
    tied: bool = False
    # Experts of a layer, each as wide inside as `intermediate`; 0 is a single feed-forward block.
    experts: int = 0
    experts_per_token: int = 0
    # Whether the queries and keys of each head are normalised.
    query_key_norm: bool = False

    def tokens_per_step(self):
        return self.batch * self.context

    def layer_parameters(self, experts=None):
        """Parameters of a layer, with all of its experts or so many."""
        experts = self.experts if experts is None else experts
        keys = self.hidden // self.heads * (self.key_value_heads or self.heads)
        attention = 2 * self.hidden**2 + 2 * self.hidden * keys
        norms = 2 * self.hidden + (2 * self.hidden // self.heads if self.query_key_norm else 0)
        feed_forward = 3 * self.hidden * self.intermediate * (experts if self.experts else 1)
        return attention + feed_forward + self.experts * self.hidden + norms

    def parameters(self, experts=None):
        """Parameters of the model, with all experts of each layer or so many."""
        return (
            self.layers * self.layer_parameters(experts)
            + (1 if self.tied else 2) * self.vocabulary * self.hidden
            + self.hidden
        )

    def active_parameters(self):
        """Parameters that work on a token."""
        return self.parameters(self.experts_per_token)

    def stage_parameters(self, stages):
        """Parameters of each stage. As in Shoal, stages have equal shares of the layers."""
        assert self.layers % stages == 0
        share = self.layers // stages * self.layer_parameters()
        counts = [share] * stages
        counts[0] += self.vocabulary * self.hidden
        counts[-1] += self.vocabulary * self.hidden + self.hidden
        return counts

    def describe(self):
        feed_forward = f"feed-forward {self.intermediate}"
        shape = f"Llama-shaped, {self.parameters() / 1e6:.2f}M parameters"
        if self.experts:
            feed_forward = f"{self.experts_per_token} of {self.experts} experts of {self.intermediate}"
            shape = (
                f"Qwen3-MoE-shaped, {self.active_parameters() / 1e6:.0f}M of {self.parameters() / 1e6:.0f}M parameters "
                "work on a token"
            )
        return (
            f"{shape}: width {self.hidden}, {self.layers} layers, {self.heads} heads, {feed_forward}, "
            f"{self.vocabulary} tokens; {self.batch} samples of {self.context} tokens a step"
        )


# For smoke tests.
TINY = Model(hidden=64, layers=4, heads=2, intermediate=128, context=32, batch=32)

# A layer has as many parameters as one of a GPT of this width.
SMALL = size(Model(hidden=256, layers=4, heads=4, intermediate=688, context=128, batch=32), TINY)

# The smallest size for which a swarm is useful.
MEDIUM = size(Model(hidden=512, layers=8, heads=8, intermediate=1376, context=128, batch=32), TINY)

# The optimizer of both sides. The learning rate is constant.
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
CLIP = 1.0


def run_toml(
    default, model, *, dtype, stages, microbatches, steps, all_reduce="exact", codec=None, staleness=0,
    recompute=False, slices=1, more=""
):
    """The configuration `default`, changed to train `model` without evaluation and checkpoints. `more` is
    added as it is."""
    values = {
        "model": {
            "hidden": model.hidden,
            "layers": model.layers,
            "heads": model.heads,
            "key_value_heads": model.heads,
            "intermediate": model.intermediate,
            "slices": slices,
            "context": model.context,
        },
        "training": {
            "steps": steps,
            "stages": stages,
            "microbatches": microbatches,
            "microbatch_size": model.batch // microbatches,
            "dtype": f'"{dtype}"',
            "recompute": str(recompute).lower(),
            "staleness": staleness,
        },
        "codec": {
            "activations": f'"{codec or dtype}"',
            "activation_gradients": f'"{codec or dtype}"',
            "all_reduce": f'"{all_reduce}"',
        },
        "optimizer": {
            "learning_rate": LEARNING_RATE,
            "final_learning_rate": LEARNING_RATE,
            "warmup_steps": 0,
        },
        "evaluation": {"every": 0},
        "checkpoint": {"every": 0},
    }
    return edit_toml(default, values) + more


def edit_toml(text, values):
    """Replaces the values of keys in a TOML text, by section."""
    wanted = {(section, key) for section in values for key in values[section]}
    section, lines = "", []
    for line in text.splitlines():
        header = re.fullmatch(r"\[(\w+)\].*", line)
        setting = re.match(r"(\w+)\s*=", line)
        if header:
            section = header[1]
        elif setting and (section, setting[1]) in wanted:
            wanted.remove((section, setting[1]))
            line = f"{setting[1]} = {values[section][setting[1]]}"
        lines.append(line)
    if wanted:
        raise SystemExit(f"the default run configuration has no {sorted(wanted)}")
    return "\n".join(lines) + "\n"


def replace_section(text, section, lines):
    """Replaces all keys of a section in a TOML text."""
    before, _, rest = text.partition(f"[{section}]\n")
    if not rest:
        raise SystemExit(f"the default run configuration has no section {section}")
    _, header, after = rest.partition("\n[")
    return before + f"[{section}]\n" + "".join(f"{line}\n" for line in lines) + header + after
