// torch's operators on the simulated devices: to allocate, to look at memory in another shape, to copy. All others run
// the CPU's kernels on the alias of the memory, when their turn comes on the stream.

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

#include <cstring>

#include "memory.h"
#include "operators.h"

namespace sim {
namespace {

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
constexpr int STALE = 0x5A;

// While an operator runs by way of the host: its copies are no copies of the program's.
thread_local bool is_quiet = false;

struct Quiet {
  bool before = std::exchange(is_quiet, true);
  ~Quiet() {
    is_quiet = before;
  }
};

std::unique_ptr<Operation> record_of(std::string name, size_t nbytes, bool pinned, bool waited) {
  if (is_quiet) {
    return nullptr;
  }
  Operation operation{};
  operation.name = std::move(name);
  operation.nbytes = nbytes;
  operation.pinned = pinned;
  operation.waited = waited;
  return std::make_unique<Operation>(std::move(operation));
}

void wait_quietly(Point point, const char* what) {
  wait(point, is_quiet ? nullptr : what);
}

Stream current_stream_of(const at::Tensor& tensor) {
  return current_stream(tensor.get_device());
}

// A tensor of the CPU whose memory is the alias of the tensor's memory. It keeps nothing alive, as on CUDA an operation
// that is queued does not.
at::Tensor tensor_of_alias(const at::Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0) {
    return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), options);
  }
  return at::from_blob(alias_of(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_memory(), KEYS, dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &device_memory(), KEYS, dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t nbytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (nbytes > self.storage().nbytes()) {
    resize_storage(self.storage(), nbytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::TensorImpl* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(offset);
  if (stride.empty()) {
    tensor->set_sizes_contiguous(size);
  } else {
    tensor->set_sizes_and_strides(size, stride);
  }
  return self;
}

void record_stream(at::Tensor& self, at::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

// On one device, with another dtype and order of elements if need be. Between two devices, both of their current
// streams take part, as CUDA's do: the source's copies, and the target's goes on behind it.
void copy_on_devices(const at::Tensor& source, const at::Tensor& target) {
  Stream from = current_stream_of(source), to = current_stream_of(target);
  bool crosses = from.device != to.device;
  if (crosses) {
    wait_on_stream(from, end_of(to));
  }
  auto run = [a = tensor_of_alias(source), b = tensor_of_alias(target)] {
    at::AutoDispatchBelowADInplaceOrView guard;
    b.copy_(a);
  };
  Point end = queue(from, run, record_of("device to device", target.nbytes(), false, false));
  if (crosses) {
    wait_on_stream(to, end);
  }
}

// Contiguous tensors of one dtype, one of them on the host. The host waits unless it has asked not to, and its memory
// is pinned. Whoever looks too early at what is under way to the host finds there what is surely wrong.
void transfer(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  bool leaves = target.is_cpu();
  const at::Tensor& host = leaves ? target : source;
  size_t nbytes = source.nbytes();
  void* memory = host.data_ptr();
  void* alias = alias_of((leaves ? source : target).data_ptr());
  bool pinned = is_pinned(memory), waited = !(pinned && non_blocking);
  Stream stream = current_stream_of(leaves ? source : target);
  const char* name = leaves ? "device to host" : "host to device";
  if (leaves && !waited) {
    std::memset(memory, STALE, nbytes);
  }
  auto run = [=] { leaves ? std::memcpy(memory, alias, nbytes) : std::memcpy(alias, memory, nbytes); };
  Point end = queue(stream, run, record_of(name, nbytes, pinned, waited));
  if (waited) {
    wait_quietly(end, name);
  } else {
    pinned_memory().record_event(memory, host.storage().data_ptr().get_context(), torch_stream(stream));
  }
}

// As CUDA does, what has to change its dtype or the order of its elements changes them on the host on its way to a
// device, and on the way to the host before the copy if the caller does not wait for that, and otherwise after it.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  at::Tensor source = self.expand_as(target);
  if (!source.is_cpu() && !target.is_cpu()) {
    copy_on_devices(source, target);
    return target;
  }
  bool before = !target.is_cpu() || non_blocking;
  if (before && (source.dtype() != target.dtype() || !source.is_contiguous())) {
    if (source.is_cpu() && source.dtype() != target.dtype()) {
      mark("converted on the host");
    }
    source = source.to(target.options().device(source.device())).contiguous();
  }
  source = source.contiguous();
  if (target.is_contiguous() && target.dtype() == source.dtype()) {
    transfer(source, target, non_blocking);
  } else {
    at::Tensor between = at::empty_like(target, target.options().dtype(source.dtype()), at::MemoryFormat::Contiguous);
    transfer(source, between, non_blocking);
    target.copy_(between);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

// Its result is new memory, which can be filled when its turn comes.
at::Tensor cat(const at::ITensorListRef& tensors, int64_t dim) {
  std::vector<at::Tensor> shapes;
  std::optional<at::Device> device;
  for (const at::Tensor& tensor : tensors) {
    shapes.push_back(at::empty_like(tensor, tensor.options().device(at::kMeta)));
    device = tensor.device();
  }
  at::Tensor shape = at::cat(shapes, dim);
  at::Tensor result = at::empty(shape.sizes(), shape.options().device(device));
  return at::cat_out(result, tensors, dim);
}

using Stack = torch::jit::Stack;

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

// What an operation that is queued gets in the place of an argument of the program's. What lies on the host it gets as
// it is now.
c10::IValue queued_argument(const c10::IValue& value) {
  auto replace = [](const at::Tensor& tensor) {
    return is_on_device(tensor) ? tensor_of_alias(tensor) : tensor.defined() ? tensor.clone() : tensor;
  };
  if (value.isTensor()) {
    return replace(value.toTensor());
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      tensors.push_back(replace(tensor));
    }
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      tensors.push_back(tensor ? std::optional(replace(*tensor)) : std::nullopt);
    }
    return tensors;
  }
  return value;
}

bool draws(const c10::Argument& argument) {
  return argument.type()->str().find("Generator") != std::string::npos;
}

// Whether all that the operator does is to fill tensors that its caller gave it, of a size that they have already: so
// there is no need to wait for it. Random numbers it draws at once, in the program's order.
bool can_be_queued(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  bool fills = false;
  for (size_t number = 0; number < arguments.size(); ++number) {
    const c10::Argument& argument = schema.arguments()[number];
    if (draws(argument)) {
      return false;
    }
    if (argument.alias_info() == nullptr || !argument.alias_info()->isWrite()) {
      continue;
    }
    if (!arguments[number].isTensor()) {
      return false;
    }
    const at::Tensor& tensor = arguments[number].toTensor();
    if (!is_on_device(tensor) || (argument.is_out() && tensor.numel() == 0)) {
      return false;
    }
    fills = true;
  }
  return fills;
}

// Each device has a random number generator of its own: a CPU's, since the CPU's operators draw from it.
std::vector<at::Generator>& generators() {
  static auto* generators = new std::vector<at::Generator>(DEVICES);
  return *generators;
}

void use_generator(int64_t device, at::Generator generator) {
  generators().at(device) = std::move(generator);
}

// Waits for the stream, then gives the operator copies in host memory, and puts the results where they belong.
void run_on_host(const c10::OperatorHandle& op, Stack* stack, Stream stream) {
  const c10::FunctionSchema& schema = op.schema();
  size_t count = schema.arguments().size();
  for (size_t number = 0; number < count; ++number) {
    c10::IValue& argument = torch::jit::peek(*stack, number, count);
    if (draws(schema.arguments()[number]) && argument.isNone()) {
      argument = generators()[stream.device];
    }
  }
  queue(stream, nullptr, record_of(schema.name(), 0, false, true));
  wait_quietly(end_of(stream), schema.name().c_str());
  Quiet quiet;
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  Stream stream = current_stream();
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor() && is_on_device(argument.toTensor())) {
      stream = current_stream_of(argument.toTensor());
      break;
    }
  }
  if (!can_be_queued(schema, arguments)) {
    run_on_host(op, stack, stream);
    return;
  }
  Stack queued, results;
  size_t nbytes = 0;
  for (size_t number = 0; number < arguments.size(); ++number) {
    queued.push_back(queued_argument(arguments[number]));
    const c10::AliasInfo* alias = schema.arguments()[number].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      nbytes += arguments[number].toTensor().nbytes();
      results.push_back(arguments[number]);
    }
  }
  results.resize(schema.returns().size());
  auto run = [op, queued]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &queued);
  };
  queue(stream, run, record_of(schema.name(), nbytes, false, false));
  torch::jit::drop(*stack, schema.arguments().size());
  for (c10::IValue& result : results) {
    stack->push_back(std::move(result));
  }
}

}  // namespace

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  c10::DeviceGuard guard(storage.device());
  c10::DataPtr grown = device_memory().allocate(nbytes);
  size_t kept = std::min(nbytes, storage.nbytes());
  if (kept > 0) {
    device_memory().copy_data(grown.get(), storage.data(), kept);
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
  storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
}

}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", sim::empty);
  library.impl("empty_strided", sim::empty_strided);
  library.impl("resize_", sim::resize);
  library.impl("set_.source_Storage", at::native::set_);
  library.impl("set_.source_Storage_storage_offset", sim::set_storage);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("record_stream", sim::record_stream);
  library.impl("_copy_from", sim::copy_from);
  library.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  library.impl("cat", sim::cat);
  library.impl("view", at::native::view);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::run_operator>());
}

TORCH_LIBRARY(sim, library) {
  library.def("use_generator(int device, Generator? generator) -> ()", sim::use_generator);
}
