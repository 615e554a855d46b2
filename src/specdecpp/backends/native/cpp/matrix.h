// A matrix [out, in] in panels: the weights of PANEL outputs lie together, input by input, as densely as in their file.
//
//   WHOLE  float32     HALF  bfloat16, two outputs in a word     FLOAT16  float16     CODES  whole numbers of 4, 5, 6 or 8 bits
//
// A weight of a group of inputs is scale * (code - zero) + offset. The scale of a group is a float16 (and so is its offset), or a
// small whole number, its level, times a float16 for every SUPER inputs, as in the file: nothing is rounded.
//
// A panel of codes is a row of blocks: one for each group, or with levels one for every SUPER inputs. A block holds scales [PANEL] and
// offsets [PANEL] in float16, the levels [PANEL] of each of its groups and of their offsets, and then the codes of each group. These
// are split into planes: words with the lower four bits of eight inputs of one output each (all eight bits of four inputs where codes
// have eight), and a last word with the higher bits of all inputs of the group, first for LANES outputs and then for the next LANES.

#pragma once

#include <algorithm>
#include <tuple>

#include "memory.h"

enum class Form { WHOLE, HALF, FLOAT16, CODES };
constexpr int SUPER = 256, MOST_GROUP = 32;

struct Matrix {
  int in = 0, out = 0;
  Form form = Form::WHOLE;
  int group = 0, bits = 0, zero = 0;   // inputs of a group; bits of a code, and what is taken off it
  bool has_levels = false, has_offset = false;
  const uint8_t* panels = nullptr;     // the memory is the model's
  const float* bias = nullptr;         // [panels * PANEL] or null

  int num_panels() const { return (out + PANEL - 1) / PANEL; }
  bool is_coded() const { return form == Form::CODES; }
  int num_groups() const { return is_coded() ? in / group : 0; }
  int groups_of_block() const { return has_levels ? SUPER / group : 1; }
  size_t step() const { return form == Form::WHOLE ? PANEL * 4 : PANEL * 2; }  // bytes of one input of a panel without codes
  size_t group_bytes() const { return size_t(PANEL) * group * bits / 8; }
  size_t scales_bytes() const { return PANEL * 2 * (1 + has_offset); }
  size_t before_codes() const { return scales_bytes() + (has_levels ? groups_of_block() * PANEL * (1 + has_offset) : 0); }
  size_t block_bytes() const { return before_codes() + groups_of_block() * group_bytes(); }
  size_t panel_bytes() const { return is_coded() ? in / (group * groups_of_block()) * block_bytes() : step() * in; }
  size_t bytes() const { return num_panels() * panel_bytes(); }
  const uint8_t* panel(int number) const { return panels + number * panel_bytes(); }
  // Whether products with another matrix of this width read the same `Inputs`.
  bool reads_like(const Matrix& o) const { return group == o.group && zero == o.zero; }
  // Whether the products with another matrix have the same bits.
  bool is_like(const Matrix& o) const {
    auto shape = [](const Matrix& m) { return std::make_tuple(m.in, m.out, m.form, m.group, m.bits, m.zero, m.has_levels, m.has_offset, !m.bias); };
    return shape(*this) == shape(o) && (!out || !std::memcmp(panels, o.panels, bytes())) &&
           (!bias || !std::memcmp(bias, o.bias, num_panels() * PANEL * sizeof(float)));
  }
};

// Where the codes of group g of a panel begin, and the levels of output o in it: that of the scale, then that of the offset.
static inline size_t codes_at(const Matrix& m, int g) {
  int num = m.groups_of_block();
  return g / num * m.block_bytes() + m.before_codes() + g % num * m.group_bytes();
}
static inline size_t levels_at(const Matrix& m, int g, int o) {
  int num = m.groups_of_block();
  return g / num * m.block_bytes() + m.scales_bytes() + g % num * PANEL * (1 + m.has_offset) + o;
}
// Where the word lies that holds the codes of inputs 4 i to 4 i + 3 of output o, and its first bit in each byte.
static inline size_t word_at(const Matrix& m, int i, int o) {
  int word = m.bits == 8 ? i : i / 2;
  return 4 * (size_t(word * 2 + o / LANES) * LANES + o % LANES);
}
static inline int word_bit(const Matrix& m, int i) { return m.bits == 8 ? 0 : i % 2 * 4; }
// The same of the word with the higher bits.
static inline size_t high_word_at(const Matrix& m, int o) { return 4 * (size_t(m.group / 8 * 2 + o / LANES) * LANES + o % LANES); }

