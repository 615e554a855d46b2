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

struct Layout {
  int kind, block, bytes;  // weights of a block, and its bytes
  Form form;
  int group, bits, zero;
  bool has_levels, has_offset;
};

static const Layout LAYOUTS[] = {
    {F32, 1, 4, Form::WHOLE, 0, 0, 0, false, false},       {F16, 1, 2, Form::FLOAT16, 0, 0, 0, false, false},
    {BF16, 1, 2, Form::HALF, 0, 0, 0, false, false},       {Q4_0, 32, 18, Form::CODES, 32, 4, 8, false, false},
    {Q4_1, 32, 20, Form::CODES, 32, 4, 0, false, true},    {Q5_0, 32, 22, Form::CODES, 32, 5, 16, false, false},
    {Q5_1, 32, 24, Form::CODES, 32, 5, 0, false, true},    {Q8_0, 32, 34, Form::CODES, 32, 8, 128, false, false},
    {Q2_K, 256, 84, Form::CODES, 16, 4, 0, true, true},    {Q3_K, 256, 110, Form::CODES, 16, 4, 4, true, false},
    {Q4_K, 256, 144, Form::CODES, 32, 4, 0, true, true},   {Q5_K, 256, 176, Form::CODES, 32, 5, 0, true, true},
    {Q6_K, 256, 210, Form::CODES, 16, 6, 32, true, false}, {IQ4_NL, 32, 18, Form::CODES, 32, 8, 128, false, false},
    {IQ4_XS, 256, 136, Form::CODES, 32, 8, 128, true, false},
};

// Null for a kind that is not known here.
static const Layout* layout_of(int kind) {
  for (const Layout& layout : LAYOUTS)
    if (layout.kind == kind) return &layout;
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
  auto four = [&](int o, int quad) { return word(codes + o * sizeof(Block) + 4 * quad); };
  auto put = [](uint8_t* at, uint32_t w) { std::memcpy(at, &w, 4); };
  for (int half = 0; half < 2; ++half, codes += LANES * sizeof(Block)) {
    uint32_t high[LANES] = {};
    for (int quad = 0; quad < group / 4; quad += BITS == 8 ? 1 : 2) {
      uint8_t* at = to + 4 * LANES * ((BITS == 8 ? 2 * quad : quad) + half);
      for (int o = 0; o < LANES; ++o, at += 4) {
        if (BITS == 8) {
          put(at, four(o, quad));
          continue;
        }
        uint32_t first = four(o, quad), second = four(o, quad + 1);
        put(at, (first & 0x0f0f0f0fu) | (second & 0x0f0f0f0fu) << 4);
        high[o] |= (first >> 4 & 0x03030303u) << quad * (BITS - 4) | (second >> 4 & 0x03030303u) << (quad + 1) * (BITS - 4);
      }
    }
    for (int o = 0; o < LANES && BITS != 4 && BITS != 8; ++o) put(to + 4 * (LANES * (group / 4 + half) + o), high[o]);
  }
}

// Block b of a panel, of all its outputs.
static void put_blocks(const Matrix& m, uint8_t* panel, int b, const Block* blocks) {
  uint8_t* block = panel + b * m.block_bytes();
  for (int o = 0; o < PANEL; ++o) {
    std::memcpy(block + 2 * o, &blocks[o].scale, 2);
    if (m.has_offset) std::memcpy(block + 2 * (PANEL + o), &blocks[o].offset, 2);
  }
  for (int i = 0; i < m.groups_of_block(); ++i) {
    int g = b * m.groups_of_block() + i;
    uint8_t *levels = panel + levels_at(m, g, 0), *to = panel + codes_at(m, g);
    for (int o = 0; o < PANEL && m.has_levels; ++o) {
      levels[o] = uint8_t(blocks[o].levels[i]);
      if (m.has_offset) levels[PANEL + o] = uint8_t(blocks[o].offset_levels[i]);
    }
    const uint8_t* codes = blocks[0].codes + i * m.group;
    (m.bits == 4 ? put_codes<4> : m.bits == 5 ? put_codes<5> : m.bits == 6 ? put_codes<6> : put_codes<8>)(codes, m.group, to);
  }
}

