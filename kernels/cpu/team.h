// The threads of a forward pass: all run the same function and meet at barriers.
//
// A barrier costs well below a microsecond while all threads run: they look again and again, and give way to others
// after a while. Between passes they sleep. Who computes what is decided by a shared counter; it has no influence on
// what is computed.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace kvferry {

class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int number = 1; number < size; ++number) threads_.emplace_back([this] { serve(); });
  }

  ~Team() {
    ends_ = true;
    announce();
    for (std::thread& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Runs `work` in all threads, the caller's among them, and returns when all have ended.
  void run(const std::function<void()>& work) {
    work_ = &work;
    next_ = 0;
    announce();
    work();
    barrier();
  }

  // Calls `work(i)` once for each i below `count`, by whoever is free; ends with a barrier. Of all threads together.
  template <typename Work>
  void share(int64_t count, const Work& work) {
    for (int64_t i = next_.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next_.fetch_add(1, std::memory_order_relaxed))
      work(i);
    barrier();
  }

 private:
  static constexpr int LOOKS = 4000;  // about 50 µs

  void serve() {
    uint32_t seen = 0;
    while (true) {
      for (int look = 0; look < LOOKS && generation_.load(std::memory_order_acquire) == seen; ++look) pause();
      generation_.wait(seen, std::memory_order_acquire);
      seen = generation_.load(std::memory_order_acquire);
      if (ends_) return;
      (*work_)();
      barrier();
    }
  }

  void announce() {
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }

  // The last to come opens it, and sets the counter back.
  void barrier() {
    if (size_ == 1) {
      next_ = 0;
      return;
    }
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      num_arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int look = 0; phase_.load(std::memory_order_acquire) == phase; ++look)
      if (look < LOOKS) pause();
      else std::this_thread::yield();
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void()>* work_ = nullptr;
  std::atomic<bool> ends_{false};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

}  // namespace kvferry
