// What the device `sim` computes: every operator, by the CPU, in the order of its stream, for which the host does not
// wait.
//
// Memory of the host to which a copy is on its way holds NaN; the copy arrives when the host next waits. A copy from
// pinned memory reads it late.

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/resize_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>

#include "device.h"

namespace sim {
namespace {

using Stack = torch::jit::Stack;
using Swap = std::function<at::Tensor(const at::Tensor&)>;

// Operators whose results have sizes that the host must know.
const std::set<std::string> sizes_on_host = {"aten::nonzero",  "aten::masked_select",      "aten::unique_dim",
                                             "aten::_unique2", "aten::unique_consecutive", "aten::bincount"};

// Operators that make their `out=` larger on the way to a result of one number.
const std::set<std::string> resizes_result = {"aten::mse_loss", "aten::smooth_l1_loss"};

bool is_resized(const c10::OperatorHandle& op) {
  return op.schema().overload_name() == "out" && resizes_result.count(op.schema().name()) != 0;
}

bool reads_values(const c10::OperatorHandle& op, const Stack& stack) {
  auto& schema = op.schema();
  for (auto& result : schema.returns()) {
    auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
  }
  for (auto at = stack.size() - schema.arguments().size(); at < stack.size(); ++at) {
    if (!stack[at].isOptionalTensorList()) continue;  // indices: those of a mask have to be counted
    for (const std::optional<at::Tensor>& one : stack[at].toOptionalTensorList())
      if (one.has_value() && one->defined() && one->scalar_type() == at::kBool) return true;
  }
  return sizes_on_host.count(schema.name()) != 0;
}

void swap_tensors(c10::IValue& value, const Swap& swapped) {
  if (value.isTensor()) {
    value = swapped(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& tensor : list) tensor = swapped(tensor);
    value = c10::IValue(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorList())
      list.push_back(one.has_value() ? std::make_optional(swapped(*one)) : std::nullopt);
    value = c10::IValue(list);
  }
}

// The arguments of a call, with its tensors elsewhere, and which is which.
struct Arguments {
  Arguments(const Stack& stack, size_t number, c10::DeviceType device, const Swap& moved)
      : stack(stack.end() - number, stack.end()) {
    for (auto& value : this->stack) {
      if (value.isDevice() && value.toDevice().type() == kSim) value = c10::IValue(c10::Device(device));
      swap_tensors(value, [&](const at::Tensor& tensor) {
        if (!is_sim(tensor)) return tensor;
        pairs.emplace_back(tensor, moved(tensor));
        return pairs.back().second;
      });
    }
  }
  const std::pair<at::Tensor, at::Tensor>* find(const at::Tensor& moved) const {
    for (auto& pair : pairs)
      if (moved.is_same(pair.second)) return &pair;
    return nullptr;
  }
  Stack stack;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
};

at::Tensor like(const at::Tensor& tensor) {
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(c10::Device(kSim, current_device())));
}

at::Tensor moved(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto result = like(tensor);
  if (tensor.numel() != 0) on_host(result).copy_(tensor);
  return result;
}

at::Tensor resizable_on_host(const at::Tensor& tensor) {
  if (tensor.dim() == 0) return at::empty({0}, tensor.options().device(at::kCPU));  // the result
  return tensor.numel() != 0 ? on_host(tensor).clone() : at::empty_like(tensor, at::kCPU);
}

at::Tensor output_on_host(const at::Tensor& tensor) {
  return tensor.numel() != 0 ? on_host(tensor) : resizable_on_host(tensor);
}

// Compute now. What an operator returns of its arguments is the argument itself, what it makes is moved.
void compute(const c10::OperatorHandle& op, Stack* stack) {
  auto number = op.schema().arguments().size();
  Arguments arguments(*stack, number, at::kCPU, is_resized(op) ? resizable_on_host : output_on_host);
  torch::jit::drop(*stack, number);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments.stack);
  for (auto& value : arguments.stack) {
    swap_tensors(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      auto* given = arguments.find(tensor);
      if (given != nullptr && given->first.sizes() == tensor.sizes() && !is_resized(op)) return given->first;
      auto result = given == nullptr ? like(tensor) : given->first.resize_(tensor.sizes());
      if (tensor.numel() != 0) on_host(result).copy_(tensor);
      return result;
    });
    stack->push_back(std::move(value));
  }
}

// Compute later, in the stream, into results whose shapes torch's meta kernels tell; false if there is no such kernel.
bool compute_later(const c10::OperatorHandle& op, Stack* stack, Stream& stream) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return false;
  auto number = op.schema().arguments().size();
  Arguments metas(*stack, number, at::kMeta, [](const at::Tensor& tensor) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  });
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &metas.stack);
  } catch (const std::exception&) {
    return false;  // the kernel of the CPU says what is wrong
  }
  std::vector<at::Tensor> fresh;
  for (auto& value : metas.stack) {
    swap_tensors(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      auto* given = metas.find(tensor);
      if (given == nullptr) return fresh.emplace_back(like(tensor));
      if (given->first.sizes() != tensor.sizes()) given->first.resize_(tensor.sizes());
      return given->first;
    });
  }
  Arguments arguments(*stack, number, at::kCPU, on_host);
  std::vector<at::Tensor> results;
  for (auto& tensor : fresh) results.push_back(on_host(tensor));
  stream.queue([op, results, arguments = std::move(arguments)]() mutable {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments.stack);
    auto next = results.begin();
    for (auto& value : arguments.stack)
      swap_tensors(value, [&](const at::Tensor& tensor) {
        if (tensor.defined() && arguments.find(tensor) == nullptr) (next++)->copy_(tensor);
        return tensor;
      });
  });
  torch::jit::drop(*stack, number);
  for (auto& value : metas.stack) stack->push_back(std::move(value));
  return true;
}

