// What products read, and where their sums go.

#pragma once

#include <vector>

#include "matrix.h"

// How far apart rows of so many values lie that products read: never a power of two, where rows would share a few places of the cache.
static inline size_t apart(int width) { return (up(width, LANES) / LANES | 1) * LANES; }

// How x is rounded for products of whole numbers: not at all, or to codes that lie as
//   BYTES   [groups, n, group]                bytes
//   PLANES  [groups, n, 2, group]             the higher bytes of 16 bits and then the lower: code = 256 higher + lower, each signed
//   WORDS   [groups, n, group] of 16 bits     of four inputs 0 2, 1 3
// Products with bytes take half the instructions, but those with both planes have twice as many sums: PLANES are for few rows.
enum class Codes { NONE, BYTES, PLANES, WORDS };
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int FEW = 3;
#else
constexpr int FEW = 0;
#endif
constexpr int MANY = LANES == 16 ? 10 : 6;  // rows whose sums fit into registers beside codes and what is read of x
constexpr float BYTE_STEPS = 127, WORD_STEPS = 32639;  // the largest code: 127 * 256 + 127

// What products read: n rows x [n, in], `apart(in)` apart, their sums over the groups of a matrix [groups, n], and for products of whole
// numbers x rounded to codes times `scales` [groups, n], whose sums are those of the rounded x. `starts` are the sums of codes times what
// the matrix takes off its own, negative: what the products with these begin with.
struct Inputs {
  const float *x, *sums;
  const int8_t* codes;
  Codes form;
  int n;
  const float* scales;
  const int32_t* starts;
};

#if HAS_DOTS
// x times a factor to the nearest whole number.
static inline Ints rounded(Vec x, float factor) {
  Vec shifted = x * factor + 12582912.0f;  // the sum's last bits are the nearest integer
  return bits_as<Ints>(shifted) - Ints(bits_as<Words>(all(12582912.0f)));
}
static inline void put_bytes(int8_t* to, Ints whole) {
  typedef int8_t Narrow __attribute__((vector_size(LANES)));
  Narrow narrow = __builtin_convertvector(whole, Narrow);
  std::memcpy(to, &narrow, sizeof narrow);
}
static inline void put_words(int8_t* to, Ints whole) {
  typedef int16_t Narrow __attribute__((vector_size(LANES * 2)));
#if defined(__AVX512BW__)
  const Ints order = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
  Narrow narrow = __builtin_convertvector(Ints(_mm512_permutexvar_epi32(bits_as<__m512i>(order), bits_as<__m512i>(whole))), Narrow);
#else
  const Ints order = {0, 2, 1, 3, 4, 6, 5, 7};
  Narrow narrow = __builtin_convertvector(Ints(_mm256_permutevar8x32_epi32(bits_as<__m256i>(whole), bits_as<__m256i>(order))), Narrow);
#endif
  std::memcpy(to, &narrow, sizeof narrow);
}
#endif

// A thread's own room for them.
struct Room {
  std::vector<float> sums, scales;
  std::vector<int8_t> codes;
  std::vector<int32_t> starts;

  // Of n rows of x, for a matrix and all that read alike; for codes rounded to so many bytes, or not where it is 0.
  Inputs inputs(const Matrix& m, const float* x, int n, int width) {
    if (!m.is_coded()) return {x, nullptr, nullptr, Codes::NONE, n, nullptr, nullptr};
    size_t groups = m.num_groups(), size = n * groups;
    Codes form = width == 0 ? Codes::NONE : width == 1 ? Codes::BYTES : n <= FEW ? Codes::PLANES : Codes::WORDS;
    if (sums.size() < size) sums.resize(size), scales.resize(size), starts.resize(size);
    if (codes.size() < size_t(n) * m.in * width) codes.resize(size_t(n) * m.in * width);
    for (int r = 0; r < n; ++r)
      for (size_t g = 0; g < groups; ++g) round(m, x + r * apart(m.in) + g * m.group, form, g * n + r);
    return {x, sums.data(), codes.data(), form, n, scales.data(), starts.data()};
  }

 private:
  void round(const Matrix& m, const float* x, Codes form, size_t place) {
    int group = m.group;
    if (form == Codes::NONE) {
      Vec sum{};
      for (int i = 0; i < group; i += LANES) sum += at(x + i);
      sums[place] = total(sum);
      return;
    }
#if HAS_DOTS
    Vec most{};
    for (int i = 0; i < group; i += LANES) {
      Vec size = floats(bits_as<Words>(at(x + i)) & 0x7fffffffu);
      most = size > most ? size : most;
    }
    float steps = form == Codes::BYTES ? BYTE_STEPS : WORD_STEPS, top = largest(most), scale = top / steps, factor = top > 0 ? steps / top : 0;
    int8_t* to = codes.data() + place * group * (form == Codes::BYTES ? 1 : 2);
    Ints wholes{};
    for (int i = 0; i < group; i += LANES) {
      Ints whole = rounded(at(x + i), factor), higher = (whole + 128) >> 8;
      wholes += whole;
      if (form == Codes::WORDS) put_words(to + 2 * i, whole);
      if (form == Codes::BYTES) put_bytes(to + i, whole);
      if (form == Codes::PLANES) put_bytes(to + i, higher), put_bytes(to + group + i, whole - (higher << 8));
    }
    int32_t whole = total(wholes);
    scales[place] = scale, starts[place] = -m.zero * whole, sums[place] = scale * float(whole);
#endif
  }
};

// work(first row, N as a type) for n rows in blocks of nearly one size, of at most MOST rows.
template <int N>
struct Size {
  static constexpr int num = N;
};
template <int MOST, class Work>
static inline void in_blocks(int n, const Work& work) {
  for (int row = 0, sweeps = (n + MOST - 1) / MOST; sweeps; --sweeps) {
    int block = (n - row + sweeps - 1) / sweeps;
    switch (block) {
#define CASE(N) \
  case N:       \
    if constexpr (N <= MOST) work(row, Size<N>()); \
    break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
    row += block;
  }
}

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
