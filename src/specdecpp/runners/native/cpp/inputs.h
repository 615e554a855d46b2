// What products read, and where their sums go.

#pragma once

#include <vector>

#include "matrix.h"

// How far apart rows of so many values lie that products read: never a power of two, where rows would share a few places of the cache.
static inline size_t apart(int width) { return (up(width, LANES) / LANES | 1) * LANES; }

// What products read: x [n, in], rows `apart(in)` apart, its sums over the groups of a matrix [n, groups], and for products of whole
// numbers x rounded to `codes` [n, in] of so many bytes times `scales` [n, groups], whose sums over groups are `totals` and, scaled,
// `sums`. Codes of two bytes lie as the products take them: of eight inputs 0 2, 1 3, 4 6, 5 7.
struct Inputs {
  const float *x, *sums;
  const int8_t* codes;
  int width;
  const float* scales;
  const int32_t* totals;

  Inputs from(const Matrix& m, int row) const {
    size_t groups = size_t(row) * m.num_groups();
    return {x + row * apart(m.in), sums + groups, codes + size_t(row) * m.in * width, width, scales + groups, totals + groups};
  }
};

// x times a factor to the nearest whole number, of LANES inputs from the first of eight on.
static inline Ints rounded(Vec x, float factor) {
  Vec shifted = x * factor + 12582912.0f;  // the sum's last bits are the nearest integer
  return bits_as<Ints>(shifted) - Ints(bits_as<Words>(all(12582912.0f)));
}
static inline void put_codes(int8_t* to, int width, Ints whole) {
  if (width == 1) {
    typedef int8_t Narrow __attribute__((vector_size(LANES)));
    Narrow narrow = __builtin_convertvector(whole, Narrow);
    std::memcpy(to, &narrow, sizeof narrow);
    return;
  }
  typedef int16_t Narrow __attribute__((vector_size(LANES * 2)));
#if defined(__AVX512F__)
  const Ints order = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
  Narrow narrow = __builtin_convertvector(Ints(_mm512_permutexvar_epi32(bits_as<__m512i>(order), bits_as<__m512i>(whole))), Narrow);
#elif defined(__AVX2__)
  const Ints order = {0, 2, 1, 3, 4, 6, 5, 7};
  Narrow narrow = __builtin_convertvector(Ints(_mm256_permutevar8x32_epi32(bits_as<__m256i>(whole), bits_as<__m256i>(order))), Narrow);
#else
  Narrow narrow;
  for (int i = 0; i < LANES; ++i) narrow[i] = int16_t(whole[i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i]);
#endif
  std::memcpy(to, &narrow, sizeof narrow);
}

// A thread's own room for them.
struct Room {
  std::vector<float> sums, scales;
  std::vector<int8_t> codes;
  std::vector<int32_t> totals;

  // Of n rows of x, for a matrix of codes and all of the same width and group; rounded to so many bytes, or not where it is 0.
  Inputs inputs(const Matrix& m, const float* x, int n, int width) {
    size_t groups = m.num_groups(), size = n * groups;
    if (sums.size() < size) sums.resize(size), scales.resize(size), totals.resize(size);
    if (codes.size() < size_t(n) * m.in * width) codes.resize(size_t(n) * m.in * width);
    float steps = width == 2 ? 32767 : 127;
    for (int r = 0; r < n; ++r)
      for (size_t g = 0; g < groups; ++g) {
        const float* of = x + r * apart(m.in) + g * m.group;
        size_t place = r * groups + g;
        Vec sum{};
        if (!width) {
          for (int i = 0; i < m.group; i += LANES) sum += at(of + i);
          sums[place] = total(sum);
          continue;
        }
        int8_t* to = codes.data() + (r * m.in + g * m.group) * width;
        Vec most{};
        for (int i = 0; i < m.group; i += LANES) {
          Vec size = floats(bits_as<Words>(at(of + i)) & 0x7fffffffu);
          most = size > most ? size : most;
        }
        float top = largest(most);
        float scale = top / steps, factor = top > 0 ? steps / top : 0;
        Ints wholes{};
        for (int i = 0; i < m.group; i += LANES) {
          Ints whole = rounded(at(of + i), factor);
          put_codes(to + i * width, width, whole), wholes += whole;
        }
        int32_t whole = total(wholes);
        scales[place] = scale, totals[place] = whole, sums[place] = scale * float(whole);
      }
    return {x, sums.data(), width ? codes.data() : nullptr, width, scales.data(), totals.data()};
  }
};

// Where sums go: y [n, out], whose rows lie `stride` apart; over what is there, added to it, or times what the gate of a feed-forward
// layer becomes, whose sums lie as y does.
struct Store {
  float* y;
  size_t stride;
  int out;
  bool adds = false;
  const float* gate = nullptr;
  size_t gate_stride = 0;
  bool is_gelu = false;

  void operator()(int panel, int row, Vec a, Vec b) const {
    float* to = y + row * stride + panel * PANEL;
    int room = out - panel * PANEL;
    if (gate) {
      const float* of = gate + row * gate_stride + panel * PANEL;
      a *= is_gelu ? gelu(at(of)) : silu(at(of)), b *= is_gelu ? gelu(at(of + LANES)) : silu(at(of + LANES));
    }
    if (room >= PANEL) {
      if (adds) a += at(to), b += at(to + LANES);
      at(to) = a, at(to + LANES) = b;
      return;
    }
    alignas(64) float sums[PANEL];
    at(sums) = a, at(sums + LANES) = b;
    for (int i = 0; i < room; ++i) to[i] = sums[i] + (adds ? to[i] : 0.0f);
  }
};
