// An accelerator without hardware: the device `sim` over the memory of the host.
//
// Here are its memory, its streams and events, and what is counted. Memory that was not written holds NaN. What the
// host waits for is counted: `reads` of values, `copies` to the device that block, `waits` for streams and events.

#include <ATen/core/grad_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "device.h"

namespace sim {
namespace {

const c10::DeviceIndex kDevices = std::getenv("SIM_DEVICES") ? std::atoi(std::getenv("SIM_DEVICES")) : 4;
constexpr c10::StreamId kPooled = 4;
thread_local c10::DeviceIndex current = 0;
thread_local bool has_device = false;

c10::DeviceIndex exchange(c10::DeviceIndex index) {
  has_device = true;
  return std::exchange(current, index);
}
thread_local std::array<c10::StreamId, 64> current_streams{};

std::mutex counting;
std::map<std::string, int64_t>& counted = *new std::map<std::string, int64_t>;

// Memory, which tasks may need for longer than tensors do.
using Memory = std::shared_ptr<void>;

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &forget, c10::Device(kSim, current)};
    auto* made = new Memory(std::malloc(size), &std::free);
    std::memset(made->get(), 0xFF, size);
    return {made->get(), made, &forget, c10::Device(kSim, current)};
  }
  static void forget(void* memory) { delete static_cast<Memory*>(memory); }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Allocator memory;

// Memory of the host that the device can read and write by itself.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* memory = static_cast<char*>(std::malloc(size + 1));
    std::lock_guard lock(mutex());
    ends()[memory] = memory + size + 1;
    return {memory, memory, &forget, c10::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &forget; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  static void forget(void* memory) {
    std::lock_guard lock(mutex());
    ends().erase(static_cast<char*>(memory));
    std::free(memory);
  }
  static bool has(const void* at) {
    std::lock_guard lock(mutex());
    auto after = ends().upper_bound(static_cast<const char*>(at));
    return after != ends().begin() && at < std::prev(after)->second;
  }
  static std::mutex& mutex() {
    static auto& mutex = *new std::mutex;
    return mutex;
  }
  static std::map<const char*, const char*>& ends() {
    static auto& ends = *new std::map<const char*, const char*>;
    return ends;
  }
};
PinnedAllocator pinned_allocator;

struct Streams {
  std::mutex mutex;
  std::array<std::deque<Stream>, 64> of_device;  // the first one is the default; then come those of the pool
  c10::StreamId pooled = 0;
};
Streams& streams = *new Streams;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kSim;
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kSim, exchange(device.index())};
  }
  c10::Device getDevice() const override { return {kSim, current}; }
  void setDevice(c10::Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(indexed(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kSim, indexed(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    std::lock_guard lock(streams.mutex);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, indexed(device)), 1 + streams.pooled++ % kPooled);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(indexed(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    current_streams.at(stream.device_index()) = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    bool is_idle = stream_of(stream).is_idle();
    if (is_idle) arrive();
    return is_idle;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count("waits");
    stream_of(stream).synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count("waits");
    std::vector<MarkPtr> marks;
    for (auto* stream : all(device)) marks.push_back(stream->record());
    for (auto& mark : marks) synchronize(mark);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new MarkPtr;
    mark(*event) = stream_of(stream).record();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) stream_of(stream).wait_for(mark(event));
  }
  bool queryEvent(void* event) const override {
    note_query();
    bool is_past = event == nullptr || is_reached(mark(event));
    if (is_past) arrive();
    return is_past;
  }
  void synchronizeEvent(void* event) const override {
    count("waits");
    if (event != nullptr) synchronize(mark(event));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(
        queryEvent(first) && queryEvent(second), "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(mark(second)->at - mark(first)->at).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }

 private:
  static c10::DeviceIndex indexed(c10::Device device) { return device.has_index() ? device.index() : current; }
  static MarkPtr& mark(void* event) { return *static_cast<MarkPtr*>(event); }
  static std::vector<Stream*> all(c10::DeviceIndex device) {
    std::lock_guard lock(streams.mutex);
    std::vector<Stream*> found;
    for (auto& stream : streams.of_device.at(device < 0 ? current : device)) found.push_back(&stream);
    return found;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::has(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* kept = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(kept->device());
    auto made = memory.allocate(size);
    if (auto both = std::min(size, kept->nbytes())) {
      Turn turn(stream_of(current_stream(current)), true);
      std::memcpy(made.get(), kept->data(), both);
    }
    kept->set_data_ptr_noswap(std::move(made));
    kept->set_nbytes(size);
  }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return exchange(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchange(index); }
};
Hooks hooks;

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_sim(tensor)) return tensor;
  c10::InferenceMode off(false);
  auto* memory = static_cast<Memory*>(tensor.storage().data_ptr().get_context());
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [kept = memory == nullptr ? Memory() : *memory](void*) {},
      tensor.options().device(at::kCPU).pinned_memory(false).requires_grad(std::nullopt));
}

void spoil(const at::Tensor& on_host) {
  at::NoGradGuard no_grad;
  if (on_host.is_floating_point()) on_host.fill_(std::numeric_limits<double>::quiet_NaN());
  if (at::isIntegralType(on_host.scalar_type(), false)) on_host.fill_(77);
}

Stream& stream_of(const c10::Stream& stream) {
  std::lock_guard lock(streams.mutex);
  auto& known = streams.of_device.at(stream.device_index());
  while (static_cast<c10::StreamId>(known.size()) <= std::max(stream.id(), kPooled)) known.emplace_back();
  return known[stream.id()];
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), current_streams.at(device));
}

c10::Stream new_stream(c10::DeviceIndex device) {
  stream_of(c10::Stream(c10::Stream::DEFAULT, c10::Device(kSim, device)));
  std::lock_guard lock(streams.mutex);
  auto& known = streams.of_device.at(device);
  known.emplace_back();
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), static_cast<c10::StreamId>(known.size()) - 1);
}

void count(const std::string& name, int64_t number) {
  std::lock_guard lock(counting);
  counted[name] += number;
}

std::map<std::string, int64_t> counts() {
  std::lock_guard lock(counting);
  return counted;
}

c10::DeviceIndex current_device() { return current; }

void note_query() {
  if (!has_device) count("queries without a device");
}

c10::Allocator* allocator() { return &memory; }

void use() { at::RegisterPrivateUse1HooksInterface(&hooks); }

}  // namespace sim
