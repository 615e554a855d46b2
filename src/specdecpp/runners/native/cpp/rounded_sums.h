// The same sums of rounded inputs, where the processor has products of whole numbers.

#pragma once

#include "sums.h"

#if defined(__AVX512BW__) || defined(__AVX2__) && !defined(__AVX512F__)
#define HAS_DOTS 1
// In each place the sum of four products of unsigned bytes (HAS_FEW: each at most 15) with the signed bytes of x, or of two products of
// halves of words with those of x, added. Without VNNI the latter take two instructions, and the former as many more as keep
// sums of two from being cut off at 16 bits.
template <int WIDTH, bool HAS_FEW>
static inline Ints dots(Ints sum, Words codes, int32_t x) {
#if defined(__AVX512VNNI__)
  __m512i a = bits_as<__m512i>(sum), b = bits_as<__m512i>(codes), c = _mm512_set1_epi32(x);
  return Ints(WIDTH == 1 ? _mm512_dpbusd_epi32(a, b, c) : _mm512_dpwssd_epi32(a, b, c));
#elif defined(__AVXVNNI__)
  __m256i a = bits_as<__m256i>(sum), b = bits_as<__m256i>(codes), c = _mm256_set1_epi32(x);
  return Ints(WIDTH == 1 ? _mm256_dpbusd_avx_epi32(a, b, c) : _mm256_dpwssd_avx_epi32(a, b, c));
#elif defined(__AVX512BW__)
  // A compiler that gathers all products of a sum before it adds them runs out of registers.
  __asm__("" : "+v"(sum));
  __m512i b = bits_as<__m512i>(codes), c = _mm512_set1_epi32(x);
  if (WIDTH == 2) return sum + Ints(_mm512_madd_epi16(b, c));
  if (HAS_FEW) return sum + Ints(_mm512_madd_epi16(_mm512_maddubs_epi16(b, c), _mm512_set1_epi16(1)));
  __m512i even = _mm512_and_si512(b, _mm512_set1_epi16(255)), of_even = _mm512_srai_epi16(_mm512_slli_epi16(c, 8), 8);
  return sum + Ints(_mm512_madd_epi16(even, of_even)) + Ints(_mm512_madd_epi16(_mm512_srli_epi16(b, 8), _mm512_srai_epi16(c, 8)));
#else
  __asm__("" : "+x"(sum));
  __m256i b = bits_as<__m256i>(codes), c = _mm256_set1_epi32(x);
  if (WIDTH == 2) return sum + Ints(_mm256_madd_epi16(b, c));
  if (HAS_FEW) return sum + Ints(_mm256_madd_epi16(_mm256_maddubs_epi16(b, c), _mm256_set1_epi16(1)));
  __m256i even = _mm256_and_si256(b, _mm256_set1_epi16(255)), of_even = _mm256_srai_epi16(_mm256_slli_epi16(c, 8), 8);
  return sum + Ints(_mm256_madd_epi16(even, of_even)) + Ints(_mm256_madd_epi16(_mm256_srli_epi16(b, 8), _mm256_srai_epi16(c, 8)));
#endif
}
#else
#define HAS_DOTS 0
#endif

#if HAS_DOTS
// The codes of four inputs, or of two, that a product takes of words with eight (nibbles) or four.
template <bool IS_NIBBLES, int WIDTH>
static inline Words taken(Words w, int part) {
  if (WIDTH == 1) return IS_NIBBLES ? w >> 4 * part & 0x0f0f0f0fu : w ^ 0x80808080u;
  if (IS_NIBBLES) return w >> (part / 2 * 4 + part % 2 * 8) & 0x000f000fu;
  typedef int16_t Halves __attribute__((vector_size(LANES * 4)));
  Halves halves = bits_as<Halves>(w);
  return bits_as<Words>(part ? halves >> 8 : halves << 8 >> 8);
}

// The same sums with x rounded to codes of WIDTH bytes: of whole numbers, and so exact, within each group.
template <bool IS_NIBBLES, int WIDTH, int N>
static void rounded_sums(const Matrix& m, const Inputs& x, const Store& put, int panel, int row) {
  constexpr size_t QUAD = PANEL * 4;  // bytes: four inputs, or eight in nibbles
  constexpr int PARTS = (1 + IS_NIBBLES) * WIDTH;
  Vec first[N], second[N];
  const uint8_t* w = m.panel(panel);
  const float* bias = m.bias ? m.bias + panel * PANEL : nullptr;
  Scales scales;
#pragma GCC unroll 16
  for (int r = 0; r < N; ++r) first[r] = bias ? at(bias) : Vec{}, second[r] = bias ? at(bias + LANES) : Vec{};
  int groups = m.num_groups(), in = m.in, zero = IS_NIBBLES || WIDTH == 2 ? m.zero : m.zero + 128;
  const int8_t* codes = x.codes;
  for (int g = 0; g < groups; ++g) {
    Vec scale[2], offset[2];
    Ints a[N], b[N];
    w = scales.read(m, w, g, 1.0f, scale, offset);
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) a[r] = b[r] = Ints{};
    if (zero)
#pragma GCC unroll 16
      for (int r = 0; r < N; ++r) a[r] = b[r] = Ints{} - zero * x.totals[r * groups + g];
    for (int i = 0; i < m.group; i += IS_NIBBLES ? 8 : 4, codes += PARTS * 4, w += QUAD) {
      __builtin_prefetch(w + AHEAD, 0, 2), __builtin_prefetch(w + AHEAD + QUAD / 2, 0, 2);
      Words u = words(w), v = words(w + QUAD / 2);
#pragma GCC unroll 16
      for (int part = 0; part < PARTS; ++part) {
        Words of_u = taken<IS_NIBBLES, WIDTH>(u, part), of_v = taken<IS_NIBBLES, WIDTH>(v, part);
#pragma GCC unroll 16
        for (int r = 0; r < N; ++r) {
          int32_t few;
          std::memcpy(&few, codes + r * in * WIDTH + 4 * part, 4);
          a[r] = dots<WIDTH, IS_NIBBLES>(a[r], of_u, few), b[r] = dots<WIDTH, IS_NIBBLES>(b[r], of_v, few);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) {
      float by = x.scales[r * groups + g], sum = x.sums[r * groups + g];
      first[r] += scale[0] * by * __builtin_convertvector(a[r], Vec);
      second[r] += scale[1] * by * __builtin_convertvector(b[r], Vec);
      if (m.has_offset) {
        first[r] += offset[0] * sum;
        second[r] += offset[1] * sum;
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < N; ++r) put(panel, row + r, first[r], second[r]);
}
#endif
