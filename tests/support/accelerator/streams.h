// The streams of the simulated devices, and the log of what happens on them.
//
// A stream is a queue of operations. Nothing of it runs until somebody waits for it: so whatever is queued is as late
// as it can be, in every run of a test alike. The thread that waits runs the operations itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sim {

constexpr int DEVICES = 2;

// A stream of a device. Each device has a stream 0 from the beginning.
struct Stream {
  int device;
  int64_t number;
};

// The point behind the first `count` operations that were ever queued on a stream.
struct Point {
  Stream stream;
  int64_t count;
};

// What was queued on a stream. `queued` and `ran` are ticks of the logical clock; `ran` is 0 as long as it waits.
struct Operation {
  std::string name;
  Stream stream;
  size_t nbytes;
  bool pinned;  // the host memory that it reads or writes is pinned
  bool waited;  // the host waited for it before it went on
  int64_t thread;  // of the system, which queued it
  int64_t queued;
  int64_t ran;
};

// A thread of the host waited from tick `began` to tick `ended`. `what` is "stream", "event", "device", or the name of
// the operation that the thread had to wait for.
struct Wait {
  std::string what;
  Stream stream;  // its number is -1 for all streams of the device
  int64_t thread;
  int64_t began;
  int64_t ended;
};

// Something that a test wants to see in the order of events.
struct Mark {
  std::string text;
  int64_t thread;
  int64_t tick;
};

struct Log {
  std::vector<Operation> operations;
  std::vector<Wait> waits;
  std::vector<Mark> marks;
};

int64_t new_stream(int device);

// Queues an operation; returns the point behind it. Without a `record` it is not logged.
Point queue(Stream stream, std::function<void()> run, std::unique_ptr<Operation> record);

// The point behind all that is queued now.
Point end_of(Stream stream);

// What is queued on `stream` after this call runs after `point` has been reached.
void wait_on_stream(Stream stream, Point point);

bool is_reached(Point point);

// Whether the point is reached. If it is not, the stream gets one operation further: so who asks again and again does
// not ask for ever.
bool ask(Point point);

// Runs what stands before the point, on other streams too if it waits for them. Without a name it is not logged.
void wait(Point point, const char* what);

void wait_for_device(int device);

int64_t mark(const std::string& text);

Log log();

// Forgets what was logged. The clock goes on.
void reset_log();

}  // namespace sim
