// An accelerator without hardware: the device `sim` over host memory, and `simccl`, a backend with NCCL's rules.
//
// Every operator runs on the CPU, over the same memory. What the host reads of the device is counted. A copy to the host
// that does not block arrives when the host waits for the device; until then there are NaN. simccl refuses tensors of the
// CPU, has no bit operations and no tags, and returns no Work for a synchronous call.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <cstdlib>
#include <limits>
#include <set>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
const c10::DeviceIndex kDevices = std::getenv("SIM_DEVICES") ? std::atoi(std::getenv("SIM_DEVICES")) : 4;
int64_t host_reads = 0;
std::vector<std::pair<at::Tensor, at::Tensor>> under_way;  // copies to the host: what was sent, and where it goes
c10::DeviceIndex current = 0;

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = size == 0 ? nullptr : std::malloc(size);
    return {memory, memory, &std::free, c10::Device(kSim, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Allocator allocator;

void arrive() {
  for (auto& [from, to] : std::exchange(under_way, {})) to.copy_(from);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kSim;
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = current;
    current = device.index();
    return {kSim, before};
  }
  c10::Device getDevice() const override { return {kSim, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return c10::Stream(c10::Stream::DEFAULT, stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return under_way.empty(); }
  bool queryStream(const c10::Stream&) const override { return under_way.empty(); }
  void synchronizeEvent(void*) const override { arrive(); }
  void synchronizeStream(const c10::Stream&) const override { arrive(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { arrive(); }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* kept = storage.unsafeGetStorageImpl();
    auto made = allocator.allocate(size);
    if (auto both = std::min(size, kept->nbytes())) std::memcpy(made.get(), kept->data(), both);
    kept->set_data_ptr_noswap(std::move(made));
    kept->set_nbytes(size);
  }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
};
Hooks hooks;

bool is_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_sim(tensor)) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [kept = tensor](void*) {}, tensor.options().device(at::kCPU));
}

at::Tensor to_sim(const at::Tensor& tensor) {
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::Device(kSim, current)));
  if (tensor.numel() != 0) on_host(made).copy_(tensor);
  return made;
}

// Operators whose results have sizes that the host must know.
const std::set<std::string> sizes_on_host = {
    "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::bincount"};

// Run an operator on aliases of its tensors; what it returns of them is the tensor itself, what it makes is moved.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<std::pair<at::Tensor, at::Tensor>> given;  // of the device, and their aliases
  auto swapped = [&](const at::Tensor& tensor) {
    if (!is_sim(tensor)) return tensor;
    given.emplace_back(tensor, on_host(tensor));
    return given.back().second;
  };
  auto arguments = op.schema().arguments().size();
  for (auto at = stack->size() - arguments; at < stack->size(); ++at) {
    auto& value = (*stack)[at];
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
    } else if (value.isDevice()) {
      value = c10::IValue(c10::Device(at::kCPU));
    }
  }
  for (auto& result : op.schema().returns()) {
    auto alias = result.alias_info();
    TORCH_CHECK(alias == nullptr || alias->isWrite(), "sim makes no views by ", op.schema().name());
    host_reads += result.type()->kind() != c10::TypeKind::TensorType && result.type()->kind() != c10::TypeKind::ListType;
  }
  host_reads += sizes_on_host.count(op.schema().name());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  auto back = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (auto& [original, other] : given) {
      if (!tensor.is_same(other)) continue;
      if (original.sizes() != other.sizes() || original.data_ptr() != other.data_ptr()) {  // `out=` was resized
        original.resize_(other.sizes());
        on_host(original).copy_(other);
      }
      return original;
    }
    return to_sim(tensor);
  };
  for (auto at = stack->size() - op.schema().returns().size(); at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = back(tensor);
      value = c10::IValue(list);
    }
  }
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool to_host = is_sim(from) && !is_sim(to);
  if (to_host && non_blocking) {
    under_way.emplace_back(on_host(from).clone(), to.detach());
    at::NoGradGuard no_grad;
    if (to.is_floating_point()) under_way.back().second.fill_(std::numeric_limits<double>::quiet_NaN());
    return to;
  }
  if (to_host) {
    ++host_reads;
    arrive();
  }
  on_host(to).copy_(on_host(from));
  return to;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  ++host_reads;
  arrive();
  return on_host(tensor).item();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("resize_", &at::native::resize_);
}

