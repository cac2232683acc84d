// Root mean square normalisation of rows, as `fused.rs` computes it on a processor.

// Sixteen threads a row. Reads x twice, the second time from a cache, and writes y.
template <typename Value>
DEVICE void rms_norm(
    const Value* x, u64 rows, u64 width, const Value* weight, Value* y, float* scales, float epsilon, float offset) {
  for (u64 row = first_row(); row < rows; row += further_rows()) {
    const Value* from = x + row * width;
    Value* to = y + row * width;
    const float square = lane_sum(width, [&](u64 index) { return load(from[index]) * load(from[index]); });
    const float scale = 1.0f / sqrtf(square / float(width) + epsilon);
    if (lane() == 0) scales[row] = scale;
    for (u64 index = lane(); index < width; index += further_lanes())
      store(to + index, load(from[index]) * scale * (load(weight[index]) + offset));
  }
}

// Sixteen threads a row: the gradient of x.
template <typename Value>
DEVICE void rms_norm_backward(
    const Value* gradient, u64 rows, u64 width, const Value* x, const Value* weight, const float* scales,
    Value* x_gradient, float offset) {
  for (u64 row = first_row(); row < rows; row += further_rows()) {
    const Value* of = gradient + row * width;
    const Value* from = x + row * width;
    Value* to = x_gradient + row * width;
    const float scale = scales[row];
    const float product = lane_sum(
        width, [&](u64 index) { return load(of[index]) * (load(weight[index]) + offset) * load(from[index]); });
    const float mean = product * scale / float(width);
    for (u64 index = lane(); index < width; index += further_lanes()) {
      const float normal = load(from[index]) * scale;
      const float weighted = load(of[index]) * (load(weight[index]) + offset);
      store(to + index, scale * (weighted - normal * mean));
    }
  }
}

// A thread a column of each block of rows: the sum over the block's rows of the gradient of the weight.
template <typename Value>
DEVICE void rms_norm_weight(
    const Value* gradient, u64 rows, u64 width, const Value* x, const float* scales, float* parts, u64 block) {
  const u64 count = (rows + block - 1) / block * width;
  for (u64 place = first(); place < count; place += further()) {
    const u64 column = place % width, start = place / width * block;
    const u64 end = start + block < rows ? start + block : rows;
    float sum = 0;
    for (u64 row = start; row < end; ++row)
      sum += load(gradient[row * width + column]) * (load(x[row * width + column]) * scales[row]);
    parts[place] = sum;
  }
}

#define NORM(Value, dtype) \
  KERNEL shoal_rms_norm_##dtype( \
      const Value* x, u64 rows, u64 width, const Value* weight, Value* y, float* scales, float epsilon, float offset) { \
    rms_norm(x, rows, width, weight, y, scales, epsilon, offset); \
  } \
  KERNEL shoal_rms_norm_backward_##dtype( \
      const Value* gradient, u64 rows, u64 width, const Value* x, const Value* weight, const float* scales, \
      Value* x_gradient, float offset) { \
    rms_norm_backward(gradient, rows, width, x, weight, scales, x_gradient, offset); \
  } \
  KERNEL shoal_rms_norm_weight_##dtype( \
      const Value* gradient, u64 rows, u64 width, const Value* x, const float* scales, float* parts, u64 block) { \
    rms_norm_weight(gradient, rows, width, x, scales, parts, block); \
  }

NORM(float, f32)
NORM(u16, bf16)
