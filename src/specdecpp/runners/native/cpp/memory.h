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

// Many pieces of memory, side by side in few large ones, that go together.
class Arena {
 public:
  ~Arena() {
    for (Block& block : blocks_) std::free(block.start);
  }
  // Zeros, or null.
  uint8_t* take(size_t bytes) {
    bytes = up(bytes, 64);
    if (bytes > left_) {
      size_t size = bytes < BLOCK ? BLOCK : bytes;
      void* block = room(size);
      if (!block) return nullptr;
      next_ = static_cast<uint8_t*>(block), left_ = size;
      blocks_.push_back({next_, next_ + size});
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
    for (auto block = blocks_.begin(); block != left; ++block) std::free(block->start);
    blocks_.erase(blocks_.begin(), left);
  }

 private:
  static constexpr size_t BLOCK = 1 << 23;
  struct Block {
    uint8_t *start, *end;
  };
  std::vector<Block> blocks_;
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
};
