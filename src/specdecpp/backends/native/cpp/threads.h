// The threads of a pass: those of the OpenMP runtime that torch has loaded, since two sets of threads would wait for each other. They
// are called by address, so that nothing is linked, any compiler will do, and without a runtime there is one thread.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Where threads wait for each other; each has its own, over what they share.
struct Meeting {
  alignas(64) std::atomic<uint32_t> phase{0};
  std::atomic<int> arrived{0};
};
struct Barrier {
  Meeting& at;
  int size;
  void wait() {
    if (size == 1) return;
    uint32_t phase = at.phase.load(std::memory_order_relaxed);
    if (at.arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      at.arrived.store(0, std::memory_order_relaxed);
      at.phase.store(phase + 1, std::memory_order_release);
    } else {
      for (int spins = 0; at.phase.load(std::memory_order_acquire) == phase; ++spins)
        if (spins < 1 << 10) relax(); else std::this_thread::yield();
    }
  }
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
  Meeting meeting;
  auto as = [&](int number, int size) {
    Barrier barrier{meeting, size};
    work(number, size, barrier);
  };
  if (threads == 1 || !team.parallel) return as(0, 1);
  auto body = [](void* given) { (*static_cast<decltype(as)*>(given))(team.number(), team.size()); };
  team.parallel(body, &as, unsigned(threads), 0);
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
