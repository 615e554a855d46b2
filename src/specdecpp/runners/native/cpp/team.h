// The threads of a pass: those of the OpenMP runtime that torch has loaded, since two sets of threads would wait for each other. They
// are called by address, so that nothing is linked, any compiler will do, and without a runtime there is one thread. Needs Barrier and relax.
#pragma once
#include <atomic>
#include <cstdint>
#include <new>

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
  } task{work};
  auto body = [](void* given) {
    Task& task = *static_cast<Task*>(given);
    if (!task.is_taken.exchange(true)) task.barrier.store(new (task.room) Barrier(team.size()), std::memory_order_release);
    Barrier* barrier;
    while (!(barrier = task.barrier.load(std::memory_order_acquire))) relax();
    task.work(team.number(), team.size(), *barrier);
  };
  team.parallel(body, &task, unsigned(threads), 0);
}
