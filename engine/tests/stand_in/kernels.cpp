// Operators on devices, by those of the processor on aliases of the tensors.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cmath>
#include <set>

namespace stand_in {

using c10::DispatchKey;
using c10::IValue;
using Stack = torch::jit::Stack;

namespace {

// Operators after which the host needs a number from the device.
const std::set<std::string> waiting = {
    "aten::equal", "aten::masked_select", "aten::nonzero", "aten::unique_dim", "aten::_unique2",
    "aten::repeat_interleave.Tensor",
};

// Operators that read indices of the processor too.
const std::set<std::string> of_both = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"};

// The tensors of one call.
struct Call {
  std::string name;
  std::optional<c10::DeviceIndex> device;
  std::vector<Use> uses;
  size_t bytes = 0;

  // The alias of an argument, which is noted.
  Tensor argument(const Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(tensor.dim() == 0 || of_both.count(name) > 0, "stand-in: ", name,
                  " gets a tensor of the processor among those of a device");
      return tensor;
    }
    TORCH_CHECK(!device || *device == tensor.device().index(), "stand-in: ", name, " gets tensors of cuda:",
                int(device.value_or(0)), " and of ", tensor.device());
    device = tensor.device().index();
    bytes += bytes_of(tensor);
    uses.push_back({tensor.storage().data(), is_written});
    return alias_of(tensor);
  }

  // The result on the device.
  Tensor result(const Tensor& tensor) {
    bytes += bytes_of(tensor);
    return to_device(tensor, device.value_or(current_device));
  }
};

bool is_written(const c10::AliasInfo* info) { return info != nullptr && info->isWrite(); }

// Replaces the tensors of a value.
IValue replaced(const IValue& value, const std::function<Tensor(const Tensor&)>& by) {
  if (value.isTensor()) return by(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> all;
    for (const Tensor& tensor : value.toTensorVector()) all.push_back(by(tensor));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      all.push_back(tensor ? std::optional<Tensor>(by(*tensor)) : tensor);
    return all;
  }
  return value;
}

// Gives a tensor of a device, whose alias has got another shape, the memory of it.
void adopt(const Tensor& given, const Tensor& alias, Call& call) {
  call.bytes += bytes_of(alias) - bytes_of(given);
  if (alias.sizes() == given.sizes() && given.numel() > 0) return;
  const auto fresh = to_device(alias, given.device().index());
  auto* tensor = given.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(fresh.storage());
  tensor->set_sizes_and_strides(fresh.sizes(), fresh.strides());
}

// The argument that a result is, as with `out=` and operators that work in place.
std::optional<size_t> same_argument(const c10::FunctionSchema& schema, const c10::AliasInfo* info) {
  if (!is_written(info)) return {};
  for (size_t place = 0; place < schema.arguments().size(); ++place) {
    const auto* other = schema.arguments()[place].alias_info();
    if (is_written(other) && *other == *info) return place;
  }
  return {};
}

void run(const c10::OperatorHandle& operation, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = operation.schema();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  const std::vector<IValue> given(stack->begin() + int64_t(first), stack->end());
  Call call{c10::toString(operation.operator_name()), {}, {}, 0};
  for (size_t place = 0; place < count; ++place) {
    auto& value = (*stack)[first + place];
    const bool written = is_written(schema.arguments()[place].alias_info());
    value = replaced(value, [&](const Tensor& tensor) { return call.argument(tensor, written); });
    if (value.isDevice() && value.toDevice().is_cuda()) {
      call.device = value.toDevice().index();
      value = c10::Device(c10::kCPU);
    }
  }
  const std::vector<IValue> aliases(stack->begin() + int64_t(first), stack->end());
  const auto device = call.device.value_or(current_device);
  enter(current_stream(device), call.uses);
  operation.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);

  for (size_t place = 0; place < count; ++place) {
    if (!is_written(schema.arguments()[place].alias_info()) || !aliases[place].isTensor()) continue;
    const auto& tensor = given[place].toTensor();
    if (tensor.defined() && tensor.is_cuda()) adopt(tensor, aliases[place].toTensor(), call);
  }
  const size_t results = schema.returns().size(), start = stack->size() - results;
  for (size_t place = 0; place < results; ++place) {
    auto& value = (*stack)[start + place];
    const auto same = same_argument(schema, schema.returns()[place].alias_info());
    if (same) value = given[*same];
    else value = replaced(value, [&](const Tensor& tensor) { return call.result(tensor); });
  }
  count_kernel(call.name, call.bytes);
  if (waiting.count(call.name) > 0) {
    const std::lock_guard guard(lock);
    ++counts.waits;
  }
}

// New memory is that of the current device.
struct OnDevice {
  c10::DeviceIndex before = current_device;
  explicit OnDevice(std::optional<at::Device> device) {
    if (device && device->has_index()) current_device = device->index();
  }
  ~OnDevice() { current_device = before; }
};

constexpr c10::DispatchKeySet kCuda(DispatchKey::CUDA);

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OnDevice guard(device);
  return at::detail::empty_generic(size, device_allocator(), kCuda, c10::dtype_or_default(type), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const OnDevice guard(device);
  return at::detail::empty_strided_generic(size, strides, device_allocator(), kCuda, c10::dtype_or_default(type));
}

at::Scalar number(const Tensor& tensor) {
  const auto device = tensor.device().index();
  enter(current_stream(device), {{tensor.storage().data(), false}});
  {
    const std::lock_guard guard(lock);
    ++counts.waits;
    counts.bytes_to_host += tensor.element_size();
  }
  return alias_of(tensor).item();
}

// A GPU rounds roots correctly. MKL's, which libtorch takes on a processor, are not all rounded so.
Tensor& root(const Tensor& x, Tensor& result) {
  Call call{"aten::sqrt.out", {}, {}, 0};
  const Tensor from = call.argument(x, false).contiguous(), to = at::empty_like(from);
  TORCH_CHECK(from.scalar_type() == at::kFloat, "stand-in: roots are of f32");
  enter(current_stream(*call.device), call.uses);
  const float* read = from.const_data_ptr<float>();
  float* written = to.mutable_data_ptr<float>();
  for (int64_t place = 0; place < from.numel(); ++place) written[place] = std::sqrt(read[place]);
  const Tensor alias = call.argument(result, true);
  enter(current_stream(*call.device), call.uses);
  if (alias.sizes() == to.sizes()) alias.copy_(to);
  else adopt(result, to, call);
  count_kernel(call.name, call.bytes);
  return result;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  // These have kernels on a GPU, and would be composed of others here.
  for (const char* name : {"silu_backward", "silu_backward.grad_input", "native_layer_norm", "native_layer_norm_backward",
                           "_fused_rms_norm", "_fused_rms_norm_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_local_scalar_dense", &number);
  library.impl("sqrt.out", &root);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", [](const Tensor& x, at::IntArrayRef size) { return at::native::view(x, size); });
  library.impl("_reshape_alias", [](const Tensor& x, at::IntArrayRef size, at::IntArrayRef strides) {
    return at::native::_reshape_alias(x, size, strides);
  });
  library.impl("unfold", &at::native::unfold);
}

}  // namespace
}  // namespace stand_in
