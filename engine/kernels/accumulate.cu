// The addition of a gradient to a stage's sums, as `fixed_point.rs` does it on a processor: of each value, the integer
// nearest to its product with a power of two, halves to even. No value is added if one of the gradient is out of range.
//
// Reads a value twice and a sum once, and writes the sum: 20 bytes a weight in bf16, 24 in f32.

// Raises `largest` to the bits of the largest magnitude. Those of infinity and NaN exceed all others.
template <typename Value>
DEVICE void find_largest(const Value* values, u64 count, u32* largest) {
  u32 own = 0;
  for (u64 place = first(); place < count; place += further()) {
    const u32 bits = bits_of(load(values[place])) & 0x7fffffffu;
    own = bits > own ? bits : own;
  }
  raise(largest, own);
}

// Adds rows of values to rows of sums that are `stride` apart, unless the largest magnitude is above the limit.
template <typename Value>
DEVICE void add(
    const Value* values, u64 count, u64 width, i64* sums, u64 stride, double scale, const u32* largest, u32 limit) {
  if (*largest > limit) return;
  for (u64 place = first(); place < count; place += further()) {
    const u64 row = place / width;
    sums[row * stride + (place - row * width)] += i64(rint(double(load(values[place])) * scale));
  }
}

KERNEL shoal_largest_f32(const float* values, u64 count, u32* largest) { find_largest(values, count, largest); }

KERNEL shoal_largest_bf16(const u16* values, u64 count, u32* largest) { find_largest(values, count, largest); }

KERNEL shoal_add_f32(
    const float* values, u64 count, u64 width, i64* sums, u64 stride, double scale, const u32* largest, u32 limit) {
  add(values, count, width, sums, stride, scale, largest, limit);
}

KERNEL shoal_add_bf16(
    const u16* values, u64 count, u64 width, i64* sums, u64 stride, double scale, const u32* largest, u32 limit) {
  add(values, count, width, sums, stride, scale, largest, limit);
}
