// What kernels need of CUDA, and the same for a processor's compiler, which tests run in a kernel's place.
// NVRTC gets this file and a kernel's as one text, so neither includes the other.

#ifdef __CUDACC__

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define KERNEL extern "C" __global__ void
#define DEVICE static __device__ __forceinline__
// Numbers in the device's memory: one of a function's own would be made by each thread.
#define TABLE static __device__ const

// The elements of this thread are the first, and each so many further on.
DEVICE u64 first() { return blockIdx.x * u64(blockDim.x) + threadIdx.x; }
DEVICE u64 further() { return gridDim.x * u64(blockDim.x); }

DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of(float value) { return __float_as_uint(value); }

// Makes a number that threads share at least as large as a value.
DEVICE void raise(u32* number, u32 value) {
  if (*(volatile u32*)number < value) atomicMax(number, value);
}

// Sixteen threads share a row: this is one of them, and has each sixteenth element.
DEVICE u64 lane() { return threadIdx.x % 16; }
DEVICE u64 further_lanes() { return 16; }
DEVICE u64 first_row() { return first() / 16; }
DEVICE u64 further_rows() { return further() / 16; }

// The sum of `term(i)` below a count, in sixteen lanes that are added up in pairs. All threads of the row have it.
template <typename Term>
DEVICE float lane_sum(u64 count, Term term) {
  float sum = 0;
  for (u64 index = lane(); index < count; index += 16) sum += term(index);
  const u32 of_row = 0xffffu << (threadIdx.x & 16);
  for (int width = 8; width > 0; width /= 2) sum += __shfl_xor_sync(of_row, sum, width, 16);
  return sum;
}

// The 256 threads of a block share a row: this is one of them.
DEVICE u64 lane_of_block() { return threadIdx.x; }
DEVICE u64 further_lanes_of_block() { return blockDim.x; }
DEVICE u64 first_row_of_block() { return blockIdx.x; }
DEVICE u64 further_rows_of_blocks() { return gridDim.x; }

// `join` of `term(i)` below a count and a start, in 256 lanes that are joined in pairs. All threads of the row have it,
// and have computed all terms by then.
template <typename Term, typename Join>
DEVICE float joined(u64 count, float start, Term term, Join join) {
  __shared__ float lanes[256];
  float own = start;
  for (u64 index = threadIdx.x; index < count; index += 256) own = join(own, term(index));
  __syncthreads();
  lanes[threadIdx.x] = own;
  for (u32 width = 128; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) lanes[threadIdx.x] = join(lanes[threadIdx.x], lanes[threadIdx.x + width]);
  }
  __syncthreads();
  return lanes[0];
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

#define KERNEL [[maybe_unused]] static void
#define DEVICE static inline
#define TABLE static const

DEVICE u64 first() { return 0; }
DEVICE u64 further() { return 1; }

DEVICE float float_of(u32 bits) { return std::bit_cast<float>(bits); }
DEVICE u32 bits_of(float value) { return std::bit_cast<u32>(value); }

DEVICE void raise(u32* number, u32 value) { *number = std::max(*number, value); }

DEVICE u64 lane() { return 0; }
DEVICE u64 further_lanes() { return 1; }
DEVICE u64 first_row() { return 0; }
DEVICE u64 further_rows() { return 1; }

template <typename Term>
DEVICE float lane_sum(u64 count, Term term) {
  float lanes[16] = {};
  for (u64 index = 0; index < count; ++index) lanes[index % 16] += term(index);
  for (int width = 8; width > 0; width /= 2)
    for (int place = 0; place < width; ++place) lanes[place] += lanes[place + width];
  return lanes[0];
}

DEVICE u64 lane_of_block() { return 0; }
DEVICE u64 further_lanes_of_block() { return 1; }
DEVICE u64 first_row_of_block() { return 0; }
DEVICE u64 further_rows_of_blocks() { return 1; }

template <typename Term, typename Join>
DEVICE float joined(u64 count, float start, Term term, Join join) {
  float lanes[256];
  for (auto& lane : lanes) lane = start;
  for (u64 index = 0; index < count; ++index) lanes[index % 256] = join(lanes[index % 256], term(index));
  for (int width = 128; width > 0; width /= 2)
    for (int place = 0; place < width; ++place) lanes[place] = join(lanes[place], lanes[place + width]);
  return lanes[0];
}

#endif

// A number of f32, or the upper half of one, as f32.
DEVICE float load(float value) { return value; }
DEVICE float load(u16 bits) { return float_of(u32(bits) << 16); }

// Rounds to nearest, ties to even.
DEVICE void store(float* to, float value) { *to = value; }
DEVICE void store(u16* to, float value) {
  const u32 bits = bits_of(value);
  // Rounding up would turn some NaN into infinity or zero.
  const u32 rounded = value != value ? bits | 0x00400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
  *to = u16(rounded >> 16);
}
