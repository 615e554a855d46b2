// Sums of rows with the panels of a matrix, in float32. A row's sums are made in one order whatever the number of rows and of panels
// that are summed at once.

#pragma once

#include "inputs.h"

constexpr size_t AHEAD = 8192;  // bytes: the processor's own reading ahead ends with every page, and is late with several rows

constexpr size_t SOON = 1024;   // about a group: two threads of one core see too little of what comes to ask for it in time

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

// Words that are read in order, and what comes later asked for.
static inline Words next_words(const uint8_t* p) {
  __builtin_prefetch(p + AHEAD, 0, 2), __builtin_prefetch(p + SOON, 0, 3);
  return words(p);
}

// The codes of a group, which begins at w.
template <int BITS, int GROUP>
struct Group {
  static constexpr int QUADS = GROUP / 4, HIGHER = BITS == 8 ? 0 : BITS - 4;
  const uint8_t* w;
  Words high[2];

  explicit Group(const uint8_t* w) : w(w) {
#pragma GCC unroll 2
    for (int half = 0; half < 2 && HIGHER; ++half) high[half] = next_words(w + (QUADS + half) * LANES * 4);
  }
  // Eight inputs from 4 `quad` on: four of them in each word, of LANES outputs and of the next LANES in turn.
  __attribute__((always_inline)) void eight(int quad, Words* codes) const {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      if (BITS == 8) {
        codes[half] = next_words(w + (2 * quad + half) * LANES * 4), codes[2 + half] = next_words(w + (2 * quad + 2 + half) * LANES * 4);
        continue;
      }
      Words low = next_words(w + (quad + half) * LANES * 4);
      codes[half] = low & 0x0f0f0f0fu, codes[2 + half] = low >> 4 & 0x0f0f0f0fu;
#pragma GCC unroll 2
      for (int i = 0; i < 2 && HIGHER; ++i) {
        int up = 4 - (quad + i) * HIGHER;
        codes[2 * i + half] |= (up > 0 ? high[half] << up : high[half] >> -up) & (HIGHER == 2 ? 0x30303030u : 0x10101010u);
      }
    }
  }
};

// All of them [GROUP / 2].
template <int BITS, int GROUP>
__attribute__((always_inline)) static inline void expand(const uint8_t* w, Words* codes) {
  const Group<BITS, GROUP> group(w);
#pragma GCC unroll 8
  for (int quad = 0; quad < GROUP / 4; quad += 2) group.eight(quad, codes + 2 * quad);
}
static void expand(const Matrix& m, const uint8_t* w, Words* codes) {
  if (m.bits == 4) return (m.group == 32 ? expand<4, 32> : expand<4, 16>)(w, codes);
  if (m.bits == 5) return expand<5, 32>(w, codes);
  if (m.bits == 6) return expand<6, 16>(w, codes);
  expand<8, 32>(w, codes);
}

// The scales and offsets of the groups of a panel, one group after another.
struct Scales {
  Vec scale[2], offset[2];

  // Of group g, which is number `in_block` of the block at `block`.
  void read(const Matrix& m, const uint8_t* block, int in_block) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      scale[half] = halves(block + half * LANES * 2);
      if (m.has_offset) offset[half] = halves(block + PANEL * 2 + half * LANES * 2);
      if (!m.has_levels) continue;
      const uint8_t* levels = block + m.scales_bytes() + in_block * PANEL * (1 + m.has_offset) + half * LANES;
      scale[half] = bytes(levels) * scale[half];
      if (m.has_offset) offset[half] = -bytes(levels + PANEL) * offset[half];
    }
  }
};

// The weights of output o, [in]: what a lookup of an embedding reads, from the vectors that hold them for the whole panel.
static void row_of(const Matrix& m, int o, float* to) {
  const uint8_t* at_input = m.panel(o / PANEL);
  int half = o % PANEL / LANES, lane = o % LANES;
  for (int i = 0; i < m.in && !m.is_coded(); ++i, at_input += m.step()) {
    Vec found[2];
    (m.form == Form::WHOLE ? Whole::read : m.form == Form::HALF ? Half::read : Float16::read)(at_input, found[0], found[1]);
    to[i] = found[half][lane];
  }
  for (int g = 0; g < m.num_groups(); ++g) {
    const uint8_t* block = m.panel(o / PANEL) + g / m.groups_of_block() * m.block_bytes();
    int in_block = g % m.groups_of_block();
    Scales scales;
    scales.read(m, block, in_block);
    Words codes[MOST_GROUP / 2];
    expand(m, block + m.before_codes() + in_block * m.group_bytes(), codes);
    float scale = scales.scale[half][lane], offset = m.has_offset ? scales.offset[half][lane] : 0;
    for (int i = 0; i < m.group; ++i) {
      int code = codes[i / 4 * 2 + half][lane] >> i % 4 * 8 & 255;
      to[g * m.group + i] = scale * float(code - m.zero) + offset;
    }
  }
}

// The sums of a matrix of codes, whose weights are scale * (code - zero) + offset: sums of codes times values, and for each group
// scale times that.
template <int N>
static void coded_sums(const Matrix& m, const Inputs& inputs, const Store& put, int panel, int row) {
  Vec first[N], second[N];
  size_t stride = apart(m.in);
  const float *x = inputs.x + row * stride, *sums = inputs.sums + row, *bias = m.bias ? m.bias + panel * PANEL : nullptr;
  const uint8_t* block = m.panel(panel);
  Scales scales;
#pragma GCC unroll 16
  for (int r = 0; r < N; ++r) first[r] = bias ? at(bias) : Vec{}, second[r] = bias ? at(bias + LANES) : Vec{};
  int per_block = m.groups_of_block();
  for (int g = 0; g < m.num_groups(); ++g, sums += inputs.n) {
    if (g && g % per_block == 0) block += m.block_bytes();
    scales.read(m, block, g % per_block);
    Words codes[MOST_GROUP / 2];
    expand(m, block + m.before_codes() + g % per_block * m.group_bytes(), codes);
    Vec a[N], b[N];
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) a[r] = b[r] = all(-float(m.zero) * sums[r]);
    for (int quad = 0; quad < m.group / 4; ++quad, x += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        Vec u = __builtin_convertvector(bits_as<Ints>(codes[2 * quad] >> 8 * i & 255u), Vec);
        Vec v = __builtin_convertvector(bits_as<Ints>(codes[2 * quad + 1] >> 8 * i & 255u), Vec);
#pragma GCC unroll 16
        for (int r = 0; r < N; ++r) a[r] += u * x[r * stride + i], b[r] += v * x[r * stride + i];
      }
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) {
      first[r] += scales.scale[0] * a[r], second[r] += scales.scale[1] * b[r];
      if (m.has_offset) first[r] += scales.offset[0] * sums[r], second[r] += scales.offset[1] * sums[r];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < N; ++r) put(panel, row + r, first[r], second[r]);
}
