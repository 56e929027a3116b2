// A collective that was begun: the Work of torch, and the watchdog that ends a process in which one lasts too long.

#pragma once

#include <c10/core/StreamGuard.h>

#include <atomic>
#include <cstdlib>
#include <list>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device.h"

namespace sim {

using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

// What has been asked of the device and is not complete, so that something looks after it.
struct Pending {
  std::string what;
  Clock::time_point since;
  Milliseconds timeout;
  MarkPtr end;
};

class Watchdog {
 public:
  void add(Pending pending) {
    std::lock_guard lock(mutex_);
    pending_.push_back(std::move(pending));
    if (!std::exchange(has_thread_, true)) std::thread([this] { look(); }).detach();
  }

 private:
  void look() {
    for (;; std::this_thread::sleep_for(Milliseconds(100))) {
      std::lock_guard lock(mutex_);
      pending_.remove_if([](const Pending& one) { return is_reached(one.end); });
      for (auto& one : pending_) {
        auto lasted = std::chrono::duration_cast<Milliseconds>(Clock::now() - one.since);
        if (lasted < one.timeout) continue;
        std::fprintf(
            stderr, "simccl: watchdog caught collective operation timeout: %s ran for %ld milliseconds; abort\n",
            one.what.c_str(), static_cast<long>(lasted.count()));
        std::abort();
      }
    }
  }
  std::mutex mutex_;
  std::list<Pending> pending_;
  bool has_thread_ = false;
};
inline Watchdog& watchdog = *new Watchdog;

inline void refuse_if(bool aborted, int rank) {
  if (aborted) C10_THROW_ERROR(DistBackendError, c10::str("NCCL communicator was aborted on rank ", rank));
}

// What ends when the stream has come as far, or when the group is aborted.
struct Queued final : c10d::Work {
  Queued(
      c10::Stream stream, MarkPtr end, std::shared_ptr<std::atomic<bool>> aborted, int rank, const Tensors& outputs,
      bool blocks)
      : Work(rank), stream_(stream), end_(std::move(end)), aborted_(std::move(aborted)), blocks_(blocks) {
    future_ = c10::make_intrusive<at::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    c10::StreamGuard guard(stream);
    future_->markCompleted(c10::IValue(outputs));  // what waits for it waits in its stream
  }
  bool isCompleted() override {
    note_query();
    return is_reached(end_);
  }
  bool isSuccess() const override { return !*aborted_; }
  bool wait(Milliseconds timeout) override {
    refuse_if(*aborted_, rank_);
    stream_of(current_stream(stream_.device_index())).wait_for(end_);
    if (blocks_ || timeout != kNoTimeout) {
      count("waits");
      sim::synchronize(end_);
    }
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  c10::Stream stream_;
  MarkPtr end_;
  std::shared_ptr<std::atomic<bool>> aborted_;
  bool blocks_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace sim
