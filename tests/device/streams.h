// Streams: what a device does, in which order, and when. Nothing here knows tensors.
//
// A task runs at once in the thread that gives it if its stream has nothing else to do, else later in a thread of the
// stream. So the host waits only where it asks for it.

#pragma once

#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <memory>

namespace sim {

using Clock = std::chrono::steady_clock;
using Task = std::function<void()>;

// A point in a stream, which the stream reaches.
struct Mark {
  bool is_reached = false;
  Clock::time_point at;
};
using MarkPtr = std::shared_ptr<Mark>;

class Stream {
 public:
  // Run a task in the stream's thread, after what was given before.
  void queue(Task task);
  // Begin to use the stream from this thread, if it has nothing to do; `end` ends it.
  bool begin();
  void end();
  // Wait until that is so, and begin.
  void wait_and_begin();
  MarkPtr record();
  // Let what follows in this stream wait for a point in another one.
  void wait_for(MarkPtr mark);
  bool is_idle();
  void synchronize();
  // Wait in a task of this stream until something else waits for it, or would come after it.
  void wait_until_asked();

 private:
  bool has_work() const { return is_busy_ || !tasks_.empty(); }
  void work();
  void ask();
  std::deque<Task> tasks_;
  bool is_busy_ = false;
  bool is_asked_ = false;
  int waiting_ = 0;  // threads that wait to begin
  bool has_thread_ = false;
};

// A stream, used by this thread until the end of a block.
struct Turn {
  Turn(Stream& stream, bool waits) : stream(stream) {
    if (waits) stream.wait_and_begin();
    has_begun = waits || stream.begin();
  }
  ~Turn() {
    if (has_begun) stream.end();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  Stream& stream;
  bool has_begun = false;
};

// The host waits until a stream reaches a point; then it has what was copied to it. Raises what a task has raised.
void synchronize(const MarkPtr& mark);
bool is_reached(const MarkPtr& mark);

// Wait in a task until something is so; whoever changes that calls `tell`.
void wait_until(const std::function<bool()>& is_so);
void tell();

// How a copy arrives in the memory of the host, when the host next waits for the device.
void arrive_later(Task copy);
void arrive();

// What lies between the beginning of a slow task and its result.
void latency();

// Whether this process was forked from one that has used the device.
bool is_forked();

}  // namespace sim
