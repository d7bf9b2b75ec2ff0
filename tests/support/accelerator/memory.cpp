#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

namespace sim {
namespace {

constexpr size_t DEVICE_BYTES = size_t{16} << 30;
constexpr size_t ALIGNMENT_BYTES = 512;
constexpr int NOISE = 0xA5;

size_t round_up(size_t nbytes, size_t step) {
  return (nbytes + step - 1) / step * step;
}

char* map_pages(size_t nbytes, int rights) {
  void* pages = mmap(nullptr, nbytes, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(pages != MAP_FAILED, "sim: cannot map ", nbytes, " bytes: ", std::strerror(errno));
  return static_cast<char*>(pages);
}

void count(Bytes& bytes, size_t nbytes) {
  bytes.now += nbytes;
  bytes.taken += nbytes;
  bytes.most = std::max(bytes.most, bytes.now);
}

struct Block {
  int device;
  size_t nbytes;
  int64_t stream;  // which it was allocated for
  std::vector<int64_t> users;  // other streams, which it was recorded on
};

struct Device {
  char* shown = map_pages(DEVICE_BYTES, PROT_NONE);
  char* alias = map_pages(DEVICE_BYTES, PROT_READ | PROT_WRITE);
  size_t used = 0;  // all memory behind it is new
  std::map<int64_t, std::multimap<size_t, void*>> idle;  // by stream and size
  Bytes bytes;
};

struct DeviceMemory final : c10::DeviceAllocator {
  std::mutex mutex;
  Device devices[DEVICES];
  std::unordered_map<void*, Block> blocks;
  std::vector<std::pair<void*, std::vector<Point>>> freed;  // but other streams may still use them

  c10::DataPtr allocate(size_t nbytes) override;

  void free(void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    Block& block = blocks.at(address);
    devices[block.device].bytes.now -= block.nbytes;
    std::vector<Point> points;
    for (int64_t user : block.users) {
      points.push_back(end_of({block.device, user}));
    }
    block.users.clear();
    freed.emplace_back(address, std::move(points));
    collect();
  }

  // Makes memory idle that no other stream uses any more.
  void collect() {
    auto unused = std::partition(freed.begin(), freed.end(), [](const auto& entry) {
      return !std::all_of(entry.second.begin(), entry.second.end(), is_reached);
    });
    for (auto entry = unused; entry != freed.end(); ++entry) {
      const Block& block = blocks.at(entry->first);
      devices[block.device].idle[block.stream].emplace(block.nbytes, entry->first);
    }
    freed.erase(unused, freed.end());
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(data.get());
    if (found != blocks.end() && found->second.stream != stream.id()) {
      found->second.users.push_back(stream.id());
    }
  }

  void copy_data(void* target, const void* source, size_t nbytes) const override {
    Stream stream = current_stream(device_of(target));
    void *to = alias_of(target), *from = alias_of(source);
    queue(stream, [=] { std::memcpy(to, from, nbytes); }, nullptr);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* address) { static_cast<DeviceMemory&>(device_memory()).free(address); };
  }

  bool initialized() override {
    return true;
  }

  // There is nothing to give back: idle memory is never another process's.
  void emptyCache(c10::MempoolId_t) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    Bytes bytes = device_bytes(device);
    auto& all = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    all.current = static_cast<int64_t>(bytes.now);
    all.peak = static_cast<int64_t>(bytes.most);
    all.allocated = static_cast<int64_t>(bytes.taken);
    return stats;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {DEVICE_BYTES - device_bytes(device).now, DEVICE_BYTES};
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {
    reset_bytes();
  }

  void resetPeakStats(c10::DeviceIndex) override {
    reset_bytes();
  }
};

c10::DataPtr DeviceMemory::allocate(size_t nbytes) {
  Stream stream = current_stream();
  c10::Device place = torch_device(stream.device);
  if (nbytes == 0) {
    return {nullptr, place};
  }
  std::lock_guard<std::mutex> lock(mutex);
  collect();
  Device& device = devices[stream.device];
  size_t rounded = round_up(nbytes, ALIGNMENT_BYTES);
  auto& idle = device.idle[stream.number];
  auto found = idle.lower_bound(rounded);
  void* address = nullptr;
  if (found != idle.end() && found->first <= 2 * rounded) {
    rounded = found->first;
    address = found->second;
    idle.erase(found);
  } else {
    TORCH_CHECK_WITH(
        OutOfMemoryError, rounded <= DEVICE_BYTES - device.used, "sim: out of memory: ", nbytes, " bytes");
    address = device.shown + device.used;
    device.used += rounded;
    blocks[address] = {stream.device, rounded, stream.number, {}};
  }
  count(device.bytes, rounded);
  void* alias = alias_of(address);
  queue(stream, [=] { std::memset(alias, NOISE, rounded); }, nullptr);
  return {address, address, raw_deleter(), place};
}

DeviceMemory& memory() {
  static DeviceMemory* memory = new DeviceMemory();  // never destroyed: tensors outlive what is static
  return *memory;
}

struct PinnedPages {
  std::mutex mutex;
  std::map<const char*, size_t> areas;
  Bytes bytes;
};

PinnedPages& pinned_pages() {
  static PinnedPages* pages = new PinnedPages();
  return *pages;
}

struct PinnedMemoryCache final : at::CachingHostAllocatorImpl<c10::Stream, Point> {
 private:
  void allocate_host_memory(size_t nbytes, void** address) override {
    *address = map_pages(nbytes, PROT_READ | PROT_WRITE);
    PinnedPages& pages = pinned_pages();
    std::lock_guard<std::mutex> lock(pages.mutex);
    pages.areas[static_cast<char*>(*address)] = nbytes;
    count(pages.bytes, nbytes);
  }

