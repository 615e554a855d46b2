// Rows of weights as files have them, put into panels.
//
// The kinds are GGML's, by its numbers: blocks of 32 weights with a float16 scale (and an offset), or of 256 with scales of 6 bits
// for groups of 16 or 32. Source: the layouts of ggml-common.h.

#pragma once

#include "matrix.h"
#include "threads.h"

enum Kind {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
  IQ4_NL = 20, IQ4_XS = 23, BF16 = 30
};

// How rows of a kind lie in a file, in blocks of so many weights and bytes, and in panels.
struct Stored {
  int kind, block, bytes;
  Layout layout;
};

static const Stored STORED[] = {
    {F32, 1, 4, {Form::WHOLE}},
    {F16, 1, 2, {Form::FLOAT16}},
    {BF16, 1, 2, {Form::HALF}},
    {Q4_0, 32, 18, {Form::CODES, 32, 4, 8}},
    {Q4_1, 32, 20, {Form::CODES, 32, 4, 0, false, true}},
    {Q5_0, 32, 22, {Form::CODES, 32, 5, 16}},
    {Q5_1, 32, 24, {Form::CODES, 32, 5, 0, false, true}},
    {Q8_0, 32, 34, {Form::CODES, 32, 8, 128}},
    {Q2_K, 256, 84, {Form::CODES, 16, 4, 0, true, true}},
    {Q3_K, 256, 110, {Form::CODES, 16, 4, 4, true}},
    {Q4_K, 256, 144, {Form::CODES, 32, 4, 0, true, true}},
    {Q5_K, 256, 176, {Form::CODES, 32, 5, 0, true, true}},
    {Q6_K, 256, 210, {Form::CODES, 16, 6, 32, true}},
    {IQ4_NL, 32, 18, {Form::CODES, 32, 8, 128}},
    {IQ4_XS, 256, 136, {Form::CODES, 32, 8, 128, true}},
};

// Null for a kind that is not known here, or rows that are no whole blocks.
static const Stored* stored_as(int kind, int in) {
  for (const Stored& stored : STORED)
    if (stored.kind == kind && in % stored.block == 0) return &stored;
  return nullptr;
}

// A block of one output: its codes without signs, and its scale and offset as float16 bits, with the levels of its groups if any.
struct Block {
  uint8_t codes[SUPER];
  uint16_t scale, offset;
  int8_t levels[SUPER / 16], offset_levels[SUPER / 16];
};

