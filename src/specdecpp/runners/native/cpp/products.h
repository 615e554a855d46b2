// Sums of rows with the panels of matrices. Every weight is read once for a block of rows, and a row's sums are made in one order
// whatever the number of rows and of panels that are summed at once: its bits depend on nothing else.

#pragma once

#include "matrix.h"

constexpr size_t AHEAD = 4096;  // bytes: the processor's own reading ahead ends with every page, and is late with several rows

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
      for (size_t line = 0; line < Read::STEP; line += 64) __builtin_prefetch(w + p * apart + AHEAD + line, 0, 2);
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

// The same for a matrix of codes, whose weights are scale * (code - zero) + offset: sums of codes times values, and for each group
// scale times that. `sums` are those of x over each group, rows lying `num_groups` apart.
template <class Codes, int N, int P>
static void coded_sums(const Matrix& m, const float* x, size_t stride, const float* sums, const Store& put, int panel, int row) {
  Vec first[P][N], second[P][N];
  const uint8_t* w[P];
  Vec super[P][2], super_offset[P][2];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) {
    w[p] = m.panel(panel + p);
    const float* bias = m.bias ? m.bias + (panel + p) * PANEL : nullptr;
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) first[p][r] = bias ? at(bias) : Vec{}, second[p][r] = bias ? at(bias + LANES) : Vec{};
  }
  int groups = m.num_groups(), octets = m.group / 8, groups_of_super = m.has_levels ? SUPER / m.group : 0;
  float zero = -float(m.zero) / Codes::UNIT;
  for (int g = 0; g < groups; ++g) {
    Vec scale[P][2], offset[P][2];
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) {
      if (m.has_levels) {
        if (g % groups_of_super == 0) {
          super[p][0] = halves(w[p]) * Codes::UNIT, super[p][1] = halves(w[p] + LANES * 2) * Codes::UNIT, w[p] += PANEL * 2;
          if (m.has_offset) super_offset[p][0] = halves(w[p]), super_offset[p][1] = halves(w[p] + LANES * 2), w[p] += PANEL * 2;
        }
        scale[p][0] = bytes(w[p]) * super[p][0], scale[p][1] = bytes(w[p] + LANES) * super[p][1], w[p] += PANEL;
        if (m.has_offset)
          offset[p][0] = -(bytes(w[p]) * super_offset[p][0]), offset[p][1] = -(bytes(w[p] + LANES) * super_offset[p][1]), w[p] += PANEL;
      } else {
        scale[p][0] = halves(w[p]) * Codes::UNIT, scale[p][1] = halves(w[p] + LANES * 2) * Codes::UNIT, w[p] += PANEL * 2;
        if (m.has_offset) offset[p][0] = halves(w[p]), offset[p][1] = halves(w[p] + LANES * 2), w[p] += PANEL * 2;
      }
    }
    Vec a[P][N], b[P][N];
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
      for (int r = 0; r < N; ++r) a[p][r] = b[p][r] = all(zero * sums[r * groups + g]);
    for (int o = 0; o < octets; ++o, x += 8) {
      Words codes[P][Codes::WORDS];
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) {
#pragma GCC unroll 16
        for (int i = 0; i < Codes::WORDS; ++i) {
          __builtin_prefetch(w[p] + AHEAD + i * LANES * 4, 0, 2);
          codes[p][i] = words(w[p] + i * LANES * 4);
        }
        w[p] += Codes::OCTET;
      }
#pragma GCC unroll 16
      for (int i = 0; i < 8; ++i)
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p) {
          Vec u = Codes::value(codes[p], i, 0), v = Codes::value(codes[p], i, 1);
#pragma GCC unroll 16
          for (int r = 0; r < N; ++r) {
            float value = x[r * stride + i];
            a[p][r] += u * value;
            b[p][r] += v * value;
          }
        }
    }
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
      for (int r = 0; r < N; ++r) {
        first[p][r] += scale[p][0] * a[p][r];
        second[p][r] += scale[p][1] * b[p][r];
        if (m.has_offset) {
          float sum = sums[r * groups + g];
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

// work(first row, N as a type) for n rows in blocks of nearly one size, of at most MOST rows.
template <int N>
struct Size {
  static constexpr int num = N;
};
template <int MOST, class Work>
static inline void in_blocks(int n, Work work) {
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

// How many panels are summed at once: a single sum of few rows would wait for itself.
template <int N>
constexpr int panels_at_once() { return LANES < 16 ? 1 : N == 1 ? 4 : N == 2 ? 2 : 1; }

// How far apart rows of so many values lie that products read: never a power of two, where rows would share a few places of the cache.
static inline size_t apart(int width) { return (up(width, LANES) / LANES | 1) * LANES; }

// Sums of each row of x [n, in] over each group of a matrix, [n, groups].
static void group_sums(const Matrix& m, const float* x, int n, float* sums) {
  int groups = m.num_groups();
  for (int r = 0; r < n; ++r)
    for (int g = 0; g < groups; ++g) {
      const float* of = x + r * apart(m.in) + g * m.group;
      Vec sum{};
      for (int i = 0; i < m.group; i += LANES) sum += at(of + i);
      sums[r * groups + g] = total(sum);
    }
}

template <class Read, int N, int P>
static inline void plain_panels(const Matrix& m, const float* x, const Store& put, int panel, int row) {
  const float* bias = m.bias ? m.bias + panel * PANEL : nullptr;
  plain_sums<Read, N, P>(m.panel(panel), Read::STEP, m.panel_bytes(), bias, m.in, x, apart(m.in), put, panel, row);
}

template <int N, int P>
static inline void panels_of(const Matrix& m, const float* x, const float* sums, const Store& put, int panel, int row) {
  x += row * apart(m.in), sums += row * m.num_groups();
  switch (m.form) {
    case Form::WHOLE: return plain_panels<Whole, N, P>(m, x, put, panel, row);
    case Form::HALF: return plain_panels<Half, N, P>(m, x, put, panel, row);
    case Form::FLOAT16: return plain_panels<Float16, N, P>(m, x, put, panel, row);
    case Form::NIBBLES: return coded_sums<Nibbles, N, P>(m, x, apart(m.in), sums, put, panel, row);
    case Form::BYTES: return coded_sums<Bytes, N, P>(m, x, apart(m.in), sums, put, panel, row);
  }
}

// Panels `begin` to `end` of x W for n rows of x, of whose groups `sums` are.
static void product(const Matrix& m, const float* x, const float* sums, int n, int begin, int end, const Store& put) {
  int panel = begin;
  if (n <= 2)
    in_blocks<2>(n, [&](int row, auto size) {
      constexpr int N = decltype(size)::num, P = panels_at_once<N>();
      for (; P > 1 && panel + P <= end; panel += P) panels_of<N, P>(m, x, sums, put, panel, row);
    });
  for (; panel < end; ++panel)
    in_blocks<ROWS>(n, [&](int row, auto size) { panels_of<decltype(size)::num, 1>(m, x, sums, put, panel, row); });
}

// The thread's share of so many panels.
struct Share {
  int begin, end;
  Share(int num, int thread, int threads)
      : begin(int(int64_t(num) * thread / threads)), end(int(int64_t(num) * (thread + 1) / threads)) {}
};
