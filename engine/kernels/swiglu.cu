// silu of a gate times its value, as `fused.rs` computes it on a processor, with the same polynomial for e^x.

DEVICE float exponential(float x) {
  const float kRound = 12582912.0f, kLn2High = 0.6933594f, kLn2Low = -2.1219444e-4f, kLog2e = 1.44269504f;
  x = x < -87.0f ? -87.0f : x > 87.0f ? 87.0f : x;
  const float shifted = x * kLog2e + kRound;
  const float n = shifted - kRound;
  const float r = x - n * kLn2High - n * kLn2Low;
  const float tail = 1.0f / 24.0f + r * (1.0f / 120.0f + r * (1.0f / 720.0f + r * (1.0f / 5040.0f)));
  const float power = 1.0f + r * (1.0f + r * (0.5f + r * (1.0f / 6.0f + r * tail)));
  return power * float_of((bits_of(shifted) - bits_of(kRound) + 127u) << 23);
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

template <typename Value>
DEVICE void swiglu(const Value* both, u64 rows, u64 inner, Value* out) {
  for (u64 place = first(); place < rows * inner; place += further()) {
    const Value* gates = both + place / inner * 2 * inner + place % inner;
    const float gate = load(gates[0]);
    store(out + place, gate * sigmoid(gate) * load(gates[inner]));
  }
}

// The derivative of silu is s (1 + x (1 - s)) with s = sigmoid(x).
template <typename Value>
DEVICE void swiglu_backward(const Value* gradients, u64 rows, u64 inner, const Value* both, Value* both_gradient) {
  for (u64 place = first(); place < rows * inner; place += further()) {
    const u64 at = place / inner * 2 * inner + place % inner;
    const float gradient = load(gradients[place]), gate = load(both[at]);
    const float share = sigmoid(gate);
    const float slope = share * (1.0f + gate * (1.0f - share));
    store(both_gradient + at, gradient * load(both[at + inner]) * slope);
    store(both_gradient + at + inner, gradient * gate * share);
  }
}

#define SWIGLU(Value, dtype) \
  KERNEL shoal_swiglu_##dtype(const Value* both, u64 rows, u64 inner, Value* out) { swiglu(both, rows, inner, out); } \
  KERNEL shoal_swiglu_backward_##dtype( \
      const Value* gradients, u64 rows, u64 inner, const Value* both, Value* both_gradient) { \
    swiglu_backward(gradients, rows, inner, both, both_gradient); \
  }

SWIGLU(float, f32)
SWIGLU(u16, bf16)
