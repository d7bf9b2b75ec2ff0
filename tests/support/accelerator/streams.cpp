#include "streams.h"

#include <unistd.h>

#include <deque>
#include <mutex>
#include <optional>
#include <utility>

namespace sim {
namespace {

struct Step {
  std::function<void()> run;
  std::shared_ptr<Operation> record;
  std::optional<Point> after;
};

struct Queue {
  std::deque<Step> steps;
  int64_t reached = 0;  // the number of steps that have run
};

// Never destroyed: tensors outlive what is static.
struct State {
  std::mutex mutex;
  std::vector<Queue> queues[DEVICES];
  std::vector<std::shared_ptr<Operation>> operations;
  std::vector<Wait> waits;
  std::vector<Mark> marks;
  int64_t clock = 0;

  State() {
    for (auto& queues_of_device : queues) {
      queues_of_device.emplace_back();
    }
  }

  Queue& queue(Stream stream) {
    return queues[stream.device].at(stream.number);
  }

  Point end_of(Stream stream) {
    Queue& queue = this->queue(stream);
    return {stream, queue.reached + static_cast<int64_t>(queue.steps.size())};
  }

  // `done` keeps the steps until the mutex is free again: what they hold may need it when it is destroyed.
  void run_until(Point point, std::vector<Step>& done) {
    while (queue(point.stream).reached < point.count) {
      Step step = std::move(queue(point.stream).steps.front());
      queue(point.stream).steps.pop_front();
      queue(point.stream).reached += 1;
      if (step.after) {
        run_until(*step.after, done);
      }
      if (step.record) {
        step.record->ran = ++clock;
      }
      done.push_back(std::move(step));
      if (done.back().run) {
        done.back().run();
      }
    }
  }

  void run_logged(const std::vector<Point>& points, Stream stream, const char* what, std::vector<Step>& done) {
    int64_t began = what == nullptr ? 0 : ++clock;
    for (const Point& point : points) {
      run_until(point, done);
    }
    if (what != nullptr) {
      waits.push_back({what, stream, gettid(), began, ++clock});
    }
  }
};

State& state() {
  static State* state = new State();
  return *state;
}

}  // namespace

int64_t new_stream(int device) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().queues[device].emplace_back();
  return static_cast<int64_t>(state().queues[device].size()) - 1;
}

Point queue(Stream stream, std::function<void()> run, std::unique_ptr<Operation> record) {
  std::lock_guard<std::mutex> lock(state().mutex);
  std::shared_ptr<Operation> shared = std::move(record);
  if (shared) {
    shared->stream = stream;
    shared->thread = gettid();
    shared->queued = ++state().clock;
    state().operations.push_back(shared);
  }
  state().queue(stream).steps.push_back({std::move(run), std::move(shared), std::nullopt});
  return state().end_of(stream);
}

Point end_of(Stream stream) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().end_of(stream);
}

void wait_on_stream(Stream stream, Point point) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().queue(stream).steps.push_back({nullptr, nullptr, point});
}

bool is_reached(Point point) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().queue(point.stream).reached >= point.count;
}

bool ask(Point point) {
  std::vector<Step> done;
  std::lock_guard<std::mutex> lock(state().mutex);
  int64_t reached = state().queue(point.stream).reached;
  if (reached >= point.count) {
    return true;
  }
  state().run_until({point.stream, reached + 1}, done);
  return false;
}

void wait(Point point, const char* what) {
  std::vector<Step> done;
  std::lock_guard<std::mutex> lock(state().mutex);
  state().run_logged({point}, point.stream, what, done);
}

void wait_for_device(int device) {
  std::vector<Step> done;
  std::lock_guard<std::mutex> lock(state().mutex);
  std::vector<Point> points;
  for (size_t number = 0; number < state().queues[device].size(); ++number) {
    points.push_back(state().end_of({device, static_cast<int64_t>(number)}));
  }
  state().run_logged(points, {device, -1}, "device", done);
}

int64_t mark(const std::string& text) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().marks.push_back({text, gettid(), ++state().clock});
  return state().clock;
}

Log log() {
  std::lock_guard<std::mutex> lock(state().mutex);
  Log log{{}, state().waits, state().marks};
  for (const auto& operation : state().operations) {
    log.operations.push_back(*operation);
  }
  return log;
}

void reset_log() {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().operations.clear();
  state().waits.clear();
  state().marks.clear();
}

}  // namespace sim
