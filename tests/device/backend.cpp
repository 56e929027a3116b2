// simccl: a backend with NCCL's rules for the device `sim`, which sends over gloo.
//
// A collective is queued in a stream of its group, or, if it is synchronous, in the current stream, and then there is
// no Work. The host goes on, also after `Work.wait`. Tensors of the CPU, tensors that are not contiguous, bit
// operations and 16-bit integers are refused. What does not match on all ranks never ends, nor does what a dead rank
// should take part in, until the group is aborted, or a watchdog ends the process because a call has lasted for the
// group's timeout.

#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <list>
#include <mutex>
#include <sstream>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "device.h"
#include "work.h"

namespace sim {
namespace {

using Lists = std::vector<Tensors>;
using Answer = c10::intrusive_ptr<c10d::Work>;

struct Aborted : std::exception {};

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  ((out << parts << ' '), ...);
  return out.str();
}

at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

bool equal_sizes(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](auto& one) { return one.sizes() == tensors[0].sizes(); });
}

struct SimcclOptions final : c10d::Backend::Options {
  explicit SimcclOptions(Milliseconds timeout) : Options("simccl", timeout) {}
};

struct Simccl final : c10d::Backend {
  // A collective. `body` sends copies of `inputs`, and returns what is then written to `outputs`.
  struct Call {
    const char* name;       // in torch.distributed
    std::string signature;  // equal on all ranks; empty for a message to one of them
    Tensors inputs, outputs;
    std::function<Tensors(Tensors)> body;
    std::function<Answer(Tensors&)> message;  // in place of a body: begins a `send` or `recv`
  };