static inline uint16_t two(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

static void read_nibbles(const uint8_t* from, uint8_t* codes, int half) {
  for (int i = 0; i < half; ++i) codes[i] = from[i] & 15, codes[half + i] = from[i] >> 4;
}
static void read_uneven(const uint8_t* from, uint8_t* codes) {
  static const int8_t VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  read_nibbles(from, codes, 16);
  for (int i = 0; i < 32; ++i) codes[i] = uint8_t(VALUES[codes[i]] + 128);
}
// Bits of 32 inputs, one for each, become the fifth of their codes.
static void add_fifth(const uint8_t* from, uint8_t* codes) {
  uint32_t bits = word(from);
  for (int i = 0; i < 32; ++i) codes[i] |= uint8_t((bits >> i & 1) << 4);
}
// Codes of two bits: four groups of 32 in each 32 bytes.
static void read_crumbs(const uint8_t* from, uint8_t* codes) {
  for (int part = 0; part < 8; ++part)
    for (int i = 0; i < 32; ++i) codes[32 * part + i] = from[part / 4 * 32 + i] >> part % 4 * 2 & 3;
}
static void read_six_bit_levels(const uint8_t* s, Block& to) {
  for (int g = 0; g < 8; ++g) {
    to.levels[g] = int8_t(g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4);
    to.offset_levels[g] = int8_t(g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4);
  }
}

static void read_block(int kind, const uint8_t* b, Block& to) {
  to.scale = two(b), to.offset = 0;
  switch (kind) {
    case Q4_0: return read_nibbles(b + 2, to.codes, 16);
    case Q4_1: to.offset = two(b + 2); return read_nibbles(b + 4, to.codes, 16);
    case Q5_0: read_nibbles(b + 6, to.codes, 16); return add_fifth(b + 2, to.codes);
    case Q5_1: to.offset = two(b + 2), read_nibbles(b + 8, to.codes, 16); return add_fifth(b + 4, to.codes);
    case Q8_0:
      for (int i = 0; i < 32; ++i) to.codes[i] = b[2 + i] ^ 128;
      return;
    case IQ4_NL: return read_uneven(b + 2, to.codes);
    case IQ4_XS:
      for (int g = 0; g < 8; ++g) {
        to.levels[g] = int8_t(((b[4 + g / 2] >> 4 * (g % 2) & 15) | (two(b + 2) >> 2 * g & 3) << 4) - 32);
        read_uneven(b + 8 + 16 * g, to.codes + 32 * g);
      }
      return;
    case Q2_K:
      to.scale = two(b + 80), to.offset = two(b + 82);
      for (int g = 0; g < 16; ++g) to.levels[g] = b[g] & 15, to.offset_levels[g] = int8_t(b[g] >> 4);
      return read_crumbs(b + 16, to.codes);
    case Q3_K: {
      const uint8_t* s = b + 96;
      to.scale = two(b + 108);
      for (int g = 0; g < 16; ++g)
        to.levels[g] = int8_t(((g < 8 ? s[g] & 15 : s[g - 8] >> 4) | (s[8 + g % 4] >> g / 4 * 2 & 3) << 4) - 32);
      read_crumbs(b + 32, to.codes);
      for (int part = 0; part < 8; ++part)
        for (int i = 0; i < 32; ++i) to.codes[32 * part + i] |= (b[i] >> part & 1) << 2;
      return;
    }
    case Q4_K:
      to.offset = two(b + 2), read_six_bit_levels(b + 4, to);
      for (int pair = 0; pair < 4; ++pair) read_nibbles(b + 16 + 32 * pair, to.codes + 64 * pair, 32);
      return;
    case Q5_K:
      to.offset = two(b + 2), read_six_bit_levels(b + 4, to);
      for (int pair = 0; pair < 4; ++pair) read_nibbles(b + 48 + 32 * pair, to.codes + 64 * pair, 32);
      for (int g = 0; g < 8; ++g)
        for (int i = 0; i < 32; ++i) to.codes[32 * g + i] |= (b[16 + i] >> g & 1) << 4;
      return;
    case Q6_K:
      to.scale = two(b + 208);
      std::memcpy(to.levels, b + 192, 16);
      for (int half = 0; half < 2; ++half) {
        const uint8_t *low = b + 64 * half, *high = b + 128 + 32 * half;
        uint8_t* codes = to.codes + 128 * half;
        for (int i = 0; i < 32; ++i) {
          codes[i] = uint8_t((low[i] & 15) | (high[i] & 3) << 4), codes[32 + i] = uint8_t((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4);
          codes[64 + i] = uint8_t(low[i] >> 4 | (high[i] >> 4 & 3) << 4), codes[96 + i] = uint8_t(low[32 + i] >> 4 | high[i] >> 6 << 4);
        }
      }
  }
}

// The codes of a group of all outputs of a panel, those of output o from `codes` + o * sizeof(Block) on.
template <int BITS>
static void put_codes(const uint8_t* codes, int group, uint8_t* to) {
  for (int o = 0; o < PANEL; ++o, codes += sizeof(Block)) {
    auto put = [&](int place, uint32_t w) { std::memcpy(to + 4 * (place * PANEL + o), &w, 4); };
    uint32_t high = 0;
    for (int quad = 0; quad < group / 4; quad += BITS == 8 ? 1 : 2) {
      uint32_t first = word(codes + 4 * quad);
      if (BITS == 8) {
        put(quad, first);
        continue;
      }
      uint32_t second = word(codes + 4 * quad + 4);
      put(quad / 2, (first & 0x0f0f0f0fu) | (second & 0x0f0f0f0fu) << 4);
      high |= (first >> 4 & 0x03030303u) << quad * (BITS - 4) | (second >> 4 & 0x03030303u) << (quad + 1) * (BITS - 4);
    }
    if (BITS == 5 || BITS == 6) put(group / 8, high);
  }
}

// A block of all outputs of a panel.
static void put_block(const Matrix& m, const Block* blocks, uint8_t* to) {
  uint8_t *levels = to + m.scales_bytes(), *groups = to + m.before_codes();
  int num = m.groups_of_block();
  for (int o = 0; o < PANEL; ++o) {
    std::memcpy(to + 2 * o, &blocks[o].scale, 2);
    if (m.has_offset) std::memcpy(to + 2 * (PANEL + o), &blocks[o].offset, 2);
    for (int i = 0; i < num && m.has_levels; ++i) {
      uint8_t* of_group = levels + i * PANEL * (1 + m.has_offset) + o;
      of_group[0] = uint8_t(blocks[o].levels[i]);
      if (m.has_offset) of_group[PANEL] = uint8_t(blocks[o].offset_levels[i]);
    }
  }
  auto put = m.bits == 4 ? put_codes<4> : m.bits == 5 ? put_codes<5> : m.bits == 6 ? put_codes<6> : put_codes<8>;
  for (int i = 0; i < num; ++i) put(blocks[0].codes + i * m.group, m.group, groups + i * m.group_bytes());
}

// A row without codes, whose values lie `apart`, into the panel at `to`.
template <class Value>
static void put_plain(const Matrix& m, const uint8_t* row, size_t apart, uint8_t* to) {
  for (int i = 0; i < m.in; ++i) std::memcpy(to + i * m.step(), row + i * apart, sizeof(Value));
}

// Rows [out, in] of a kind, `stride` bytes apart, as panels in the arena, by several threads. float32 that bfloat16 has too is kept in
// that form, which is half as much to read and gives the same bits in every sum. False where there is no memory, or the kind or the
// width cannot be.
static bool pack(Matrix& m, Arena& arena, int kind, const uint8_t* rows, int out, int in, size_t stride, int threads) {
  const Stored* stored = stored_as(kind, in);
  if (!stored) return false;
  static_cast<Layout&>(m) = stored->layout, m.out = out, m.in = in;
  if (kind == F32) {
    uint16_t low = 0;
    for (int o = 0; o < out && !low; ++o)
      for (int i = 0; i < in; ++i) low |= two(rows + o * stride + 4 * size_t(i));
    if (!low) m.form = Form::HALF;
  }
  uint8_t* panels = arena.take(m.bytes());
  if (!panels) return false;
  m.panels = panels;
  size_t size = m.step() / PANEL;
  auto put = size == 4 ? put_plain<uint32_t> : put_plain<uint16_t>;
  together(threads, [&](int t, int threads, Barrier&) {
    Share share(m.num_panels(), t, threads);
    Block blocks[PANEL] = {};  // zeros where a panel has more places than there are outputs
    for (int p = share.begin; p < share.end; ++p) {
      uint8_t* panel = panels + p * m.panel_bytes();
      const uint8_t* first = rows + size_t(p) * PANEL * stride;
      int num = std::min(PANEL, out - p * PANEL);
      for (int o = 0; o < num && !m.is_coded(); ++o)  // of a float32 that becomes bfloat16 the last bytes
        put(m, first + o * stride + stored->bytes - size, stored->bytes, panel + size * m.lane(o));
      for (int b = 0; b < m.num_blocks(); ++b) {
        for (int o = 0; o < num; ++o) read_block(kind, first + o * stride + b * stored->bytes, blocks[o]);
        put_block(m, blocks, panel + b * m.block_bytes());
      }
    }
  });
  return true;
}

// The same rows as float32 [out, in], by the formula of their kind and not by way of panels; false for kinds without codes.
extern "C" bool native_unpack(int kind, const uint8_t* rows, int out, int in, int64_t stride, float* to, int threads) {
  const Stored* stored = stored_as(kind, in);
  if (!stored || stored->layout.form != Form::CODES) return false;
  const Layout& layout = stored->layout;
  together(threads, [&](int t, int threads, Barrier&) {
    Share share(out, t, threads);
    Block block;
    for (int o = share.begin; o < share.end; ++o)
      for (int b = 0; b < in / stored->block; ++b) {
        read_block(kind, rows + o * stride + b * stored->bytes, block);
        float* values = to + size_t(o) * in + b * stored->block;
        for (int first = 0, g = 0; first < stored->block; first += layout.group, ++g) {
          float scale = from_half(block.scale), offset = from_half(block.offset);
          if (layout.has_levels) scale *= float(block.levels[g]);
          if (layout.has_levels && layout.has_offset) offset *= -float(block.offset_levels[g]);
          for (int i = first; i < first + layout.group; ++i) values[i] = scale * float(block.codes[i] - layout.zero) + offset;
        }
      }
  });
  return true;
}
