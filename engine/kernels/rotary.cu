// Rotation of queries and keys by their positions' angles, as `fused.rs` computes it on a processor.

// As `Heads` in `csrc/fused.cpp`.
struct Heads {
  u64 tokens, heads, key_value_heads, size, rotated;
};

// The element `place` of a row with all heads, in the tensor of queries, keys or values that has it.
template <typename Value>
struct Part {
  Value* at;
  bool turns;
};

template <typename Value>
DEVICE Part<Value> part_of(u64 row, u64 place, Value* queries, Value* keys, Value* values, const Heads& of) {
  const u64 query_width = of.heads * of.size, key_width = of.key_value_heads * of.size;
  if (place < query_width) return {queries + row * query_width + place, true};
  place -= query_width;
  if (place < key_width) return {keys + row * key_width + place, true};
  return {values + row * key_width + (place - key_width), false};
}

// Channel `channel` of a head at `from`, turned by its angle: forwards, or backwards if `sign` is -1.
template <typename Value>
DEVICE float turned(const Value* from, u64 channel, const float* cosine, const float* sine, float sign, u64 half) {
  const u64 index = channel < half ? channel : channel - half;
  const float low = load(from[index]), high = load(from[index + half]);
  const float turn = sine[index] * sign;
  return channel < half ? low * cosine[index] - high * turn : high * cosine[index] + low * turn;
}

template <typename Value>
DEVICE void rotate(
    const Value* mixed, u64 rows, u64 width, Value* queries, Value* keys, Value* values, const float* cosine,
    const float* sine, const Heads& of) {
  const u64 half = of.rotated / 2;
  for (u64 place = first(); place < rows * width; place += further()) {
    const u64 row = place / width, column = place % width, channel = column % of.size;
    const auto part = part_of(row, column, queries, keys, values, of);
    const u64 angle = row % of.tokens * half;
    const Value* head = mixed + (place - channel);
    if (!part.turns || channel >= 2 * half) *part.at = head[channel];
    else store(part.at, turned(head, channel, cosine + angle, sine + angle, 1.0f, half));
  }
}

template <typename Value>
DEVICE void rotate_backward(
    const Value* queries, u64 rows, u64 width, const Value* keys, const Value* values, Value* mixed, const float* cosine,
    const float* sine, const Heads& of) {
  const u64 half = of.rotated / 2;
  for (u64 place = first(); place < rows * width; place += further()) {
    const u64 row = place / width, column = place % width, channel = column % of.size;
    const auto part = part_of(row, column, queries, keys, values, of);
    const u64 angle = row % of.tokens * half;
    const Value* head = part.at - channel;
    if (!part.turns || channel >= 2 * half) mixed[place] = head[channel];
    else store(mixed + place, turned(head, channel, cosine + angle, sine + angle, -1.0f, half));
  }
}

#define ROTARY(Value, dtype) \
  KERNEL shoal_rotate_##dtype( \
      const Value* mixed, u64 rows, u64 width, Value* queries, Value* keys, Value* values, const float* cosine, \
      const float* sine, Heads of) { \
    rotate(mixed, rows, width, queries, keys, values, cosine, sine, of); \
  } \
  KERNEL shoal_rotate_backward_##dtype( \
      const Value* queries, u64 rows, u64 width, const Value* keys, const Value* values, Value* mixed, \
      const float* cosine, const float* sine, Heads of) { \
    rotate_backward(queries, rows, width, keys, values, mixed, cosine, sine, of); \
  }

ROTARY(float, f32)
ROTARY(u16, bf16)
