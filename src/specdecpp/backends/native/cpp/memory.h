// Memory for weights and caches.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "vectors.h"

// Zeros, or null. What is large lies in large pages where the system has them: small ones end every stretch of reading ahead
// after 4 kB, and the processor knows the places of a few thousand of them only.
static void* room(size_t bytes) {
  constexpr size_t LARGE = 1 << 21;
  size_t page = bytes < LARGE / 2 ? 64 : LARGE;
  bytes = up(bytes ? bytes : 1, page);
  void* p = std::aligned_alloc(page, bytes);
#if defined(MADV_HUGEPAGE)
  if (p && page == LARGE) madvise(p, bytes, MADV_HUGEPAGE);
#endif
  if (p) std::memset(p, 0, bytes);
  return p;
}

// Many pieces of memory, side by side in few large ones, that go together. What nobody has written to takes no memory yet.
class Arena {
 public:
  ~Arena() {
    for (Block& block : blocks_) release(block);
  }
  // Zeros, or null.
  uint8_t* take(size_t bytes) {
    bytes = up(bytes, 64);
    if (bytes > left_) {
      Block block = reserve(bytes < BLOCK ? BLOCK : bytes);
      if (!block.start) return nullptr;
      next_ = block.start, left_ = block.end - block.start;
      blocks_.push_back(block);
    }
    uint8_t* found = next_;
    next_ += bytes, left_ -= bytes;
    return found;
  }
  // Gives back the blocks in which nothing lies that was taken with `piece` or after it.
  void drop_before(const uint8_t* piece) {
    auto left = blocks_.begin();
    while (left != blocks_.end() && (piece < left->start || piece >= left->end)) ++left;
    if (left == blocks_.end()) return;  // not a piece of this arena
    for (auto block = blocks_.begin(); block != left; ++block) release(*block);
    blocks_.erase(blocks_.begin(), left);
  }

 private:
  static constexpr size_t BLOCK = 1 << 23, LARGE = 1 << 21;
  struct Block {
    uint8_t *start, *end;
    void* whole;  // what was asked of the system
    size_t size;
  };
#if defined(__linux__)
  // Pages straight from the system are zeros, and are made by the threads that first write to them.
  static Block reserve(size_t bytes) {
    bytes = up(bytes, LARGE);
    void* whole = mmap(nullptr, bytes + LARGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED) return {};
    auto start = reinterpret_cast<uint8_t*>(up(reinterpret_cast<size_t>(whole), LARGE));
#if defined(MADV_HUGEPAGE)
    madvise(start, bytes, MADV_HUGEPAGE);
#endif
    return {start, start + bytes, whole, bytes + LARGE};
  }
  static void release(Block& block) { munmap(block.whole, block.size); }
#else
  static Block reserve(size_t bytes) {
    auto start = static_cast<uint8_t*>(room(bytes));
    return {start, start + bytes * !!start, start, bytes};
  }
  static void release(Block& block) { std::free(block.whole); }
#endif
  std::vector<Block> blocks_;
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
};
