// The memory of the simulated devices, and pinned memory of the host.
//
// Device memory has two addresses. The one that torch shows lies in pages without any rights: a host that reads or
// writes there dies. The other one, the alias, is known to the operators of the device alone.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "streams.h"

namespace sim {

// The device whose memory lies at this address; -1 if none does.
int device_of(const void* address);

// Where the operators of the device reach the memory that torch shows at `address`.
void* alias_of(const void* address);

// Its fresh memory holds noise, by an operation on the current stream: it belongs to that stream alone. Memory that was
// freed goes to the next tensor of that stream at once, as CUDA's does.
c10::DeviceAllocator& device_memory();

bool is_pinned(const void* address);

// torch's own caching allocator.
at::HostAllocator& pinned_memory();

struct Bytes {
  size_t now = 0;
  size_t most = 0;
  size_t taken = 0;  // in all
};

// Of pinned memory, with what torch keeps for later.
Bytes pinned_bytes();

// Of one device's tensors.
Bytes device_bytes(int device);

// Sets `most` to the present value and `taken` to 0.
void reset_bytes();

c10::Device torch_device(int device);
c10::Stream torch_stream(Stream stream);

// The stream that the calling thread uses on that device, or on its current one.
Stream current_stream(int device);
Stream current_stream();

}  // namespace sim
