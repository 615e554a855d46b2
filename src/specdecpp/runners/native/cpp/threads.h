// The threads of a pass: those of torch, by the OpenMP that it has loaded, since two sets would wait for each other.

#pragma once

#include <atomic>
#include <cstdint>
#include <new>
#include <thread>
#if defined(_OPENMP)
#include <omp.h>
#endif

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

// work(thread, how many there are, their barrier) in each of at most `threads` of them.
template <class Work>
static void together(int threads, Work work) {
#if defined(_OPENMP)
  if (threads > 1) {
    Barrier barrier(threads);
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
      if (omp_get_num_threads() != threads) barrier.~Barrier(), new (&barrier) Barrier(omp_get_num_threads());
      work(omp_get_thread_num(), omp_get_num_threads(), barrier);
    }
    return;
  }
#endif
  Barrier alone(1);
  work(0, 1, alone);
}
