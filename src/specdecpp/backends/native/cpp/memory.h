// Memory for weights and caches.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "vectors.h"

constexpr size_t LARGE = 1 << 21;

// Zeros, or null; `release` gives them back. What is large lies in large pages where the system has them: small ones end every stretch
// of reading ahead after 4 kB, and the processor knows the places of a few thousand of them only. Large pieces are new pages, which
// take no memory yet and are made by the threads that first write to them.
static uint8_t* zeros(size_t bytes) {
  size_t page = bytes < LARGE / 2 ? 64 : LARGE;
  void* whole = std::calloc(up(bytes, page) + page + sizeof whole, 1);
  if (!whole) return nullptr;
  auto start = reinterpret_cast<uint8_t*>(up(reinterpret_cast<size_t>(whole) + sizeof whole, page));
  std::memcpy(start - sizeof whole, &whole, sizeof whole);
#if defined(MADV_HUGEPAGE)
  if (page == LARGE) madvise(start, up(bytes, page), MADV_HUGEPAGE);
#endif
  return start;
}
static void release(void* start) {
  void* whole = nullptr;
  if (start) std::memcpy(&whole, static_cast<uint8_t*>(start) - sizeof whole, sizeof whole);
  std::free(whole);
}

// Many pieces of memory, side by side in few large ones, that go together.
class Arena {
 public:
  ~Arena() {
    for (Block& block : blocks_) release(block.start);
  }
  // Zeros, or null.
  uint8_t* take(size_t bytes) {
    bytes = up(bytes, 64);
    if (bytes > left_) {
      size_t size = up(std::max(bytes, 4 * LARGE), LARGE);
      uint8_t* start = zeros(size);
      if (!start) return nullptr;
      next_ = start, left_ = size;
      blocks_.push_back({start, start + size});
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
    for (auto block = blocks_.begin(); block != left; ++block) release(block->start);
    blocks_.erase(blocks_.begin(), left);
  }

 private:
  struct Block {
    uint8_t *start, *end;
  };
  std::vector<Block> blocks_;
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
};
