// The device `sim`, as its backend for collectives sees it.

#pragma once

#include <ATen/ATen.h>

#include <map>
#include <string>

#include "streams.h"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

inline bool is_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The same memory as a tensor of the CPU, for tasks.
at::Tensor on_host(const at::Tensor& tensor);

// Write what nobody may take for a result.
void spoil(const at::Tensor& on_host);

c10::DeviceIndex current_device();  // of this thread
// Count a question to a device, by a thread that was never given one: CUDA would make a context on the first device.
void note_query();
c10::Allocator* allocator();

// A stream, by what torch knows of it.
Stream& stream_of(const c10::Stream& stream);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);

// Make torch know the device.
void use();

// What was counted, by name.
void count(const std::string& name, int64_t number = 1);
std::map<std::string, int64_t> counts();

}  // namespace sim
