// The same sums of rounded inputs, where the processor has products of bytes.

#pragma once

#include "sums.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define HAS_DOTS 1
// In each place the sum of four products of unsigned bytes with the signed bytes of x, added.
static inline Ints dots(Ints sum, Words codes, int32_t x) {
#if defined(__AVX512VNNI__)
  return Ints(_mm512_dpbusd_epi32(bits_as<__m512i>(sum), bits_as<__m512i>(codes), _mm512_set1_epi32(x)));
#else
  return Ints(_mm256_dpbusd_avx_epi32(bits_as<__m256i>(sum), bits_as<__m256i>(codes), _mm256_set1_epi32(x)));
#endif
}
#else
#define HAS_DOTS 0
#endif

#if HAS_DOTS
// The same sums with rounded x: of whole numbers, and so exact, within each group.
template <bool IS_NIBBLES, int N, int P>
static void rounded_sums(const Matrix& m, const Inputs& x, const Store& put, int panel, int row) {
  Vec first[P][N], second[P][N];
  const uint8_t* w[P];
  Scales scales[P];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) {
    w[p] = m.panel(panel + p);
    const float* bias = m.bias ? m.bias + (panel + p) * PANEL : nullptr;
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) first[p][r] = bias ? at(bias) : Vec{}, second[p][r] = bias ? at(bias + LANES) : Vec{};
  }
  constexpr size_t QUAD = PANEL * 4;  // bytes: four inputs, or eight in nibbles
  int groups = m.num_groups(), in = m.in, zero = IS_NIBBLES ? m.zero : m.zero + 128;
  const int8_t* codes = x.codes;
  for (int g = 0; g < groups; ++g) {
    Vec scale[P][2], offset[P][2];
    Ints a[P][N], b[P][N];
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) {
      w[p] = scales[p].read(m, w[p], g, 1.0f, scale[p], offset[p]);
#pragma GCC unroll 16
      for (int r = 0; r < N; ++r) a[p][r] = b[p][r] = Ints{} - zero * x.totals[r * groups + g];
    }
    for (int i = 0; i < m.group; i += IS_NIBBLES ? 8 : 4, codes += IS_NIBBLES ? 8 : 4)
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p, w[p - 1] += QUAD) {
        __builtin_prefetch(w[p] + AHEAD, 0, 2), __builtin_prefetch(w[p] + AHEAD + QUAD / 2, 0, 2);
        Words u = words(w[p]), v = words(w[p] + QUAD / 2);
#pragma GCC unroll 16
        for (int part = 0; part < 1 + IS_NIBBLES; ++part) {
          Words of_u = IS_NIBBLES ? u >> 4 * part & 0x0f0f0f0fu : u ^ 0x80808080u;
          Words of_v = IS_NIBBLES ? v >> 4 * part & 0x0f0f0f0fu : v ^ 0x80808080u;
#pragma GCC unroll 16
          for (int r = 0; r < N; ++r) {
            int32_t four;
            std::memcpy(&four, codes + r * in + 4 * part, 4);
            a[p][r] = dots(a[p][r], of_u, four), b[p][r] = dots(b[p][r], of_v, four);
          }
        }
      }
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
      for (int r = 0; r < N; ++r) {
        float by = x.scales[r * groups + g], sum = x.sums[r * groups + g];
        first[p][r] += scale[p][0] * by * __builtin_convertvector(a[p][r], Vec);
        second[p][r] += scale[p][1] * by * __builtin_convertvector(b[p][r], Vec);
        if (m.has_offset) {
          first[p][r] += offset[p][0] * sum;
          second[p][r] += offset[p][1] * sum;
        }
      }
  }
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) put(panel + p, row + r, first[p][r], second[p][r]);
}
#endif
