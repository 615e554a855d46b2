// A matrix [out, in] in panels: the weights of PANEL outputs lie together, input by input, in the form they have in their file.
//
//   WHOLE    float32                     HALF   bfloat16, two outputs in a word     FLOAT16  float16
//   NIBBLES  codes of 4 bits in groups   BYTES  codes of 8 bits in groups
//
// A weight of a group is scale * (code - zero) + offset. The scales of a group are float16 (and so its offsets), or small whole
// numbers times a float16 for every SUPER inputs, as in the file: nothing is rounded. A group lies in a panel as its scales, its
// offsets, and its codes in octets: eight inputs of LANES outputs, and of the next LANES.

#pragma once

#include <algorithm>
#include <tuple>

#include "memory.h"

enum class Form { WHOLE, HALF, FLOAT16, NIBBLES, BYTES };
constexpr int SUPER = 256;

struct Matrix {
  int in = 0, out = 0;
  Form form = Form::WHOLE;
  int group = 0, zero = 0;             // inputs of a group; what is taken off a code
  bool has_levels = false, has_offset = false;
  const uint8_t* panels = nullptr;     // the memory is the model's
  const float* bias = nullptr;         // [panels * PANEL] or null

  int num_panels() const { return (out + PANEL - 1) / PANEL; }
  bool is_coded() const { return form == Form::NIBBLES || form == Form::BYTES; }
  int num_groups() const { return is_coded() ? in / group : 0; }
  // Bytes of one input of a panel, of eight of them, of what stands before a group's codes, and before a super-group.
  size_t step() const { return form == Form::WHOLE ? PANEL * 4 : PANEL * 2; }
  size_t octet() const { return form == Form::NIBBLES ? PANEL * 4 : PANEL * 8; }
  size_t before_group() const { return PANEL * (has_levels ? 1 : 2) * (1 + has_offset); }
  size_t before_super() const { return has_levels ? PANEL * 2 * (1 + has_offset) : 0; }
  size_t group_bytes() const { return before_group() + group / 8 * octet(); }
  size_t panel_bytes() const {
    if (!is_coded()) return step() * in;
    return num_groups() * group_bytes() + (has_levels ? in / SUPER * before_super() : 0);
  }
  size_t bytes() const { return num_panels() * panel_bytes(); }
  const uint8_t* panel(int number) const { return panels + number * panel_bytes(); }
  // Whether what it gives is the same, to the bit.
  bool is_like(const Matrix& o) const {
    auto shape = [](const Matrix& m) { return std::make_tuple(m.in, m.out, m.form, m.group, m.zero, m.has_levels, m.has_offset, !m.bias); };
    return shape(*this) == shape(o) && (!out || !std::memcmp(panels, o.panels, bytes())) &&
           (!bias || !std::memcmp(bias, o.bias, num_panels() * PANEL * sizeof(float)));
  }
  // Where a group of a panel begins, and its super-group.
  size_t group_at(int g) const { return g * group_bytes() + (has_levels ? (g * group / SUPER + 1) * before_super() : 0); }
  size_t super_at(int g) const { return g * group / SUPER * (before_super() + SUPER / group * group_bytes()); }
};

// Where the code of input i (of eight) of output o (of a panel) lies in an octet: its byte, and its bit there.
static inline size_t code_byte(Form form, int i, int o) {
  int lane = o % LANES, half = o / LANES, word = form == Form::NIBBLES ? half : i / 4 * 2 + half;
  return size_t(word * LANES + lane) * 4 + i % 4;
}
static inline int code_bit(Form form, int i) { return form == Form::NIBBLES && i >= 4 ? 4 : 0; }

static inline float half_at(const uint8_t* p, int i) {
  uint16_t half;
  std::memcpy(&half, p + 2 * i, 2);
  return from_half(half);
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
    const uint8_t *group = panel + m.group_at(g), *super = panel + m.super_at(g), *codes = group + m.before_group();
    float scale, offset = 0;
    if (m.has_levels) {
      scale = float(int8_t(group[lane])) * half_at(super, lane);
      if (m.has_offset) offset = -float(int8_t(group[PANEL + lane])) * half_at(super + 2 * PANEL, lane);
    } else {
      scale = half_at(group, lane);
      if (m.has_offset) offset = half_at(group + 2 * PANEL, lane);
    }
    for (int i = 0; i < m.group; ++i) {
      uint8_t byte = codes[i / 8 * m.octet() + code_byte(m.form, i % 8, lane)];
      int code = m.form == Form::BYTES ? int8_t(byte) : byte >> code_bit(m.form, i % 8) & 15;
      to[g * m.group + i] = scale * float(code - m.zero) + offset;
    }
  }
}
