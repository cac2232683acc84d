// The kernels for GPUs, compiled for the processor: tests compare them with the loops that compute the same there.

#include <cstring>
#include <utility>

#include "../kernels/portable.h"

#include "../kernels/accumulate.cu"
#include "../kernels/adamw.cu"
#include "../kernels/embedding.cu"
#include "../kernels/nf4.cu"
#include "../kernels/norm.cu"
#include "../kernels/rotary.cu"
#include "../kernels/swiglu.cu"
#include "../kernels/loss.cu"

namespace {

template <typename... Arguments, size_t... places>
bool call(void (*kernel)(Arguments...), void** at, std::index_sequence<places...>) {
  kernel(*static_cast<Arguments*>(at[places])...);
  return true;
}

template <typename... Arguments>
bool call(void (*kernel)(Arguments...), void** at) {
  return call(kernel, at, std::index_sequence_for<Arguments...>());
}

}  // namespace

// Computes a kernel with the arguments at these places; returns whether there is one of the name.
extern "C" bool shoal_on_processor(const char* name, void** at) {
#define CASE(kernel) \
  if (std::strcmp(name, #kernel) == 0) return call(kernel, at);
#define BOTH(kernel) CASE(kernel##_f32) CASE(kernel##_bf16)
  BOTH(shoal_largest)
  BOTH(shoal_add)
  CASE(shoal_adamw)
  CASE(shoal_embedding_rows)
  CASE(shoal_add_rows)
  BOTH(shoal_nf4)
  BOTH(shoal_rms_norm)
  BOTH(shoal_rms_norm_backward)
  BOTH(shoal_rms_norm_weight)
  BOTH(shoal_rotate)
  BOTH(shoal_rotate_backward)
  BOTH(shoal_swiglu)
  BOTH(shoal_swiglu_backward)
  BOTH(shoal_cross_entropy)
  return false;
}