// Every `num`th value of a panel, from `first` on, is that of the next input; those of the row lie `skip` apart.
template <class Value>
static void scatter(const uint8_t* row, int in, int skip, uint8_t* panel, int first, int num) {
  for (int i = 0; i < in; ++i) std::memcpy(panel + sizeof(Value) * (first + size_t(i) * num), row + sizeof(Value) * i * skip, sizeof(Value));
}

static void put_plain(const Matrix& m, uint8_t* panel, int o, const uint8_t* row, bool is_wide) {
  if (m.form == Form::WHOLE) return scatter<uint32_t>(row, m.in, 1, panel, o, PANEL);
  if (m.form == Form::FLOAT16) return scatter<uint16_t>(row, m.in, 1, panel, o, PANEL);
  scatter<uint16_t>(row + 2 * is_wide, m.in, 1 + is_wide, panel, o % LANES * 2 + o / LANES, PANEL);
}

// What a matrix [out, in] of a kind is like. False where the kind or the width cannot be.
static bool shaped(Matrix& m, int kind, int out, int in) {
  const Layout* layout = layout_of(kind);
  if (!layout || in % layout->block) return false;
  m.out = out, m.in = in, m.form = layout->form, m.group = layout->group, m.bits = layout->bits, m.zero = layout->zero;
  m.has_levels = layout->has_levels, m.has_offset = layout->has_offset;
  return true;
}

// Rows [out, in] of a kind, `stride` bytes apart, as panels in the arena, by several threads. float32 that bfloat16 has too is kept in
// that form, which is half as much to read and gives the same bits in every sum. False where there is no memory, or the kind or the
// width cannot be.
static bool pack(Matrix& m, Arena& arena, int kind, const uint8_t* rows, int out, int in, size_t stride, int threads) {
  if (!shaped(m, kind, out, in)) return false;
  const Layout* layout = layout_of(kind);
  if (kind == F32) {
    uint16_t low = 0;
    for (int o = 0; o < out && !low; ++o)
      for (int i = 0; i < in; ++i) low |= two(rows + o * stride + 4 * size_t(i));
    if (!low) m.form = Form::HALF;
  }
  uint8_t* panels = arena.take(m.bytes());
  if (!panels) return false;
  m.panels = panels;
  together(threads, [&](int t, int threads, Barrier&) {
    Share share(m.num_panels(), t, threads);
    Block blocks[PANEL] = {};  // zeros where a panel has more places than there are outputs
    int num_blocks = m.is_coded() ? in / layout->block : 0;
    for (int p = share.begin; p < share.end; ++p) {
      uint8_t* panel = panels + p * m.panel_bytes();
      const uint8_t* first = rows + size_t(p) * PANEL * stride;
      int num = std::min(PANEL, out - p * PANEL);
      for (int o = 0; o < num && !m.is_coded(); ++o) put_plain(m, panel, o, first + o * stride, kind == F32);
      for (int b = 0; b < num_blocks; ++b) {
        for (int o = 0; o < num; ++o) read_block(kind, first + o * stride + b * layout->bytes, blocks[o]);
        put_blocks(m, panel, b, blocks);
      }
    }
  });
  return true;
}

// The same rows as float32 [out, in], by the formula of their kind and not by way of panels.
static bool unpack(int kind, const uint8_t* rows, int out, int in, size_t stride, float* to, int threads) {
  const Layout* layout = layout_of(kind);
  if (!layout || layout->form != Form::CODES || in % layout->block) return false;
  together(threads, [&](int t, int threads, Barrier&) {
    Share share(out, t, threads);
    Block block;
    for (int o = share.begin; o < share.end; ++o)
      for (int b = 0; b < in / layout->block; ++b) {
        read_block(kind, rows + o * stride + b * layout->bytes, block);
        for (int g = 0; g < layout->block / layout->group; ++g) {
          float scale = from_half(block.scale), offset = from_half(block.offset);
          if (layout->has_levels) scale *= float(block.levels[g]);
          if (layout->has_levels && layout->has_offset) offset *= -float(block.offset_levels[g]);
          const uint8_t* codes = block.codes + g * layout->group;
          float* at = to + size_t(o) * in + b * layout->block + g * layout->group;
          for (int i = 0; i < layout->group; ++i) at[i] = scale * float(codes[i] - layout->zero) + offset;
        }
      }
  });
  return true;
}
