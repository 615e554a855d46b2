// The threads of a pass: those of the OpenMP runtime that torch has loaded, since two sets of threads would wait for each other. They
// are called by address, so that nothing is linked, any compiler will do, and without a runtime there is one thread.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <thread>

static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Where they wait for each other.
class Barrier {
 public:
  explicit Barrier(int size) : size_(size) {}
  void wait() {
    if (size_ == 1) return;
    uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins)
        if (spins < 1 << 10) relax(); else std::this_thread::yield();
    }
  }

 private:
  int size_;
  std::atomic<uint32_t> phase_{0};
  std::atomic<int> arrived_{0};
};

static struct {
  void (*parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);  // GOMP_parallel
  int (*number)(), (*size)();                                                 // omp_get_thread_num, omp_get_num_threads
} team;

extern "C" void native_team(decltype(team.parallel) parallel, decltype(team.number) number, decltype(team.size) size) {
  team = {parallel, number, size};
}

// work(t, size, barrier) by so many threads, or fewer where the runtime gives fewer.
template <class Work>
static void together(int threads, const Work& work) {
  if (threads == 1 || !team.parallel) {
    Barrier alone(1);
    return work(0, 1, alone);
  }
  struct Task {
    const Work& work;
    std::atomic<bool> is_taken{false};
    std::atomic<Barrier*> barrier{nullptr};
    alignas(64) char room[sizeof(Barrier)];
  } task{work, {false}, {nullptr}, {}};
  auto body = [](void* given) {
    Task& task = *static_cast<Task*>(given);
    if (!task.is_taken.exchange(true)) task.barrier.store(new (task.room) Barrier(team.size()), std::memory_order_release);
    Barrier* barrier;
    while (!(barrier = task.barrier.load(std::memory_order_acquire))) relax();
    task.work(team.number(), team.size(), *barrier);
  };
  team.parallel(body, &task, unsigned(threads), 0);
}

// work(i) for each i below num, by so many threads at most.
template <class Work>
static void for_each(int threads, int num, const Work& work) {
  if (num == 1) work(0);
  else if (num > 1)
    together(std::min(threads, num), [&](int t, int threads, Barrier&) {
      for (int i = t; i < num; i += threads) work(i);
    });
}

// The thread's share of so many panels.
struct Share {
  int begin, end;
  Share(int num, int thread, int threads)
      : begin(int(int64_t(num) * thread / threads)), end(int(int64_t(num) * (thread + 1) / threads)) {}
};