struct Done final : c10d::Work {
  explicit Done(const std::vector<at::Tensor>& outputs)
      : future_(c10::make_intrusive<at::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(kSim, current)})) {
    future_->markCompleted(c10::IValue(outputs));
    finish();
  }
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Answer = c10::intrusive_ptr<c10d::Work>;

struct Simccl final : c10d::Backend {
  Simccl(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(gloo) {}

  const std::string getBackendName() const override { return "simccl"; }

  static at::Tensor host(const at::Tensor& tensor) {
    TORCH_CHECK(is_sim(tensor), "Tensors must be on the device sim, but one is on ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    return on_host(tensor);
  }
  static Tensors host(const Tensors& tensors) {
    Tensors found;
    for (auto& tensor : tensors) found.push_back(host(tensor));
    return found;
  }
  static Lists host(const Lists& lists) {
    Lists found;
    for (auto& tensors : lists) found.push_back(host(tensors));
    return found;
  }
  static void no_bits(const c10d::ReduceOp& op) {
    TORCH_CHECK(
        op != c10d::ReduceOp::BAND && op != c10d::ReduceOp::BOR && op != c10d::ReduceOp::BXOR,
        "Cannot use a bit operation with simccl");
  }
  template <class Options>
  static Answer ended(Answer work, const Options& options, const Tensors& outputs) {
    work->wait();
    return options.asyncOp ? c10::make_intrusive<Done>(outputs) : nullptr;
  }

  Answer broadcast(Tensors& data, const c10d::BroadcastOptions& options) override {
    auto on_host = host(data);
    return ended(gloo_->broadcast(on_host, options), options, data);
  }
  Answer allreduce(Tensors& data, const c10d::AllreduceOptions& options) override {
    no_bits(options.reduceOp);
    auto on_host = host(data);
    return ended(gloo_->allreduce(on_host, options), options, data);
  }
  Answer reduce(Tensors& data, const c10d::ReduceOptions& options) override {
    no_bits(options.reduceOp);
    auto on_host = host(data);
    return ended(gloo_->reduce(on_host, options), options, data);
  }
  Answer allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    return ended(gloo_->allgather(to, from, options), options, outputs[0]);
  }
  Answer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = host(output).view({-1});
    auto from = host(input).view({-1});
    return ended(gloo_->_allgather_base(to, from, options), options, {output});
  }
  Answer gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    return ended(gloo_->gather(to, from, options), options, outputs.empty() ? Tensors() : outputs[0]);
  }
  Answer scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    return ended(gloo_->scatter(to, from, options), options, outputs);
  }
  Answer reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    no_bits(options.reduceOp);
    auto to = host(outputs);
    auto from = host(inputs);
    return ended(gloo_->reduce_scatter(to, from, options), options, outputs);
  }
  Answer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    no_bits(options.reduceOp);
    auto to = host(output);
    auto from = host(input);
    return ended(gloo_->_reduce_scatter_base(to, from, options), options, {output});
  }
  Answer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    return ended(gloo_->allgather_into_tensor_coalesced(to, from, options), options, outputs);
  }
  Answer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    no_bits(options.reduceOp);
    auto to = host(outputs);
    auto from = host(inputs);
    return ended(gloo_->reduce_scatter_tensor_coalesced(to, from, options), options, outputs);
  }
  Answer allreduce_coalesced(Tensors& data, const c10d::AllreduceCoalescedOptions& options) override {
    no_bits(options.reduceOp);
    auto on_host = host(data);
    return ended(gloo_->allreduce_coalesced(on_host, options), options, data);
  }
  Answer alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& received, std::vector<int64_t>& sent,
      const c10d::AllToAllOptions& options) override {
    auto to = host(output);
    auto from = host(input);
    return ended(gloo_->alltoall_base(to, from, received, sent, options), options, {output});
  }
  Answer send(Tensors& data, int dst, int) override {
    auto on_host = host(data);
    gloo_->send(on_host, dst, 0)->wait();
    return c10::make_intrusive<Done>(data);
  }
  Answer recv(Tensors& data, int src, int) override {
    auto on_host = host(data);
    gloo_->recv(on_host, src, 0)->wait();
    return c10::make_intrusive<Done>(data);
  }
  Answer barrier(const c10d::BarrierOptions& options) override { return ended(gloo_->barrier(options), options, {}); }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("simccl", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Simccl>(std::move(gloo));
  });
  m.def("host_reads", [] { return host_reads; });
  m.def("synchronize", &arrive);
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { current = static_cast<c10::DeviceIndex>(index); });
}