static inline float half_at(const uint8_t* p, int i) {
  uint16_t half;
  std::memcpy(&half, p + 2 * i, 2);
  return from_half(half);
}
static inline uint32_t word(const uint8_t* p) {
  uint32_t w;
  std::memcpy(&w, p, 4);
  return w;
}

// Scale and offset of group g of output o of a panel.
static void scale_of(const Matrix& m, const uint8_t* panel, int g, int o, float& scale, float& offset) {
  const uint8_t *block = panel + g / m.groups_of_block() * m.block_bytes(), *levels = panel + levels_at(m, g, o);
  scale = half_at(block, o), offset = m.has_offset ? half_at(block + PANEL * 2, o) : 0;
  if (!m.has_levels) return;
  scale *= float(int8_t(levels[0]));
  if (m.has_offset) offset *= -float(int8_t(levels[PANEL]));
}

// Output o of a matrix, as it lies, becomes output `place` of another in the same form, whose panels are given.
static void copy_output(const Matrix& m, int o, uint8_t* panels, int place) {
  const uint8_t* from = m.panel(o / PANEL);
  uint8_t* to = panels + place / PANEL * m.panel_bytes();
  o %= PANEL, place %= PANEL;
  auto copy = [&](size_t of, size_t at, size_t size) { std::memcpy(to + at, from + of, size); };
  auto lane = [&](int o) { return m.form == Form::HALF ? 4 * (o % LANES) + 2 * (o / LANES) : o * int(m.step()) / PANEL; };
  for (int i = 0; i < m.in && !m.is_coded(); ++i) copy(i * m.step() + lane(o), i * m.step() + lane(place), m.step() / PANEL);
  for (int g = 0; g < m.num_groups(); ++g) {
    size_t block = g / m.groups_of_block() * m.block_bytes(), codes = codes_at(m, g);
    for (int i = 0; i <= m.has_offset && g % m.groups_of_block() == 0; ++i)
      copy(block + 2 * (i * PANEL + o), block + 2 * (i * PANEL + place), 2);
    for (int i = 0; i <= m.has_offset && m.has_levels; ++i) copy(levels_at(m, g, o) + i * PANEL, levels_at(m, g, place) + i * PANEL, 1);
    for (int i = 0; i < m.group / 4; i += m.bits == 8 ? 1 : 2) copy(codes + word_at(m, i, o), codes + word_at(m, i, place), 4);
    if (m.bits == 5 || m.bits == 6) copy(codes + high_word_at(m, o), codes + high_word_at(m, place), 4);
  }
}

// The weights of output o, [in]: what a lookup of an embedding reads.
static void row_of(const Matrix& m, int o, float* to) {
  const uint8_t* panel = m.panel(o / PANEL);
  int lane = o % PANEL;
  for (int i = 0; i < m.in && !m.is_coded(); ++i) {
    const uint8_t* at = panel + i * m.step();
    if (m.form == Form::WHOLE) std::memcpy(to + i, at + 4 * lane, 4);
    if (m.form == Form::FLOAT16) to[i] = half_at(at, lane);
    if (m.form == Form::HALF) {
      uint16_t half;
      std::memcpy(&half, at + 4 * (lane % LANES) + 2 * (lane / LANES), 2);
      to[i] = float_of(uint32_t(half) << 16);
    }
  }
  for (int g = 0; g < m.num_groups(); ++g) {
    const uint8_t* codes = panel + codes_at(m, g);
    float scale, offset;
    scale_of(m, panel, g, lane, scale, offset);
    uint32_t high = m.bits == 5 || m.bits == 6 ? word(codes + high_word_at(m, lane)) : 0;
    for (int i = 0; i < m.group; ++i) {
      uint32_t code = word(codes + word_at(m, i / 4, lane)) >> (word_bit(m, i / 4) + i % 4 * 8) & (m.bits == 8 ? 255 : 15);
      if (m.bits == 5 || m.bits == 6) code |= (high >> (i % 4 * 8 + i / 4 * (m.bits - 4)) & ((1 << (m.bits - 4)) - 1)) << 4;
      to[g * m.group + i] = scale * float(int(code) - m.zero) + offset;
    }
  }
}
