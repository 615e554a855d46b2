// Vectors of floats as wide as the processor's registers, and what is made of single ones.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512BW__)
constexpr int LANES = 16, ROWS = 12;  // floats of a register; rows whose sums of two registers each still fit
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 6;
#else
constexpr int LANES = 4, ROWS = 6;
#endif
constexpr int PANEL = 2 * LANES;
// Whether products of whole numbers are to be had.
#if defined(__AVX2__)
#define HAS_DOTS 1
#else
#define HAS_DOTS 0
#endif

typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
constexpr uint32_t HIGH = 0xffff0000u;  // the half of a float32 that is its bfloat16

static inline Vec& at(float* p) { return *reinterpret_cast<Vec*>(p); }
static inline const Vec& at(const float* p) { return *reinterpret_cast<const Vec*>(p); }
static inline Vec all(float x) { return Vec{} + x; }
template <class To, class From>
static inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
static inline Vec floats(Words bits) { return bits_as<Vec>(bits); }
static inline float float_of(uint32_t bits) { return bits_as<float>(bits); }
static inline uint32_t word_of(float x) { return bits_as<uint32_t>(x); }
static inline Words words(const uint8_t* p) {
  Words w;
  std::memcpy(&w, p, sizeof w);
  return w;
}

// exp to the last two bits: 2^n times a polynomial for what is left, |r| <= ln 2 / 2. Below -87 it is 0.
static inline Vec exponential(Vec x) {
  Vec low = all(-87.0f);
  Ints tiny = x < low;
  x = x < low ? low : x;
  Vec high = all(88.0f);
  x = x > high ? high : x;
  Vec shifted = x * 1.44269504088896f + 12582912.0f;  // the sum's last bits are the nearest integer
  Vec n = shifted - 12582912.0f;
  Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return tiny ? Vec{} : p * floats(Words((__builtin_convertvector(n, Ints) + 127) << 23));
}

// What the gate of a feed-forward layer becomes: x sigmoid(x), or GELU by its tanh.
static inline Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }
static inline Vec gelu(Vec x) {
  Vec inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(-2.0f * inner));  // (1 + tanh y) / 2 = 1 / (1 + exp(-2 y))
}

static inline float total(Vec v) {
  float sum = 0;
  for (int i = 0; i < LANES; ++i) sum += v[i];
  return sum;
}
#if HAS_DOTS
static inline int32_t total(Ints v) {
#if defined(__AVX512BW__)
  return _mm512_reduce_add_epi32(bits_as<__m512i>(v));
#else
  __m256i all_of = bits_as<__m256i>(v);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(all_of), _mm256_extracti128_si256(all_of, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#endif
}
#endif

// The largest of its places.
static inline float largest(Vec v) {
#if defined(__AVX512BW__)
  return _mm512_reduce_max_ps(bits_as<__m512>(v));
#elif defined(__AVX__)
  __m256 all_of = bits_as<__m256>(v);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(all_of), _mm256_extractf128_ps(all_of, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#else
  float top = v[0];
  for (int i = 1; i < LANES; ++i) top = v[i] > top ? v[i] : top;
  return top;
#endif
}

// A float16's value: exact, also of those below its normal range.
static inline float from_half(uint16_t half) {
  float size = float_of(uint32_t(half & 0x7fff) << 13) * 0x1p112f;
  if ((half & 0x7c00) == 0x7c00) size = float_of(word_of(size) | 0x7f800000u);
  return half & 0x8000 ? -size : size;
}

// LANES float16 values.
static inline Vec halves(const uint8_t* p) {
#if defined(__AVX512BW__)
  return Vec(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  return Vec(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__aarch64__)
  return Vec(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)))));
#else
  Vec v;
  uint16_t from[LANES];
  std::memcpy(from, p, sizeof from);
  for (int i = 0; i < LANES; ++i) v[i] = from_half(from[i]);
  return v;
#endif
}

// LANES signed bytes.
static inline Vec bytes(const uint8_t* p) {
#if defined(__AVX512BW__)
  return Vec(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#elif defined(__AVX2__)
  return Vec(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))));
#else
  Vec v;
  for (int i = 0; i < LANES; ++i) v[i] = float(int8_t(p[i]));
  return v;
#endif
}

static inline size_t up(size_t num, size_t to) { return (num + to - 1) / to * to; }