  // Makes the backend that sends, of a store, a rank and a size.
  using Make = std::function<c10::intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Store>, int, int)>;

  Simccl(Make make, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout)
      : Backend(rank, size), make_(std::move(make)), gloo_(make_(store, rank, size)), timeout_(timeout) {}

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  void setSequenceNumberForGroup() override {}
  // Its watchdog looks at calls ten times a second.
  c10d::ErrorType getError() override {
    if (!has_lost_peer_ || Clock::now() - lost_at_.load() < Milliseconds(100)) return c10d::ErrorType::SUCCESS;
    return c10d::ErrorType::COMM_ERROR;
  }
  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<SimcclOptions>(timeout_); }

  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    auto own = std::find(ranks.begin(), ranks.end(), rank_);
    if (own == ranks.end()) return nullptr;
    auto apart = c10::make_intrusive<c10d::PrefixStore>("simccl/" + options->group_name, store);
    return c10::make_intrusive<Simccl>(make_, apart, own - ranks.begin(), ranks.size(), options->timeout);
  }

  void abort() override {
    if (aborted_->exchange(true)) return;
    if (getError() == c10d::ErrorType::SUCCESS) has_lost_peer_ = false;  // before the watchdog has looked
    tell();
    std::lock_guard lock(mutex_);
    for (auto& message : messages_) message->abort();
    new c10::intrusive_ptr<c10d::Backend>(gloo_);  // its threads may wait for ever
  }
  void shutdown() override {
    if (has_lost_peer_) {  // the watchdog of ProcessGroupNCCL sleeps before it ends the process (torch 2.11)
      std::this_thread::sleep_for(std::chrono::seconds(60));
      std::abort();
    }
    for (auto& [device, stream] : streams_)
      if (!stream_of(stream).is_idle()) return abort();
  }

  // How a call runs.

  // A call whose peer is gone never ends, until the group is aborted; or, as over NCCL's sockets, it ends at once, with
  // wrong results, and the backend has an error.
  void lose_peer() {
    if (*aborted_) return;
    if (std::getenv("SIM_CALLS_END_WITHOUT_PEER")) {
      if (!has_lost_peer_) lost_at_ = Clock::now();
      has_lost_peer_ = true;
    } else {
      wait_until([&] { return aborted_->load(); });
    }
  }

  // Wait in a task for gloo.
  void finish(const Answer& work) {
    auto future = work->getFuture();
    future->addCallback([](auto&) { tell(); });
    wait_until([&] { return *aborted_ || future->completed(); });
    if (!*aborted_ && future->hasError()) lose_peer();
    if (*aborted_) throw Aborted();
  }

  void compare(const std::string& signature) {
    auto own = at::full({1}, static_cast<int64_t>(std::hash<std::string>()(signature)), at::kLong);
    Lists all{{}};
    for (auto rank = 0; rank < size_; ++rank) all[0].push_back(at::empty_like(own));
    Tensors sent{own};
    finish(gloo_->allgather(all, sent));
    for (auto& one : all[0])
      if (!one.equal(own) && !has_lost_peer_) wait_until([&] { return *aborted_ || has_lost_peer_; });
    if (*aborted_) throw Aborted();
  }

  void run(std::vector<Call>& calls) {
    std::vector<Tensors> inputs;
    std::string signature;
    for (auto& call : calls) {
      signature += call.signature;
      inputs.emplace_back();
      for (auto& tensor : call.inputs) inputs.back().push_back(tensor.clone());
      for (auto& tensor : call.outputs) spoil(tensor);
    }
    if (!signature.empty()) compare(signature);
    latency();
    std::vector<Tensors> results(calls.size());
    std::vector<Answer> begun;
    for (size_t at = 0; at < calls.size(); ++at) {
      auto& call = calls[at];
      if (call.body) {
        results[at] = call.body(inputs[at]);
        continue;
      }
      for (auto& tensor : call.outputs) results[at].push_back(at::empty_like(tensor));
      begun.push_back(call.message(call.outputs.empty() ? inputs[at] : results[at]));
    }
    finish_messages(begun);
    for (size_t at = 0; at < calls.size(); ++at)
      for (size_t one = 0; one < calls[at].outputs.size(); ++one)
        calls[at].outputs[one].copy_(results[at][one].view(calls[at].outputs[one].sizes()));
  }

  void finish_messages(const std::vector<Answer>& begun) {
    {
      std::lock_guard lock(mutex_);
      messages_.insert(messages_.end(), begun.begin(), begun.end());
    }
    for (auto& message : begun) {
      bool has_failed = false;
      try {
        if (!*aborted_) message->wait();
      } catch (const std::exception&) {
        has_failed = true;
      }
      if (has_failed) lose_peer();
      if (*aborted_) throw Aborted();
    }
    std::lock_guard lock(mutex_);
    for (auto& message : begun) messages_.remove(message);
  }

  // Queue calls that run as one. `key` is whose stream it is: the group's, or that of messages with one rank.
  Answer queue(
      const char* name, std::vector<Call> calls, const Tensors& outputs, c10::DeviceIndex device, bool is_async,
      bool blocks = false, int key = -1) {
    refuse_if(*aborted_, rank_);
    count(std::string("collective ") + name);
    for (auto& call : calls)
      for (auto& tensor : call.inputs) count("bytes", tensor.nbytes());
    auto current = current_stream(device);
    auto stream = current;
    if (is_async) {
      auto own = streams_.find({device, key});
      if (own == streams_.end()) own = streams_.emplace(std::make_pair(device, key), new_stream(device)).first;
      stream = own->second;
      stream_of(stream).wait_for(stream_of(current).record());
    }
    bool is_ordered = key == -1;
    auto number = is_ordered ? ++asked_ : 0;
    auto self = c10::intrusive_ptr<Simccl>::reclaim_copy(this);
    auto since = Clock::now();
    stream_of(stream).queue([self, calls = std::move(calls), is_ordered, number]() mutable {
      if (is_ordered) wait_until([&] { return self->done_ == number - 1; });  // whatever their streams
      try {
        if (!*self->aborted_) self->run(calls);
      } catch (const Aborted&) {
      }
      if (is_ordered) self->done_ = number;
      tell();
    });
    auto end = stream_of(stream).record();
    watchdog.add({c10::str(name, " of rank ", rank_, ", number ", number), since, timeout_, end});
    if (is_async) return c10::make_intrusive<Queued>(stream, end, aborted_, rank_, outputs, blocks);
    if (blocks) {
      count("waits");
      sim::synchronize(end);
    }
    return nullptr;
  }

  Answer start(Call call, const Tensors& outputs, bool is_async, int key = -1) {
    auto device = outputs.empty() ? device_ : outputs[0].device().index();
    if (group_.has_value()) {
      group_->push_back(std::move(call));
      group_outputs_.insert(group_outputs_.end(), outputs.begin(), outputs.end());
      group_device_ = device;
      group_is_async_ |= is_async;
      return nullptr;
    }
    auto* name = call.name;
    return queue(name, {std::move(call)}, outputs, device, is_async, false, key);
  }

  void startCoalescing() override { group_.emplace(), group_outputs_.clear(), group_is_async_ = false; }
  Answer endCoalescing() override {
    auto calls = std::exchange(group_, std::nullopt).value();
    if (calls.empty()) return nullptr;
    return queue("coalesced", std::move(calls), group_outputs_, group_device_, group_is_async_);
  }

  // What NCCL refuses.

  at::Tensor host(const at::Tensor& tensor) {
    TORCH_CHECK(is_sim(tensor), "Tensors must be on the device sim, but one is on ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    auto type = tensor.scalar_type();
    TORCH_CHECK(
        type != at::kShort && type != at::kUInt16 && type != at::kUInt32 && type != at::kUInt64,
        "Input tensor data type is not supported for simccl process group: ", type);
    device_ = tensor.device().index();
    return on_host(tensor.is_complex() ? at::view_as_real(tensor) : tensor);
  }
  Tensors host(const Tensors& tensors) {
    Tensors found;
    for (auto& tensor : tensors) found.push_back(host(tensor));
    return found;
  }
  Tensors bytes(const Tensors& tensors) {
    Tensors found;
    for (auto& tensor : tensors) found.push_back(as_bytes(host(tensor)));
    return found;
  }
  static void no_bits(const c10d::ReduceOp& op) {
    TORCH_CHECK(
        op != c10d::ReduceOp::BAND && op != c10d::ReduceOp::BOR && op != c10d::ReduceOp::BXOR,
        "Cannot use a bit operation with simccl");
  }
  static std::string described(const Tensors& tensors) {
    std::string all;
    for (auto& tensor : tensors) all += text(tensor.scalar_type(), tensor.numel());
    return all;
  }

  // Reductions.

  at::Tensor reduced(at::Tensor data, const c10d::ReduceOp& op, int root = -1) {
    bool is_mean = op == c10d::ReduceOp::AVG;
    if (op == c10d::ReduceOp::PREMUL_SUM) {
      auto& by = *static_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
      by.tensor_factor.defined() ? data.mul_(on_host(by.tensor_factor)) : data.mul_(by.double_factor);
    }
    auto sent_by = is_mean || op == c10d::ReduceOp::PREMUL_SUM ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    Tensors sent{data};
    if (root < 0) {
      c10d::AllreduceOptions options;
      options.reduceOp = sent_by;
      finish(gloo_->allreduce(sent, options));
    } else {
      c10d::ReduceOptions options;
      options.reduceOp = sent_by;
      options.rootRank = root;
      finish(gloo_->reduce(sent, options));
    }
    if (is_mean) data.is_floating_point() ? data.div_(size_) : data.div_(size_, "trunc");
    return data;
  }

  Answer reduce_all(const char* name, Tensors& data, const c10d::ReduceOp& op, bool is_async) {
    no_bits(op);
    auto sent = host(data);
    auto body = [this, op](Tensors sent) {
      for (auto& one : sent) one = reduced(one, op);
      return sent;
    };
    return start({name, text(name, int(op.op_)) + described(sent), sent, sent, body, {}}, data, is_async);
  }
  Answer allreduce(Tensors& data, const c10d::AllreduceOptions& options) override {
    return reduce_all("all_reduce", data, options.reduceOp, options.asyncOp);
  }
  Answer allreduce_coalesced(Tensors& data, const c10d::AllreduceCoalescedOptions& options) override {
    return reduce_all("coalesced", data, options.reduceOp, options.asyncOp);
  }
  Answer reduce(Tensors& data, const c10d::ReduceOptions& options) override {
    no_bits(options.reduceOp);
    auto sent = host(data);
    auto root = static_cast<int>(options.rootRank);
    auto body = [this, root, op = options.reduceOp](Tensors sent) { return Tensors{reduced(sent[0], op, root)}; };
    auto signature = text("reduce", int(options.reduceOp.op_), root) + described(sent);
    return start({"reduce", signature, sent, rank_ == root ? sent : Tensors(), body, {}}, data, options.asyncOp);
  }
  Answer reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    no_bits(options.reduceOp);
    auto sent = host(inputs[0]);
    auto body = [this, op = options.reduceOp](Tensors sent) {
      Tensors own;
      for (auto rank = 0; rank < size_; ++rank) {
        auto sum = reduced(sent[rank], op, rank);
        if (rank == rank_) own.push_back(sum);
      }
      return own;
    };
    auto* name = equal_sizes(sent) ? "reduce_scatter" : "coalesced";
    auto signature = text(name, "reduce_scatter", int(options.reduceOp.op_)) + described(sent);
    return start({name, signature, sent, host(outputs), body, {}}, outputs, options.asyncOp);
  }
  Answer reduce_scatter_single(
      const char* name, const Tensors& outputs, const Tensors& inputs, const c10d::ReduceOp& op, bool is_async) {
    no_bits(op);
    auto sent = host(inputs);
    auto body = [this, op](Tensors sent) {
      for (auto& one : sent) one = reduced(one.view({size_, -1}), op)[rank_];
      return sent;
    };
    return start({name, text(name, int(op.op_)) + described(sent), sent, host(outputs), body, {}}, outputs, is_async);
  }
  Answer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_single("reduce_scatter_tensor", {output}, {input}, options.reduceOp, options.asyncOp);
  }
  Answer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_single("coalesced", outputs, inputs, options.reduceOp, options.asyncOp);
  }

  // Copies between ranks, as bytes.

  at::Tensor from_root(at::Tensor data, int root) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    Tensors sent{data};
    finish(gloo_->broadcast(sent, options));
    return data;
  }
  Tensors from_all(const at::Tensor& own, const std::vector<int64_t>& sizes) {
    Tensors all;
    for (auto rank = 0; rank < size_; ++rank)
      all.push_back(from_root(rank == rank_ ? own : at::empty({sizes[rank]}, own.options()), rank));
    return all;
  }
  static std::vector<int64_t> numels(const Tensors& tensors) {
    std::vector<int64_t> found;
    for (auto& tensor : tensors) found.push_back(tensor.numel());
    return found;
  }

  Answer broadcast(Tensors& data, const c10d::BroadcastOptions& options) override {
    auto sent = bytes(data);
    auto root = static_cast<int>(options.rootRank);
    auto body = [this, root](Tensors sent) { return Tensors{from_root(sent[0], root)}; };
    auto signature = text("broadcast", root) + described(host(data));
    return start({"broadcast", signature, sent, rank_ == root ? Tensors() : sent, body, {}}, data, options.asyncOp);
  }
  Answer allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto filled = bytes(outputs[0]);
    auto body = [this, sizes = numels(filled)](Tensors sent) { return from_all(sent[0], sizes); };
    auto* name = equal_sizes(filled) ? "all_gather" : "coalesced";
    auto signature = text(name, "all_gather") + described(host(outputs[0]));
    return start({name, signature, bytes(inputs), filled, body, {}}, outputs[0], options.asyncOp);
  }
  Answer all_gather_single(const char* name, const Tensors& outputs, const Tensors& inputs, bool is_async) {
    auto body = [this](Tensors sent) {
      for (auto& one : sent) one = at::cat(from_all(one, std::vector<int64_t>(size_, one.numel())));
      return sent;
    };
    for (size_t at = 0; at < inputs.size(); ++at)
      TORCH_CHECK(
          outputs[at].numel() == size_ * inputs[at].numel() && outputs[at].dtype() == inputs[at].dtype(),
          "output tensor size must be equal to world_size times input tensor size");
    return start(
        {name, text(name) + described(host(inputs)), bytes(inputs), bytes(outputs), body, {}}, outputs, is_async);
  }
  Answer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return all_gather_single("all_gather_into_tensor", {output}, {input}, options.asyncOp);
  }
  Answer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return all_gather_single("coalesced", outputs, inputs, options.asyncOp);
  }
  Answer gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto root = static_cast<int>(options.rootRank);
    auto filled = outputs.empty() ? Tensors() : outputs[0];
    TORCH_CHECK(equal_sizes(filled), "Tensors must have the same size");
    auto body = [this, root](Tensors sent) {
      auto all = from_all(sent[0], std::vector<int64_t>(size_, sent[0].numel()));
      return rank_ == root ? all : Tensors();
    };
    auto signature = text("gather", root) + described(host(inputs));
    return start({"gather", signature, bytes(inputs), bytes(filled), body, {}}, filled, options.asyncOp);
  }
  Answer scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    auto root = static_cast<int>(options.rootRank);
    auto sent = inputs.empty() ? Tensors() : inputs[0];
    TORCH_CHECK(equal_sizes(sent), "Tensors must have the same size");
    auto body = [this, root, size = int64_t(outputs[0].nbytes())](Tensors sent) {
      auto all = rank_ == root ? at::stack(sent) : at::empty({size_, size}, at::kByte);
      return Tensors{from_root(all, root)[rank_]};
    };
    auto signature = text("scatter", root) + described(host(outputs));
    return start({"scatter", signature, bytes(sent), bytes(outputs), body, {}}, outputs, options.asyncOp);
  }
  Answer alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& received, std::vector<int64_t>& sent,
      const c10d::AllToAllOptions& options) override {
    host(output);
    auto body = [this, result = on_host(output).options(), shape = output.sizes().vec(), received,
                 sent](Tensors inputs) {
      auto output = at::empty(shape, result);
      auto to = received, from = sent;
      finish(gloo_->alltoall_base(output, inputs[0], to, from));
      return Tensors{output};
    };
    auto signature = text("all_to_all_single", input.scalar_type());
    return start({"all_to_all_single", signature, {host(input)}, {host(output)}, body, {}}, {output}, options.asyncOp);
  }
  Answer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto filled = bytes(outputs);
    auto body = [this, received = numels(filled)](Tensors inputs) {
      auto to = received, from = numels(inputs);
      auto input = at::cat(inputs), output = at::empty({std::accumulate(to.begin(), to.end(), int64_t(0))}, at::kByte);
      finish(gloo_->alltoall_base(output, input, to, from));
      return output.split_with_sizes(received);
    };
    auto signature = text("all_to_all", inputs[0].scalar_type());
    return start({"all_to_all", signature, bytes(inputs), filled, body, {}}, outputs, options.asyncOp);
  }

  // Messages from one rank to another, and the barrier, which waits on the host.

  Answer send(Tensors& data, int dst, int) override {
    auto message = [this, dst](Tensors& data) { return gloo_->send(data, dst, 0); };
    return start({"send", "", bytes(data), {}, {}, message}, data, true, dst);
  }
  Answer recv(Tensors& data, int src, int) override {
    auto message = [this, src](Tensors& data) { return gloo_->recv(data, src, 0); };
    return start({"recv", "", {}, bytes(data), {}, message}, data, true, src);
  }
  Answer barrier(const c10d::BarrierOptions& options) override {
    auto body = [](Tensors) { return Tensors(); };
    return queue("barrier", {{"barrier", "barrier", {}, {}, body, {}}}, {}, current_device(), options.asyncOp, true);
  }

  Make make_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  Milliseconds timeout_;
  std::atomic<Clock::time_point> lost_at_{};
  std::atomic<bool> has_lost_peer_{false};
  std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
  std::mutex mutex_;
  std::list<Answer> messages_;  // which gloo has begun
  std::map<std::pair<c10::DeviceIndex, int>, c10::Stream> streams_;
  int64_t asked_ = 0;
  std::atomic<int64_t> done_ = 0;
  c10::DeviceIndex device_ = 0;
  std::optional<std::vector<Call>> group_;
  Tensors group_outputs_;
  c10::DeviceIndex group_device_ = 0;
  bool group_is_async_ = false;
};

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("use", &sim::use);
  m.def("counts", &sim::counts);
  m.def("is_forked", &sim::is_forked);
  // With what torch looks for in Python where it splits a group.
  using Options = sim::SimcclOptions;
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(m, "Options")
      .def("__deepcopy__", [](const Options& own, py::dict) { return c10::make_intrusive<Options>(own.timeout); });
  py::class_<sim::Simccl, c10d::Backend, c10::intrusive_ptr<sim::Simccl>>(m, "Simccl")
      .def("get_error", &sim::Simccl::getError)
      .def_property_readonly("options", [](sim::Simccl& own) { return c10::make_intrusive<Options>(own.timeout_); })
      .def(
          py::init(
              [](sim::Simccl::Make make, c10::intrusive_ptr<c10d::Store> store, int rank, int size, int64_t timeout) {
                return c10::make_intrusive<sim::Simccl>(make, store, rank, size, sim::Milliseconds(timeout));
              }));
}
