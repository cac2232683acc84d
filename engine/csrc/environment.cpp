// Settings that libtorch and CUDA's libraries read from the environment. They are made before `main`: once a program
// has threads, another may be reading the environment.

#include <cstdlib>

namespace {

__attribute__((constructor)) void set_environment() {
  // cuBLAS returns the same bits each time only with a fixed workspace.
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  // The flight recorder of NCCL's groups enters those of all devices into one map without a lock.
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
}

}  // namespace
