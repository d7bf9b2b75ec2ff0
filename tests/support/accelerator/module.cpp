// What torch asks a backend for: the current device and stream of each thread, events, and where memory comes from.
// And what tests ask for.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "memory.h"
#include "operators.h"

namespace sim {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

thread_local DeviceIndex current_device = 0;
thread_local int64_t current_streams[DEVICES] = {};

DeviceIndex checked(int64_t device) {
  TORCH_CHECK(0 <= device && device < DEVICES, "sim: there is no device ", device, ", only 0 to ", DEVICES - 1);
  return static_cast<DeviceIndex>(device);
}

DeviceIndex exchange_device(DeviceIndex device) {
  return std::exchange(current_device, checked(device));
}

DeviceIndex index_of(Device device) {
  return device.has_index() ? checked(device.index()) : current_device;
}

Stream stream_of(c10::Stream stream) {
  return {checked(stream.device_index()), stream.id()};
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return DeviceType::PrivateUse1;
  }

  Device exchangeDevice(Device device) const override {
    return torch_device(exchange_device(device.index()));
  }

  Device getDevice() const override {
    return torch_device(current_device);
  }

  void setDevice(Device device) const override {
    current_device = checked(device.index());
  }

  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index();
  }

  DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }

  c10::Stream getStream(Device device) const override {
    return torch_stream(current_stream(index_of(device)));
  }

  c10::Stream getNewStream(Device device, int) const override {
    return torch_stream({index_of(device), new_stream(index_of(device))});
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    Stream wanted = stream_of(stream);
    return torch_stream({wanted.device, std::exchange(current_streams[wanted.device], wanted.number)});
  }

  bool queryStream(const c10::Stream& stream) const override {
    return ask(end_of(stream_of(stream)));
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    wait(end_of(stream_of(stream)), "stream");
  }

  void synchronizeDevice(DeviceIndex device) const override {
    wait_for_device(checked(device));
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory().recordStream(data, stream);
  }

  // An event is the point at which it was recorded.
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    destroyEvent(*event, stream.device_index());
    *event = new Point(end_of(stream_of(stream)));
  }

  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Point*>(event);
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_on_stream(stream_of(stream), *static_cast<Point*>(event));
    }
  }

  bool queryEvent(void* event) const override {
    return event == nullptr || ask(*static_cast<Point*>(event));
  }

  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      wait(*static_cast<Point*>(event), "event");
    }
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return true;
  }

  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }

  DeviceIndex deviceCount() const override {
    return DEVICES;
  }

  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }

  void setCurrentDevice(DeviceIndex device) const override {
    current_device = checked(device);
  }

  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return exchange_device(device);
  }

  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchange_device(device);
  }

  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }

  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

void register_backend() {
  c10::SetAllocator(DeviceType::PrivateUse1, &device_memory());
  at::setHostAllocator(DeviceType::PrivateUse1, &pinned_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

Stream current_stream(int device) {
  return {device, current_streams[device]};
}

Stream current_stream() {
  return current_stream(current_device);
}

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  sim::register_backend();
  module.attr("DEVICES") = sim::DEVICES;
  module.def("current_device", [] { return sim::current_stream().device; });
  module.def("set_device", [](int device) { sim::exchange_device(static_cast<c10::DeviceIndex>(device)); });
  module.def("mark", sim::mark);
  module.def("reset", [] { sim::reset_log(); sim::reset_bytes(); });
  module.def("pinned_bytes", [] {
    sim::Bytes bytes = sim::pinned_bytes();
    return std::tuple(bytes.now, bytes.most, bytes.taken);
  });
  module.def("device_bytes", [](int device) {
    sim::Bytes bytes = sim::device_bytes(device);
    return std::tuple(bytes.now, bytes.most, bytes.taken);
  });
  module.def("operations", [] {
    std::vector<py::tuple> rows;
    for (const sim::Operation& one : sim::log().operations) {
      rows.push_back(py::make_tuple(
          one.name, one.nbytes, one.queued, one.ran, one.stream.device, one.stream.number, one.pinned, one.waited,
          one.thread));
    }
    return rows;
  });
  module.def("waits", [] {
    std::vector<py::tuple> rows;
    for (const sim::Wait& one : sim::log().waits) {
      rows.push_back(py::make_tuple(one.what, one.began, one.ended, one.stream.device, one.stream.number, one.thread));
    }
    return rows;
  });
  module.def("marks", [] {
    std::vector<py::tuple> rows;
    for (const sim::Mark& one : sim::log().marks) {
      rows.push_back(py::make_tuple(one.text, one.tick, one.thread));
    }
    return rows;
  });
}
