// The cross-entropy of rows of logits, and its gradient in their place. As `fused.rs` on a processor, but that a row's sum
// has 256 lanes in place of 16.
//
// A block of 256 threads a row. Reads logits three times, twice from a cache if they fit, and writes them once.

template <typename Value>
DEVICE void cross_entropy(
    Value* logits, u64 rows, u64 width, const i64* targets, float* losses, float scale, u32 with_gradients) {
  for (u64 row = first_row_of_block(); row < rows; row += further_rows_of_blocks()) {
    Value* of = logits + row * width;
    const i64 target = targets[row];
    // Such a target does not count.
    if (target < 0) {
      if (lane_of_block() == 0) losses[row] = 0;
      if (with_gradients)
        for (u64 index = lane_of_block(); index < width; index += further_lanes_of_block()) store(of + index, 0.0f);
      continue;
    }
    const float most = joined(
        width, -float_of(0x7f800000u), [&](u64 index) { return load(of[index]); },
        [](float one, float other) { return other > one ? other : one; });
    // Before any thread writes a gradient: all meet in the sum.
    const float of_target = load(of[target]) - most;
    const float sum = joined(
        width, 0.0f, [&](u64 index) { return exponential(load(of[index]) - most); },
        [](float one, float other) { return one + other; });
    if (lane_of_block() == 0) losses[row] = logf(sum) - of_target;
    if (!with_gradients) continue;
    const float factor = scale / sum;
    for (u64 index = lane_of_block(); index < width; index += further_lanes_of_block()) {
      const float share = exponential(load(of[index]) - most) * factor;
      store(of + index, index == u64(target) ? share - scale : share);
    }
  }
}

#define LOSS(Value, dtype) \
  KERNEL shoal_cross_entropy_##dtype( \
      Value* logits, u64 rows, u64 width, const i64* targets, float* losses, float scale, u32 with_gradients) { \
    cross_entropy(logits, rows, width, targets, losses, scale, with_gradients); \
  }

LOSS(float, f32)
LOSS(u16, bf16)
