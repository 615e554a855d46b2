// Rows of weights as files have them, put into panels.
//
// The kinds are GGML's, by its numbers: blocks of 32 weights with a float16 scale (and an offset), or of 256 with scales of 6 bits
// for groups of 16 or 32. Source: the layouts of ggml-common.h.

#pragma once

#include "matrix.h"

enum Kind {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
  IQ4_NL = 20, IQ4_XS = 23, BF16 = 30
};

struct Layout {
  int kind, block, bytes;  // weights of a block, and its bytes
  Form form;
  int group, zero;
  bool has_levels, has_offset;
};

static const Layout LAYOUTS[] = {
    {F32, 1, 4, Form::WHOLE, 0, 0, false, false},      {F16, 1, 2, Form::FLOAT16, 0, 0, false, false},
    {BF16, 1, 2, Form::HALF, 0, 0, false, false},      {Q4_0, 32, 18, Form::NIBBLES, 32, 8, false, false},
    {Q4_1, 32, 20, Form::NIBBLES, 32, 0, false, true}, {Q5_0, 32, 22, Form::BYTES, 32, 0, false, false},
    {Q5_1, 32, 24, Form::BYTES, 32, 0, false, true},   {Q8_0, 32, 34, Form::BYTES, 32, 0, false, false},
    {Q2_K, 256, 84, Form::NIBBLES, 16, 0, true, true}, {Q3_K, 256, 110, Form::NIBBLES, 16, 4, true, false},
    {Q4_K, 256, 144, Form::NIBBLES, 32, 0, true, true}, {Q5_K, 256, 176, Form::BYTES, 32, 0, true, true},
    {Q6_K, 256, 210, Form::BYTES, 16, 0, true, false}, {IQ4_NL, 32, 18, Form::BYTES, 32, 0, false, false},
    {IQ4_XS, 256, 136, Form::BYTES, 32, 0, true, false},
};

// Null for a kind that is not known here.
static const Layout* layout_of(int kind) {
  for (const Layout& layout : LAYOUTS)
    if (layout.kind == kind) return &layout;
  return nullptr;
}

// A group of one output: its codes, and its scale and offset as float16 bits, or as levels and the float16 bits of the super-group's.
struct Group {
  int8_t codes[32];
  uint16_t scale, offset;
  int8_t level, offset_level;
};