// A view of the first argument, of which only sizes, strides, offset and dtype are computed.
void make_view(const c10::OperatorHandle& op, Stack* stack) {
  auto number = op.schema().arguments().size();
  Arguments arguments(*stack, number, at::kCPU, on_host);
  torch::jit::drop(*stack, number);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments.stack);
  TORCH_CHECK(arguments.stack[0].isTensor(), "sim makes no lists of views by ", op.schema().name());
  auto& base = arguments.pairs.at(0).first;
  auto seen = arguments.stack[0].toTensor();
  auto start = static_cast<const char*>(base.storage().data());
  auto offset = seen.numel() == 0 ? 0 : (static_cast<const char*>(seen.data_ptr()) - start) / seen.element_size();
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), seen.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(seen.sizes(), seen.strides(), offset);
  stack->push_back(view);
}

void on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  auto* alias = op.schema().returns().empty() ? nullptr : op.schema().returns()[0].alias_info();
  if (alias != nullptr && !alias->isWrite()) return make_view(op, stack);
  auto device = current_device();
  for (auto at = stack->size() - op.schema().arguments().size(); at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    auto found = [&](const at::Tensor& tensor) {
      if (is_sim(tensor)) device = tensor.device().index();
      return tensor;
    };
    if (value.isDevice() && value.toDevice().has_index()) device = value.toDevice().index();
    if (value.isTensor() || value.isTensorList()) swap_tensors(value, found);
  }
  c10::DeviceGuard guard(c10::Device(kSim, device));
  auto& stream = stream_of(current_stream(device));
  if (reads_values(op, *stack)) {
    count("reads");
    stream.synchronize();
  } else if (Turn turn(stream, false); turn.has_begun) {
    compute(op, stack);
    return;
  } else if (!op.hasTag(at::Tag::nondeterministic_seeded) && !is_resized(op) && compute_later(op, stack, stream)) {
    return;
  }
  Turn turn(stream, true);
  compute(op, stack);
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device->has_index() ? device : std::nullopt);
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device->has_index() ? device : std::nullopt);
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

void copy_within(const at::Tensor& from, const at::Tensor& to) {
  auto& sending = stream_of(current_stream(from.device().index()));
  auto& receiving = stream_of(current_stream(to.device().index()));
  auto copy = [from = on_host(from), to = on_host(to)] { to.copy_(from); };
  if (&sending != &receiving) {
    sending.wait_for(receiving.record());
    sending.queue(copy);
    receiving.wait_for(sending.record());
  } else if (Turn turn(sending, false); turn.has_begun) {
    copy();
  } else {
    sending.queue(copy);
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (is_sim(from) && is_sim(to)) {
    copy_within(from, to);
    return to;
  }
  bool to_device = is_sim(to);
  auto& ours = to_device ? to : from;
  auto& theirs = to_device ? from : to;
  auto& stream = stream_of(current_stream(ours.device().index()));
  auto device = on_host(ours);
  auto host = theirs.detach();
  bool is_late = non_blocking && theirs.is_pinned();
  if (is_late && !to_device) {
    spoil(host);
    stream.queue([device, host] { arrive_later([value = device.clone(), host] { host.copy_(value); }); });
  } else if (to_device && non_blocking) {
    stream.queue([&stream, device, host = is_late ? host : host.clone()] {
      stream.wait_until_asked();
      arrive();  // what was copied from the device before, perhaps into this memory
      device.copy_(host);
    });
  } else {
    count(to_device ? "copies" : "reads");
    stream.synchronize();
    Turn turn(stream, true);
    to_device ? device.copy_(host) : host.copy_(device);
  }
  return to;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  count("reads");
  auto& stream = stream_of(current_stream(tensor.device().index()));
  stream.synchronize();
  Turn turn(stream, true);
  return on_host(tensor).item();
}

// torch asks devices that it doesn't know for convolutions by operators of their own.
at::Tensor convolve(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  Turn turn(stream_of(current_stream(input.device().index())), true);
  auto added = bias.has_value() && bias->defined() ? std::make_optional(on_host(*bias)) : std::nullopt;
  return moved(at::convolution_symint(
      on_host(input), on_host(weight), added, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolve_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> wanted) {
  Turn turn(stream_of(current_stream(input.device().index())), true);
  std::vector<c10::SymInt> bias = {gradient.sym_size(1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      on_host(gradient), on_host(input), on_host(weight), c10::SymIntArrayRef(bias), stride, padding, dilation, transposed,
      output_padding, groups, wanted);
  return {moved(of_input), moved(of_weight), moved(of_bias)};
}

at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  Turn turn(stream_of(current_stream(self.device().index())), true);  // of integers, too, as CUDA's
  return moved(at::histc(on_host(self).to(at::kDouble), bins, least, most).to(self.scalar_type()));
}

void record_stream(at::Tensor&, c10::Stream) {}  // memory is kept for as long as a task needs it

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);  // whose offset is from where the storage begins
  m.impl("resize_", &at::native::resize_);
  m.impl("histc", &histc);
  // torch's own for devices that it doesn't know takes no channels-last memory.
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolve);
  m.impl("convolution_backward_overrideable", &convolve_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

}  // namespace
}  // namespace sim
