// A model and its sequences.

#pragma once

#include "memory.h"
#include "packing.h"
#include "products.h"

// The sizes of a model, from `weights.py`: n rows, w width, h heads of s values, g of them share keys and values, f width of the
// feed-forward, v rows of the output layer. Of the s values of a head the first `rotary` are turned. What is multiplied with codes is
// rounded to so many bytes; 0: it is not.
struct Shape {
  int32_t layers, width, heads, kv_heads, size, rotary, hidden, vocab, is_gelu, rounds_to;
  float eps, query_scale, embedding_scale;
};

constexpr int TABLES = 4;  // of angles

enum Role { QUERY, KEY, VALUE, MIX, GATE, UP, DOWN, EMBEDDING, OUTPUT, NUM_MATRICES };
enum Norm { INPUT, MLP, Q_NORM, K_NORM, AFTER_ATTENTION, AFTER_MLP, FINAL, NUM_NORMS };

struct Layer {
  Matrix matrices[NUM_MATRICES];
  const float* norms[NUM_NORMS] = {};  // null where the family has none
  int window = 0;                      // how many positions a query sees, itself among them; 0: all
  int angles = 0;                      // which of the model's tables

  bool is_like(const Layer& o, const Shape& s) const {
    bool same = window == o.window && angles == o.angles;
    for (int i = 0; i < NUM_MATRICES; ++i) same = same && matrices[i].is_like(o.matrices[i]);
    for (int i = 0; i < NUM_NORMS; ++i) {
      size_t size = i == Q_NORM || i == K_NORM ? s.size : s.width;
      same = same && !norms[i] == !o.norms[i] && (!norms[i] || !std::memcmp(norms[i], o.norms[i], size * sizeof(float)));
    }
    return same;
  }
};

// An output layer: rows for the tokens `ids`, in rising order; null: for all.
struct Output {
  const Matrix* rows;
  const int32_t* ids;
  int num() const { return rows->out; }
};
// Values [num] of the tokens `ids` among all of a vocabulary, `rest` for the others.
static void widen(const float* values, const int32_t* ids, int num, float rest, float* row, int vocab) {
  std::fill(row, row + vocab, rest);
  for (int i = 0; i < num; ++i) row[ids[i]] = values[i];
}
// A copy of the rows of an output layer for some tokens.
struct Subset {
  Matrix rows;
  std::vector<int32_t> ids;
  Arena arena;

  // False where there is no memory.
  bool take(const Matrix& whole, const int32_t* of, int num) {
    ids.assign(of, of + num);
    rows = whole, rows.out = num;
    uint8_t* panels = arena.take(rows.bytes());
    for (int i = 0; panels && i < num; ++i) copy_output(whole, of[i], panels, i);
    rows.panels = panels;
    return panels;
  }
  Output output() const { return {&rows, ids.data()}; }
};

// Cosines and sines of positions from the first [n, s], the sign with the sines; somebody else's memory.
struct Angles {
  const float *cos = nullptr, *sin = nullptr;
};

struct Model {
  Shape s;
  std::vector<Layer> layers;
  Layer ends;  // embedding, output layer and last norm
  std::vector<int32_t> output_ids;  // which tokens its rows are of, in rising order; empty: all in their order
  Angles angles[TABLES];
  Arena arena;
  // Of one pass: n rows of what lies between the products, and each thread's own.
  std::vector<float> x, qkv, mixed, act, branch, narrow;
  struct Own {
    std::vector<float> h, q, scores, gate;
    Room room;
  };
  std::vector<Own> own;

  explicit Model(const Shape& shape) : s(shape), layers(shape.layers) {}
  int joined() const { return (s.heads + 2 * s.kv_heads) * s.size; }
  int mix() const { return s.heads * s.size; }
  Output output() const { return {&ends.matrices[OUTPUT], output_ids.empty() ? nullptr : output_ids.data()}; }
  Layer& layer(int l) { return l < 0 ? ends : layers[l]; }
  // How many of its first layers are another model's, so that they make the same of a text where their angles do.
  int common(const Model& o) const {
    auto shape = [](const Shape& s) {
      return std::make_tuple(s.width, s.heads, s.kv_heads, s.size, s.rotary, s.hidden, s.is_gelu, s.rounds_to, s.eps, s.query_scale, s.embedding_scale);
    };
    if (shape(s) != shape(o.s) || !embedding().is_like(o.embedding())) return 0;
    int num = 0;
    while (num < std::min(s.layers - 1, o.s.layers) && layers[num].is_like(o.layers[num], s)) ++num;
    return num;
  }
  // Its first layers lie where those of a model do that has them in common, and that stays as long: what one has read is in the
  // processor's caches for the other.
  void share(const Model& o, int num) {
    std::copy(o.layers.begin(), o.layers.begin() + num, layers.begin());
    bool is_whole = num == s.layers;
    arena.drop_before(is_whole ? reinterpret_cast<const uint8_t*>(ends.norms[FINAL]) : layers[num].matrices[QUERY].panels);
  }
  const Matrix& embedding() const { return ends.matrices[EMBEDDING].out ? ends.matrices[EMBEDDING] : ends.matrices[OUTPUT]; }
};

// One sequence: for each layer and key-value head keys [block of PANEL positions, value, position of the block] and values
// [position, value].
struct Sequence {
  int capacity = 0;
  float *keys = nullptr, *values = nullptr;
};

// The rows of a pass that are of one sequence: n tokens at `start`, from `row` on. Of the last `rows` logits and states are wanted.
struct Part {
  Sequence* seq;
  int32_t start, n, rows, row;
};
