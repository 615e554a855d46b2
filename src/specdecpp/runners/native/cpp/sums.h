// Sums of rows with the panels of a matrix, in float32. A row's sums are made in one order whatever the number of rows and of panels
// that are summed at once.

#pragma once

#include "inputs.h"

constexpr size_t AHEAD = 8192;  // bytes: the processor's own reading ahead ends with every page, and is late with several rows

struct Whole {
  static constexpr size_t STEP = PANEL * 4;
  static void read(const uint8_t* p, Vec& a, Vec& b) { a = floats(words(p)), b = floats(words(p + LANES * 4)); }
};
struct Half {
  static constexpr size_t STEP = PANEL * 2;
  static void read(const uint8_t* p, Vec& a, Vec& b) {
    Words both = words(p);
    a = floats(both << 16), b = floats(both & HIGH);
  }
};
struct Float16 {
  static constexpr size_t STEP = PANEL * 2;
  static void read(const uint8_t* p, Vec& a, Vec& b) { a = halves(p), b = halves(p + LANES * 2); }
};

// The sums of P panels, `apart` bytes from each other, for N rows of x that lie `stride` apart; the weights of an input lie `step`
// bytes after those of the one before. They are put at `panel` and `row`.
template <class Read, int N, int P>
static void plain_sums(const uint8_t* w, size_t step, size_t apart, const float* bias, int in, const float* x, size_t stride, const Store& put,
                       int panel, int row) {
  Vec first[P][N], second[P][N];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) {
      first[p][r] = bias ? at(bias + p * PANEL) : Vec{};
      second[p][r] = bias ? at(bias + p * PANEL + LANES) : Vec{};
    }
  for (int i = 0; i < in; ++i, w += step) {
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) {
      Vec a, b;
      for (size_t line = 0; line < Read::STEP; line += 64) __builtin_prefetch(w + p * apart + AHEAD / P + line, 0, 2);
      Read::read(w + p * apart, a, b);
#pragma GCC unroll 16
      for (int r = 0; r < N; ++r) {
        float value = x[r * stride + i];
        first[p][r] += a * value;
        second[p][r] += b * value;
      }
    }
  }
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) put(panel + p, row + r, first[p][r], second[p][r]);
}

// Codes of an octet as floats: input I of LANES outputs, of the first half of a panel or the second.
struct Nibbles {
  static constexpr size_t OCTET = PANEL * 4;
  static constexpr float UNIT = 1.0f;
  static constexpr int WORDS = 2;
  static Vec value(const Words* w, int i, int half) {
    Words shifted = w[half] >> (i < 4 ? 8 * i : 8 * i - 28);
#if defined(__AVX512F__)
    const __m512 all_codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return Vec(_mm512_permutexvar_ps(bits_as<__m512i>(shifted), all_codes));  // it looks at four bits of each place only
#else
    return __builtin_convertvector(bits_as<Ints>(shifted & 15u), Vec);
#endif
  }
};
struct Bytes {
  static constexpr size_t OCTET = PANEL * 8;
  static constexpr float UNIT = 1.0f / (1 << 24);  // codes are left in the highest byte of a word
  static constexpr int WORDS = 4;
  static Vec value(const Words* w, int i, int half) {
    Words four = w[i / 4 * 2 + half];
#if defined(__AVX512BW__)
    const __m512i places = _mm512_set1_epi32(int(0x00808080u | uint32_t(i % 4) << 24));  // 0x80 makes a zero
    const __m512i found = _mm512_shuffle_epi8(bits_as<__m512i>(four), _mm512_add_epi32(places, _mm512_set4_epi32(12 << 24, 8 << 24, 4 << 24, 0)));
    return Vec(_mm512_cvtepi32_ps(found));
#else
    return __builtin_convertvector(bits_as<Ints>((four << (24 - i % 4 * 8)) & 0xff000000u), Vec);
#endif
  }
};

// The scales and offsets of a panel's groups, and those of the super-group they are in.
struct Scales {
  Vec super[2], super_offset[2];

  // Of group g, which begins at w; where its codes begin.
  const uint8_t* read(const Matrix& m, const uint8_t* w, int g, float unit, Vec scale[2], Vec offset[2]) {
    for (size_t line = 0; line < m.before_group(); line += 64) __builtin_prefetch(w + AHEAD + line, 0, 2);
    if (!m.has_levels) {
      scale[0] = halves(w) * unit, scale[1] = halves(w + LANES * 2) * unit, w += PANEL * 2;
      if (m.has_offset) offset[0] = halves(w), offset[1] = halves(w + LANES * 2), w += PANEL * 2;
      return w;
    }
    if (g * m.group % SUPER == 0) {
      super[0] = halves(w) * unit, super[1] = halves(w + LANES * 2) * unit, w += PANEL * 2;
      if (m.has_offset) super_offset[0] = -halves(w), super_offset[1] = -halves(w + LANES * 2), w += PANEL * 2;
    }
    scale[0] = bytes(w) * super[0], scale[1] = bytes(w + LANES) * super[1], w += PANEL;
    if (m.has_offset) offset[0] = bytes(w) * super_offset[0], offset[1] = bytes(w + LANES) * super_offset[1], w += PANEL;
    return w;
  }
};

// The same for a matrix of codes, whose weights are scale * (code - zero) + offset: sums of codes times values, and for each group
// scale times that. `sums` are those of x over each group, rows lying `num_groups` apart.
template <class Codes, int N>
static void coded_sums(const Matrix& m, const float* x, size_t stride, const float* sums, const Store& put, int panel, int row) {
  Vec first[N], second[N];
  const uint8_t* w = m.panel(panel);
  const float* bias = m.bias ? m.bias + panel * PANEL : nullptr;
  Scales scales;
#pragma GCC unroll 16
  for (int r = 0; r < N; ++r) first[r] = bias ? at(bias) : Vec{}, second[r] = bias ? at(bias + LANES) : Vec{};
  int groups = m.num_groups(), octets = m.group / 8;
  float zero = -float(m.zero) / Codes::UNIT;
  for (int g = 0; g < groups; ++g) {
    Vec scale[2], offset[2], a[N], b[N];
    w = scales.read(m, w, g, Codes::UNIT, scale, offset);
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) a[r] = b[r] = all(zero * sums[r * groups + g]);
    for (int o = 0; o < octets; ++o, x += 8, w += Codes::OCTET) {
      Words codes[Codes::WORDS];
#pragma GCC unroll 16
      for (int i = 0; i < Codes::WORDS; ++i) {
        __builtin_prefetch(w + AHEAD + i * LANES * 4, 0, 2);
        codes[i] = words(w + i * LANES * 4);
      }
#pragma GCC unroll 16
      for (int i = 0; i < 8; ++i) {
        Vec u = Codes::value(codes, i, 0), v = Codes::value(codes, i, 1);
#pragma GCC unroll 16
        for (int r = 0; r < N; ++r) {
          float value = x[r * stride + i];
          a[r] += u * value;
          b[r] += v * value;
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) {
      first[r] += scale[0] * a[r];
      second[r] += scale[1] * b[r];
      if (m.has_offset) {
        float sum = sums[r * groups + g];
        first[r] += offset[0] * sum;
        second[r] += offset[1] * sum;
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < N; ++r) put(panel, row + r, first[r], second[r]);
}