static inline uint16_t two(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

// Group g of a row.
static void read_group(const Layout& layout, const uint8_t* row, int g, Group& to) {
  static const int8_t UNEVEN[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  int groups = layout.block / layout.group, sub = g % groups;
  const uint8_t* b = row + size_t(g / groups) * layout.bytes;
  auto put = [&](int num, auto code) {
    for (int i = 0; i < num; ++i) to.codes[i] = int8_t(code(i));
  };
  auto nibble = [&](const uint8_t* codes, int i) { return i < 16 ? codes[i] & 15 : codes[i - 16] >> 4; };
  to.scale = two(b), to.offset = 0, to.level = to.offset_level = 0;
  switch (layout.kind) {
    case Q4_0: return put(32, [&](int i) { return nibble(b + 2, i); });
    case Q4_1: to.offset = two(b + 2); return put(32, [&](int i) { return nibble(b + 4, i); });
    case Q5_0: return put(32, [&](int i) { return (nibble(b + 6, i) | (b[2 + i / 8] >> i % 8 & 1) << 4) - 16; });
    case Q5_1: to.offset = two(b + 2); return put(32, [&](int i) { return nibble(b + 8, i) | (b[4 + i / 8] >> i % 8 & 1) << 4; });
    case Q8_0: return put(32, [&](int i) { return b[2 + i]; });
    case IQ4_NL: return put(32, [&](int i) { return UNEVEN[nibble(b + 2, i)]; });
    case IQ4_XS:
      to.level = int8_t(((b[4 + sub / 2] >> 4 * (sub % 2) & 15) | (two(b + 2) >> 2 * sub & 3) << 4) - 32);
      return put(32, [&](int i) { return UNEVEN[nibble(b + 8 + 16 * sub, i)]; });
    case Q2_K:
      to.scale = two(b + 80), to.offset = two(b + 82), to.level = b[sub] & 15, to.offset_level = int8_t(b[sub] >> 4);
      return put(16, [&](int i) { return b[16 + sub / 8 * 32 + sub % 2 * 16 + i] >> sub % 8 / 2 * 2 & 3; });
    case Q3_K: {
      const uint8_t* s = b + 96;
      to.scale = two(b + 108);
      to.level = int8_t(((sub < 8 ? s[sub] & 15 : s[sub - 8] >> 4) | (s[8 + sub % 4] >> sub / 4 * 2 & 3) << 4) - 32);
      return put(16, [&](int i) {
        int place = sub % 2 * 16 + i;
        return (b[32 + sub / 8 * 32 + place] >> sub % 8 / 2 * 2 & 3) | (b[place] >> sub / 2 & 1) << 2;
      });
    }
    case Q4_K:
    case Q5_K: {
      const uint8_t* s = b + 4;
      to.offset = two(b + 2);
      to.level = int8_t(sub < 4 ? s[sub] & 63 : (s[sub + 4] & 15) | s[sub - 4] >> 6 << 4);
      to.offset_level = int8_t(sub < 4 ? s[sub + 4] & 63 : s[sub + 4] >> 4 | s[sub] >> 6 << 4);
      const uint8_t* codes = b + (layout.kind == Q4_K ? 16 : 48) + sub / 2 * 32;
      return put(32, [&](int i) {
        int high = layout.kind == Q4_K ? 0 : (b[16 + i] >> sub & 1) << 4;
        return (codes[i] >> sub % 2 * 4 & 15) | high;
      });
    }
    case Q6_K:
      to.scale = two(b + 208), to.level = int8_t(b[192 + sub]);
      return put(16, [&](int i) {
        int place = sub % 2 * 16 + i, part = sub % 8 / 2;  // a quarter of 128 weights
        int low = b[sub / 8 * 64 + part % 2 * 32 + place] >> part / 2 * 4 & 15;
        return (low | (b[128 + sub / 8 * 32 + place] >> part * 2 & 3) << 4) - 32;
      });
  }
}

static void put_group(const Matrix& m, uint8_t* panel, int o, int g, const Group& from) {
  uint8_t *group = panel + m.group_at(g), *super = panel + m.super_at(g), *codes = group + m.before_group();
  if (m.has_levels) {
    group[o] = uint8_t(from.level);
    std::memcpy(super + 2 * o, &from.scale, 2);
    if (m.has_offset) group[PANEL + o] = uint8_t(from.offset_level), std::memcpy(super + 2 * (PANEL + o), &from.offset, 2);
  } else {
    std::memcpy(group + 2 * o, &from.scale, 2);
    if (m.has_offset) std::memcpy(group + 2 * (PANEL + o), &from.offset, 2);
  }
  int words = m.form == Form::NIBBLES ? 1 : 2;  // of an octet
  for (int i = 0; i < m.group; i += 8)
    for (int part = 0; part < words; ++part) {
      uint32_t word = 0;
      for (int j = 0; j < 8 / words; ++j)
        word |= uint32_t(from.codes[i + 4 * part + j] & (words == 1 ? 15 : 255)) << (8 * (j % 4) + code_bit(m.form, j));
      std::memcpy(codes + i / 8 * m.octet() + code_byte(m.form, 4 * part, o), &word, 4);
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

// Rows [out, in] of a kind, `stride` bytes apart, as panels in the arena. float32 that bfloat16 has too is kept in that form, which is
// half as much to read and gives the same bits in every sum. False where there is no memory, or the kind or the width cannot be.
static bool pack(Matrix& m, Arena& arena, int kind, const uint8_t* rows, int out, int in, size_t stride) {
  const Layout* layout = layout_of(kind);
  if (!layout || in % layout->block) return false;
  m.out = out, m.in = in, m.form = layout->form, m.group = layout->group, m.zero = layout->zero;
  m.has_levels = layout->has_levels, m.has_offset = layout->has_offset;
  if (kind == F32) {
    uint16_t low = 0;
    for (int o = 0; o < out && !low; ++o)
      for (int i = 0; i < in; ++i) low |= two(rows + o * stride + 4 * size_t(i));
    if (!low) m.form = Form::HALF;
  }
  uint8_t* panels = arena.take(m.bytes());
  if (!panels) return false;
  m.panels = panels;
  Group group;
  for (int o = 0; o < out; ++o) {
    const uint8_t* row = rows + o * stride;
    uint8_t* panel = panels + o / PANEL * m.panel_bytes();
    if (!m.is_coded()) put_plain(m, panel, o % PANEL, row, kind == F32);
    for (int g = 0; g < m.num_groups(); ++g) read_group(*layout, row, g, group), put_group(m, panel, o % PANEL, g, group);
  }
  return true;
}
