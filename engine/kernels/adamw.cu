// AdamW's update, as `optimizer/adamw.rs` computes it on a processor: the same operations in the same order, each rounded.
//
// Reads weight, gradient and both moments, and writes weight and moments: 28 bytes a weight.

// As `Scalars` in Rust.
struct AdamW {
  float scale, keep, one_minus_beta1, beta2, one_minus_beta2, root_correction2, step_size, epsilon;
};

KERNEL shoal_adamw(
    const float* gradients, u64 count, float* weights, float* first_moments, float* second_moments, AdamW of) {
  for (u64 place = first(); place < count; place += further()) {
    const float gradient = gradients[place] * of.scale;
    const float kept = weights[place] * of.keep;
    const float before = first_moments[place];
    const float moment = before + (gradient - before) * of.one_minus_beta1;
    const float square = second_moments[place] * of.beta2 + gradient * gradient * of.one_minus_beta2;
    const float denominator = sqrtf(square) / of.root_correction2 + of.epsilon;
    first_moments[place] = moment;
    second_moments[place] = square;
    weights[place] = kept - moment / denominator * of.step_size;
  }
}
