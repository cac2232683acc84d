// What kernels need of CUDA, and the same for a processor's compiler, which tests run in a kernel's place.
// NVRTC gets this file and a kernel's as one text, so neither includes the other.

#ifdef __CUDACC__

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define KERNEL extern "C" __global__ void
#define DEVICE static __device__ __forceinline__

// The elements of this thread are the first, and each so many further on.
DEVICE u64 first() { return blockIdx.x * u64(blockDim.x) + threadIdx.x; }
DEVICE u64 further() { return gridDim.x * u64(blockDim.x); }

DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of(float value) { return __float_as_uint(value); }

// Makes a number that threads share at least as large as a value.
DEVICE void raise(u32* number, u32 value) {
  if (*(volatile u32*)number < value) atomicMax(number, value);
}

#else

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

#define KERNEL static void
#define DEVICE static inline

DEVICE u64 first() { return 0; }
DEVICE u64 further() { return 1; }

DEVICE float float_of(u32 bits) { return std::bit_cast<float>(bits); }
DEVICE u32 bits_of(float value) { return std::bit_cast<u32>(value); }

DEVICE void raise(u32* number, u32 value) { *number = std::max(*number, value); }

#endif