  void free_block(at::HostBlock<c10::Stream>* block) override {
    PinnedPages& pages = pinned_pages();
    std::lock_guard<std::mutex> lock(pages.mutex);
    pages.areas.erase(static_cast<char*>(block->ptr_));
    pages.bytes.now -= block->size_;
    munmap(block->ptr_, block->size_);
  }

  void record_stream(std::optional<std::vector<Point>>& points, c10::Stream stream) override {
    points->push_back(end_of({stream.device_index(), stream.id()}));
  }

  bool query_event(Point& point) override {
    return is_reached(point);
  }
};

void free_pinned(void* block);

struct PinnedMemory final : at::CachingHostAllocatorInterface<PinnedMemoryCache, free_pinned> {};

void free_pinned(void* block) {
  static_cast<PinnedMemory&>(pinned_memory()).free(block);
}

}  // namespace

c10::Device torch_device(int device) {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)};
}

c10::Stream torch_stream(Stream stream) {
  return c10::Stream(c10::Stream::UNSAFE, torch_device(stream.device), stream.number);
}

int device_of(const void* address) {
  for (int device = 0; device < DEVICES; ++device) {
    const char* first = memory().devices[device].shown;
    if (first <= address && address < first + DEVICE_BYTES) {
      return device;
    }
  }
  return -1;
}

void* alias_of(const void* address) {
  int number = device_of(address);
  TORCH_CHECK(number >= 0, "sim: ", address, " is no address of device memory");
  const Device& device = memory().devices[number];
  return device.alias + (static_cast<const char*>(address) - device.shown);
}

c10::DeviceAllocator& device_memory() {
  return memory();
}

bool is_pinned(const void* address) {
  PinnedPages& pages = pinned_pages();
  std::lock_guard<std::mutex> lock(pages.mutex);
  auto next = pages.areas.upper_bound(static_cast<const char*>(address));
  return next != pages.areas.begin() && address < std::prev(next)->first + std::prev(next)->second;
}

at::HostAllocator& pinned_memory() {
  static PinnedMemory* memory = new PinnedMemory();
  return *memory;
}

Bytes pinned_bytes() {
  std::lock_guard<std::mutex> lock(pinned_pages().mutex);
  return pinned_pages().bytes;
}

Bytes device_bytes(int device) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().devices[device].bytes;
}

void reset_bytes() {
  {
    std::lock_guard<std::mutex> lock(pinned_pages().mutex);
    pinned_pages().bytes = {pinned_pages().bytes.now, pinned_pages().bytes.now, 0};
  }
  std::lock_guard<std::mutex> lock(memory().mutex);
  for (Device& device : memory().devices) {
    device.bytes = {device.bytes.now, device.bytes.now, 0};
  }
}

}  // namespace sim
