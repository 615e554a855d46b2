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

struct Layout {
  Form form = Form::WHOLE;
  int group = 0, bits = 0, zero = 0;  // inputs of a group; bits of a code, and what is taken off it
  bool has_levels = false, has_offset = false;
};

struct Matrix : Layout {
  int in = 0, out = 0;
  const uint8_t* panels = nullptr;  // the memory is the model's
  const float* bias = nullptr;      // [panels * PANEL] or null

  int num_panels() const { return (out + PANEL - 1) / PANEL; }
  bool is_coded() const { return form == Form::CODES; }
  int num_groups() const { return is_coded() ? in / group : 0; }
  int groups_of_block() const { return has_levels ? SUPER / group : 1; }
  size_t step() const { return form == Form::WHOLE ? PANEL * 4 : PANEL * 2; }  // bytes of one input of a panel without codes
  size_t group_bytes() const { return size_t(PANEL) * group * bits / 8; }
  size_t scales_bytes() const { return PANEL * 2 * (1 + has_offset); }
  size_t before_codes() const { return scales_bytes() + (has_levels ? groups_of_block() * PANEL * (1 + has_offset) : 0); }
  size_t block_bytes() const { return before_codes() + groups_of_block() * group_bytes(); }
  int num_blocks() const { return num_groups() / groups_of_block(); }
  size_t panel_bytes() const { return is_coded() ? num_blocks() * block_bytes() : step() * in; }
  size_t bytes() const { return num_panels() * panel_bytes(); }
  const uint8_t* panel(int number) const { return panels + number * panel_bytes(); }
  // The place of output o of a panel among the values of an input.
  int lane(int o) const { return form == Form::HALF ? o % LANES * 2 + o / LANES : o; }
  // Whether products with another matrix of this width read the same `Inputs`.
  bool reads_like(const Matrix& o) const { return group == o.group && zero == o.zero; }
  // Whether the products with another matrix have the same bits.
  bool is_like(const Matrix& o) const {
    auto shape = [](const Matrix& m) { return std::make_tuple(m.in, m.out, m.form, m.group, m.bits, m.zero, m.has_levels, m.has_offset, !m.bias); };
    return shape(*this) == shape(o) && (!out || !std::memcmp(panels, o.panels, bytes())) &&
           (!bias || !std::memcmp(bias, o.bias, num_panels() * PANEL * sizeof(float)));
  }
};

static inline uint32_t word(const uint8_t* p) {
  uint32_t w;
  std::memcpy(&w, p, 4);
  return w;
}

// Output o of a matrix, as it lies, becomes output `place` of another in the same form, whose panels are given.
static void copy_output(const Matrix& m, int o, uint8_t* panels, int place) {
  const uint8_t* from = m.panel(o / PANEL);
  uint8_t* to = panels + place / PANEL * m.panel_bytes();
  o = m.lane(o % PANEL), place = m.lane(place % PANEL);
  // So many values of each output, which lie side by side.
  auto copy = [&](size_t num, size_t size) {
    for (; num; --num, from += PANEL * size, to += PANEL * size) std::memcpy(to + place * size, from + o * size, size);
  };
  if (!m.is_coded()) return copy(m.in, m.step() / PANEL);
  for (int b = 0; b < m.num_blocks(); ++b) {
    copy(1 + m.has_offset, 2);
    copy(m.has_levels ? m.groups_of_block() * (1 + m.has_offset) : 0, 1);
    copy(m.groups_of_block() * m.group_bytes() / (PANEL * 4), 4);
  }
}
