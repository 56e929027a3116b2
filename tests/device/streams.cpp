#include "streams.h"

#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace sim {
namespace {

// Shared by all streams, and never destroyed: their threads run until the process is gone.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Task> on_the_way;
  std::exception_ptr error;
  pid_t process = getpid();
};
Shared& shared = *new Shared;

using Lock = std::unique_lock<std::mutex>;

void keep_error() {
  Lock lock(shared.mutex);
  if (shared.error == nullptr) shared.error = std::current_exception();
}

}  // namespace

void Stream::queue(Task task) {
  if (is_forked()) throw std::runtime_error("Cannot re-initialize sim in forked subprocess");
  Lock lock(shared.mutex);
  tasks_.push_back(std::move(task));
  if (!std::exchange(has_thread_, true)) std::thread([this] { work(); }).detach();
  shared.changed.notify_all();
}

void Stream::work() {
  for (Lock lock(shared.mutex);;) {
    shared.changed.wait(lock, [this] { return !is_busy_ && !tasks_.empty(); });
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    is_busy_ = true;
    lock.unlock();
    try {
      task();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "sim: %s\n", error.what());
      keep_error();
    }
    task = nullptr;  // what it holds may need the lock of Python
    lock.lock();
    is_busy_ = is_asked_ = false;
    shared.changed.notify_all();
  }
}

bool Stream::begin() {
  if (is_forked()) throw std::runtime_error("Cannot re-initialize sim in forked subprocess");
  Lock lock(shared.mutex);
  return !has_work() && (is_busy_ = true);
}

void Stream::wait_and_begin() {
  Lock lock(shared.mutex);
  ++waiting_;
  shared.changed.notify_all();
  shared.changed.wait(lock, [this] { return !has_work(); });
  --waiting_;
  is_busy_ = true;
}

void Stream::end() {
  Lock lock(shared.mutex);
  is_busy_ = false;
  shared.changed.notify_all();
}

MarkPtr Stream::record() {
  auto mark = std::make_shared<Mark>();
  auto reach = [mark] {
    mark->is_reached = true;
    mark->at = Clock::now();
  };
  {
    Lock lock(shared.mutex);
    if (!has_work()) {
      reach();
      return mark;
    }
  }
  queue([reach] {
    Lock lock(shared.mutex);
    reach();
    shared.changed.notify_all();
  });
  return mark;
}

void Stream::wait_for(MarkPtr mark) {
  if (is_reached(mark)) return;
  queue([mark] { wait_until([&] { return mark->is_reached; }); });
}

bool Stream::is_idle() {
  Lock lock(shared.mutex);
  ask();
  return !has_work();
}

void Stream::ask() {
  is_asked_ = has_work();
  shared.changed.notify_all();
}

void Stream::wait_until_asked() {
  Lock lock(shared.mutex);
  shared.changed.wait(lock, [this] { return is_asked_ || waiting_ > 0 || !tasks_.empty(); });
}

void Stream::synchronize() { sim::synchronize(record()); }

void synchronize(const MarkPtr& mark) {
  wait_until([&] { return mark->is_reached; });
  arrive();
  Lock lock(shared.mutex);
  if (shared.error != nullptr) std::rethrow_exception(shared.error);
}

bool is_reached(const MarkPtr& mark) {
  Lock lock(shared.mutex);
  return mark->is_reached;
}

void wait_until(const std::function<bool()>& is_so) {
  Lock lock(shared.mutex);
  shared.changed.wait(lock, is_so);
}

void tell() {
  Lock lock(shared.mutex);
  shared.changed.notify_all();
}

void arrive_later(Task copy) {
  Lock lock(shared.mutex);
  shared.on_the_way.push_back(std::move(copy));
}

void arrive() {
  std::vector<Task> copies;
  {
    Lock lock(shared.mutex);
    copies.swap(shared.on_the_way);
  }
  for (auto& copy : copies) copy();
}

void latency() {
  static const auto time =
      std::chrono::microseconds(std::getenv("SIM_LATENCY") ? std::atoi(std::getenv("SIM_LATENCY")) : 1000);
  std::this_thread::sleep_for(time);
}

bool is_forked() { return getpid() != shared.process; }

}  // namespace sim
