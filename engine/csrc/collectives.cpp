#include "collectives.h"

#include <ATen/ATen.h>
#include <dlfcn.h>

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>
#include <new>
#include <vector>

#include "guard.h"

namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;
using Store = c10::intrusive_ptr<c10d::Store>;

constexpr std::chrono::milliseconds kPatience = std::chrono::minutes(5);

class Group : public Collectives {
 public:
  explicit Group(Backend backend) : backend_(std::move(backend)) {}

  // The other members may be gone.
  ~Group() override { Group::end(); }

  void end() noexcept override {
    if (char* message = guarded([&] { backend_->abort(); })) std::free(message);
  }

  at::Tensor exchange(at::Tensor rows) override {
    std::vector<int64_t> equal;
    auto received = at::empty_like(rows);
    backend_->alltoall_base(received, rows, equal, equal)->wait();
    return received;
  }

  at::Tensor gather(at::Tensor own) override {
    auto shape = own.sizes().vec();
    shape.insert(shape.begin(), backend_->getSize());
    auto all = at::empty(shape, own.options());
    auto flat = all.view({-1});
    own = own.reshape({-1});
    backend_->_allgather_base(flat, own)->wait();
    return all;
  }

 private:
  Backend backend_;
};

Backend make_gloo(const Store& store, int rank, int size) {
  auto options = c10d::ProcessGroupGloo::Options::create(kPatience);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

// A function of libtorch_cuda by the name that its compiler gave it.
template <typename Function>
Function function(const char* name) {
  void* found = dlsym(RTLD_DEFAULT, name);
  TORCH_CHECK(found != nullptr, "this libtorch has no NCCL: install torch 2.11.0 for CUDA, which brings nvidia-nccl");
  return reinterpret_cast<Function>(found);
}

// Zeroed memory for an object of unknown size: in libtorch 2.11.0 a group has 1,112 bytes and its options 248.
void* room() {
  constexpr size_t kRoom = 1 << 16;
  return std::memset(::operator new(kRoom), 0, kRoom);
}

// The header of this class needs those of CUDA and NCCL. So its two constructors are found by name, and all else are
// virtual functions of a base class at its beginning.
Backend make_nccl(const Store& store, int rank, int size) {
  using Options = c10::intrusive_ptr<c10d::Backend::Options>;
  // ProcessGroupNCCL::Options::Options(bool is_high_priority_stream)
  const auto construct_options = function<void (*)(void*, bool)>("_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb");
  // ProcessGroupNCCL::ProcessGroupNCCL(intrusive_ptr<Store>, int rank, int size, intrusive_ptr<Options>). Arguments with
  // a destructor are passed by address, also by value.
  const auto construct_group = function<void (*)(void*, Store*, int, int, Options*)>(
      "_ZN4c10d16ProcessGroupNCCLC1EN3c1013intrusive_ptrINS_5StoreENS1_6detail34intrusive_target_default_null_typeIS3_"
      "EEEEiiNS2_INS0_7OptionsENS5_IS8_EEEE");
  void* memory = room();
  construct_options(memory, /*is_high_priority_stream=*/false);
  auto options = Options::unsafe_steal_from_new(static_cast<c10d::Backend::Options*>(memory));
  options->timeout = kPatience;
  auto given = store;
  memory = room();
  try {
    construct_group(memory, &given, rank, size, &options);
  } catch (...) {
    ::operator delete(memory);
    throw;
  }
  return Backend::unsafe_steal_from_new(static_cast<c10d::Backend*>(memory));
}

}  // namespace

extern "C" {

// A place where the members of one group find each other, to be freed with shoal_store_free.
Store* shoal_store_new() { return new Store(c10::make_intrusive<c10d::HashStore>()); }

void shoal_store_free(Store* store) { delete store; }

// One device's end of a group of `size`, to be freed with shoal_collectives_free. Each is used by one thread at a time.
char* shoal_collectives_new(Store* store, size_t rank, size_t size, bool nccl, Collectives** result) {
  return guarded([&] {
    const auto make = nccl ? make_nccl : make_gloo;
    *result = new Group(make(*store, int(rank), int(size)));
  });
}

void shoal_collectives_free(Collectives* collectives) { delete collectives; }

}  // extern "C"
