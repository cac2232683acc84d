// The kernels for GPUs, compiled for the processor: tests compare them with the loops that compute the same there.

#include "../kernels/portable.h"

#include "../kernels/accumulate.cu"
#include "../kernels/adamw.cu"

extern "C" {

void shoal_accumulate_on_processor(
    bool bf16, const void* values, u64 count, u64 width, i64* sums, u64 stride, double scale, u32* largest, u32 limit) {
  if (bf16) {
    const auto* of = static_cast<const u16*>(values);
    shoal_largest_bf16(of, count, largest);
    shoal_add_bf16(of, count, width, sums, stride, scale, largest, limit);
  } else {
    const auto* of = static_cast<const float*>(values);
    shoal_largest_f32(of, count, largest);
    shoal_add_f32(of, count, width, sums, stride, scale, largest, limit);
  }
}

void shoal_adamw_on_processor(
    const float* gradients, u64 count, float* weights, float* first_moments, float* second_moments, const AdamW* of) {
  shoal_adamw(gradients, count, weights, first_moments, second_moments, *of);
}

}  // extern "C"
