// Functions of libtorch that tch lacks.

#include <ATen/Context.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/version.h>

#include <cstdlib>

#include "guard.h"
#include "on_this_thread.h"
#include "tensor_list.h"

extern "C" {

void shoal_free(char* message) { std::free(message); }

// Version of libtorch, a static string.
const char* shoal_torch_version() { return TORCH_VERSION; }

// Gradients of `output` with respect to each of `inputs`, where `output_gradient` (null for a
// scalar output) is the gradient of the loss with respect to `output`. Writes one new tensor per
// input to `gradients`. The graph is freed.
char* shoal_gradients(
    at::Tensor* output,
    at::Tensor* output_gradient,
    at::Tensor** inputs,
    size_t count,
    at::Tensor** gradients) {
  return guarded([&] {
    torch::autograd::variable_list output_gradients;
    if (output_gradient != nullptr) output_gradients.push_back(*output_gradient);
    const OnThisThread guard;
    give(torch::autograd::grad({*output}, tensors(inputs, count), output_gradients), gradients, count);
  });
}

// Makes results reproducible: equal bits in every run of a program on the same machine.
char* shoal_be_deterministic() {
  return guarded([] {
    auto& context = at::globalContext();
    context.setDeterministicAlgorithms(true, /*warn_only=*/false);
    // New memory is always written before it is read, so filling it is unnecessary.
    context.setDeterministicFillUninitializedMemory(false);
    context.setDeterministicCuDNN(true);
    context.setBenchmarkCuDNN(false);
    context.setAllowTF32CuBLAS(false);
    context.setAllowTF32CuDNN(false);
    context.setAllowBF16ReductionCuBLAS(false);
  });
}

// Gives the storage of a tensor, which all its views share, `bytes` at `address` on the same device, which
// are not freed with it.
char* shoal_set_memory(at::Tensor* tensor, void* address, size_t bytes) {
  return guarded([&] {
    auto* storage = tensor->storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(at::DataPtr(address, tensor->device()));
    storage->set_nbytes(bytes);
  });
}

}  // extern "C"
