// The same sums of rounded inputs, where the processor has products of whole numbers.

#pragma once

#include "sums.h"

#if HAS_DOTS
#if defined(__AVX512BW__)
#define WIDE(name) _mm512_##name
typedef __m512i Wide;
static inline Wide masked(Wide a, Wide b) { return _mm512_and_si512(a, b); }
#else
#define WIDE(name) _mm256_##name
typedef __m256i Wide;
static inline Wide masked(Wide a, Wide b) { return _mm256_and_si256(a, b); }
#endif

// The same four bytes in every place.
static inline Wide four_of(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return WIDE(set1_epi32)(four);
}

// In each place the sum of four products of codes with bytes of x, added. Codes of 8 bits without VNNI, where a sum of two products would
// be cut off at 16 bits, take twice as many instructions.
template <int BITS>
static inline Ints dot(Ints sum, Words codes, Wide x) {
  Wide a = bits_as<Wide>(sum), b = bits_as<Wide>(codes);
#if defined(__AVX512VNNI__)
  return Ints(_mm512_dpbusd_epi32(a, b, x));
#elif defined(__AVXVNNI__)
  return Ints(_mm256_dpbusd_avx_epi32(a, b, x));
#else
  if (BITS < 8) return Ints(WIDE(add_epi32)(a, WIDE(madd_epi16)(WIDE(maddubs_epi16)(b, x), WIDE(set1_epi16)(1))));
  Wide even = masked(b, WIDE(set1_epi16)(255)), of_even = WIDE(srai_epi16)(WIDE(slli_epi16)(x, 8), 8);
  Wide odd = WIDE(srli_epi16)(b, 8), of_odd = WIDE(srai_epi16)(x, 8);
  return Ints(WIDE(add_epi32)(a, WIDE(add_epi32)(WIDE(madd_epi16)(even, of_even), WIDE(madd_epi16)(odd, of_odd))));
#endif
}
// The same of two products of codes in 16 bits with words of x.
static inline Ints dot_of_words(Ints sum, Wide codes, Wide x) {
  Wide a = bits_as<Wide>(sum);
#if defined(__AVX512VNNI__)
  return Ints(_mm512_dpwssd_epi32(a, codes, x));
#elif defined(__AVXVNNI__)
  return Ints(_mm256_dpwssd_avx_epi32(a, codes, x));
#else
  __asm__("" : "+v"(a));  // a compiler that gathers all products of a sum before it adds them runs out of registers
  return Ints(WIDE(add_epi32)(a, WIDE(madd_epi16)(codes, x)));
#endif
}

// Adds the products of the codes of a group, every second word of the same outputs, with bytes [GROUP] of R rows of x, which lie `apart`.
template <int BITS, int GROUP, int R>
__attribute__((always_inline)) static inline void add_dots(const Words* codes, const int8_t* x, int apart, Ints sums[R][2]) {
#pragma GCC unroll 8
  for (int quad = 0; quad < GROUP / 4; ++quad)
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      Wide four = four_of(x + r * apart + 4 * quad);
      sums[r][0] = dot<BITS>(sums[r][0], codes[2 * quad], four), sums[r][1] = dot<BITS>(sums[r][1], codes[2 * quad + 1], four);
    }
}
// The same with 16 bits of x; the codes are expanded where they are needed.
template <int BITS, int GROUP, int R>
__attribute__((always_inline)) static inline void add_dots_of_words(const Group<BITS, GROUP>& group, const int8_t* x, Ints sums[R][2]) {
#pragma GCC unroll 4
  for (int first = 0; first < GROUP / 4; first += 2) {
    Words codes[4];
    group.eight(first, codes);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // inputs 0 2, 1 3, 4 6, 5 7, and all rows in turn: a product need not wait for the one before it
      Wide u = bits_as<Wide>(codes[i / 2 * 2]), v = bits_as<Wide>(codes[i / 2 * 2 + 1]), low = WIDE(set1_epi16)(255);
      Wide a = i % 2 ? WIDE(srli_epi16)(u, 8) : masked(u, low), b = i % 2 ? WIDE(srli_epi16)(v, 8) : masked(v, low);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        Wide pairs = four_of(x + (r * GROUP + 4 * first + 2 * i) * 2);
        sums[r][0] = dot_of_words(sums[r][0], a, pairs), sums[r][1] = dot_of_words(sums[r][1], b, pairs);
      }
    }
  }
}

// Sums of whole numbers, and so exact, of the group at w for R rows of x.
template <int BITS, int GROUP, Codes FORM, int R>
__attribute__((always_inline)) static inline void sum_group(const Inputs& x, size_t place, const uint8_t* w, Ints sums[R][2]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = Ints{} + x.starts[place + r];
  if constexpr (FORM == Codes::WORDS) {
    add_dots_of_words<BITS, GROUP, R>(Group<BITS, GROUP>(w), x.codes + place * GROUP * 2, sums);
    return;
  }
  Words codes[GROUP / 2];
  expand<BITS, GROUP>(w, codes);
  if constexpr (FORM == Codes::BYTES) return add_dots<BITS, GROUP, R>(codes, x.codes + place * GROUP, GROUP, sums);
  Ints higher[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) higher[r][0] = higher[r][1] = Ints{};
  add_dots<BITS, GROUP, R>(codes, x.codes + place * GROUP * 2, 2 * GROUP, higher);
  add_dots<BITS, GROUP, R>(codes, x.codes + place * GROUP * 2 + GROUP, 2 * GROUP, sums);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) sums[r][0] += higher[r][0] << 8, sums[r][1] += higher[r][1] << 8;
}

// What a group adds to the sums [R, PANEL] of R rows of x, from place to place.
template <int BITS, int GROUP, Codes FORM, int R>
__attribute__((always_inline)) static inline void add_group(const Matrix& m, const Inputs& x, size_t place, const uint8_t* w, const Scales& scales, Vec sums[R][2]) {
  Ints whole[R][2];
  sum_group<BITS, GROUP, FORM, R>(x, place, w, whole);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Vec found = sums[r][half] + scales.scale[half] * x.scales[place + r] * __builtin_convertvector(whole[r][half], Vec);
      sums[r][half] = m.has_offset ? found + scales.offset[half] * x.sums[place + r] : found;
    }
}

// A panel for N rows of x rounded to codes.
template <int BITS, int GROUP, Codes FORM, int N>
static void rounded_sums(const Matrix& m, const Inputs& x, const Store& put, int panel, int row) {
  Vec sums[N][2];
  const float* bias = m.bias ? m.bias + panel * PANEL : nullptr;
#pragma GCC unroll 12
  for (int r = 0; r < N; ++r) sums[r][0] = bias ? at(bias) : Vec{}, sums[r][1] = bias ? at(bias + LANES) : Vec{};
  const uint8_t* block = m.panel(panel);
  int num = m.num_groups(), per_block = m.groups_of_block();
  size_t block_bytes = m.block_bytes(), before = m.before_codes(), place = row;
  for (int g = 0; g < num; block += block_bytes) {
    for (size_t line = 0; line < before; line += 64) __builtin_prefetch(block + AHEAD + line, 0, 2);
    for (int in_block = 0; in_block < per_block; ++in_block, ++g, place += x.n) {
      const uint8_t* w = block + before + in_block * (size_t(PANEL) * GROUP * BITS / 8);
      Scales scales;
      scales.read(m, block, in_block);
      add_group<BITS, GROUP, FORM, N>(m, x, place, w, scales, sums);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < N; ++r) put(panel, row + r, sums[r][0], sums[r][1]);
}
#undef WIDE
#endif
