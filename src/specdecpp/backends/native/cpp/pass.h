// A pass: tokens through all layers, into the caches of their sequences.
//
//   embed -> each layer: [norm, q k v | turn, store, attend | out + residual | norm, gate up, activation | down + residual] -> norm, logits
//
// A bar is a barrier. There is one call a pass and one set of threads that stays in it: a small model's step is bound by how often
// something is called and threads are waited for, a larger one's by how fast its weights come from memory.

#pragma once

#include <algorithm>
#include <cmath>

#include "model.h"
#include "products.h"
#include "threads.h"

constexpr int GATES = 4;  // panels of the gate that are held before those of the same places in `up`

// y [n, width], whose rows lie `stride` apart, of x [n, width].
static void norm(const float* x, const float* weight, float eps, int n, int width, float* y, size_t stride) {
  int even = width / LANES * LANES;
  for (int r = 0; r < n; ++r, x += width, y += stride) {
    Vec squares{};
    for (int i = 0; i < even; i += LANES) squares += at(x + i) * at(x + i);
    float sum = total(squares);
    for (int i = even; i < width; ++i) sum += x[i] * x[i];
    float scale = 1.0f / std::sqrt(sum / width + eps);
    for (int i = 0; i < width; ++i) y[i] = x[i] * scale * weight[i];
  }
}

static void turn(float* v, const float* cos, const float* sin, int size) {
  int half = size / 2;
  for (int i = 0; i < half; ++i) {
    float a = v[i], b = v[i + half];
    v[i] = a * cos[i] + b * sin[i];
    v[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

// Attention of one key-value head: its keys and values of the new rows are stored, its query heads read all they may see. Queries go
// through the cache in blocks, as rows of a product do through a matrix. Rows before `from` have no queries;
// the outputs of the others go to rows from `to_row` on.
static void attend(Model& m, const Layer& layer, const Part& part, int l, int kv, int from, int to_row, Model::Own& own) {
  const Shape& s = m.s;
  const Sequence& seq = *part.seq;
  int size = s.size, group = s.heads / s.kv_heads, joined = m.joined(), start = part.start, n = part.n;
  float *qkv = m.qkv.data() + size_t(part.row) * joined, *mixed = m.mixed.data() + to_row * apart(m.mix());
  auto turn_at = [&](float* v, int r) {
    size_t of = size_t(start + r) * size;
    turn(v, m.angles[layer.angles].cos + of, m.angles[layer.angles].sin + of, s.rotary);
  };
  float* keys = seq.keys + (size_t(l) * s.kv_heads + kv) * size * seq.capacity;
  float* values = seq.values + (size_t(l) * s.kv_heads + kv) * size * seq.capacity;
  for (int r = 0; r < n; ++r) {
    float* row = qkv + size_t(r) * joined;
    float* k = row + (s.heads + kv) * size;
    int place = start + r;
    if (layer.norms[K_NORM]) norm(k, layer.norms[K_NORM], s.eps, 1, size, k, size);
    turn_at(k, r);
    float* to = keys + size_t(place / PANEL) * size * PANEL + place % PANEL;
    for (int d = 0; d < size; ++d) to[d * PANEL] = k[d];
    std::memcpy(values + size_t(place) * size, row + (s.heads + s.kv_heads + kv) * size, size * 4);
  }
  float *queries = own.q.data(), *scores = own.scores.data();
  int num = n * group;  // query i is head kv * group + i % group of row i / group
  for (int first = from * group; first < num; first += ROWS) {
    int block = std::min(num - first, ROWS), end = start + (first + block - 1) / group + 1;
    // The first position that a query of the block sees, at the edge of a panel of keys.
    int begin = layer.window ? std::max(0, start + first / group + 1 - layer.window) / PANEL * PANEL : 0;
    size_t stride = apart(up(end - begin, PANEL));
    for (int i = 0; i < block; ++i) {
      int r = (first + i) / group;
      const float* of = qkv + size_t(r) * joined + (kv * group + (first + i) % group) * size;
      float* q = queries + size_t(i) * size;
      std::memcpy(q, of, size * 4);
      if (layer.norms[Q_NORM]) norm(q, layer.norms[Q_NORM], s.eps, 1, size, q, size);
      turn_at(q, r);
      for (int d = 0; d < size; ++d) q[d] *= s.query_scale;
    }
    for (int p = begin; p < end; p += PANEL)
      in_blocks<ROWS>(block, [&](int row, auto rows) {
        auto of = reinterpret_cast<const uint8_t*>(keys + size_t(p) * size);
        Store put{scores + p - begin, stride, PANEL};
        plain_sums<Whole, decltype(rows)::num, 1>(of, PANEL * 4, 0, nullptr, size, queries + row * size, size, put, 0, row);
      });
    for (int i = 0; i < block; ++i) {
      float* of = scores + i * stride;
      int place = start + (first + i) / group, padded = int(up(end - begin, LANES));
      for (int p = place + 1 - begin; p < padded; ++p) of[p] = -INFINITY;
      for (int p = begin; layer.window && p <= place - layer.window; ++p) of[p - begin] = -INFINITY;
      Vec most = at(of);
      for (int p = LANES; p < padded; p += LANES) most = at(of + p) > most ? at(of + p) : most;
      float top = largest(most);
      Vec shares{};
      for (int p = 0; p < padded; p += LANES) shares += at(of + p) = exponential(at(of + p) - top);
      Vec scale = all(1.0f / total(shares));
      for (int p = 0; p < padded; p += LANES) at(of + p) *= scale;
    }
    for (int d = 0; d < size; d += PANEL)
      in_blocks<ROWS>(block, [&](int row, auto rows) {
        auto of = reinterpret_cast<const uint8_t*>(values + size_t(begin) * size + d);
        Store put{queries + d, size_t(size), size - d};
        plain_sums<Whole, decltype(rows)::num, 1>(of, size_t(size) * 4, 0, nullptr, end - begin, scores + row * stride, stride, put, 0, row);
      });
    for (int i = 0; i < block; ++i) {
      int r = (first + i) / group, head = kv * group + (first + i) % group;
      std::memcpy(mixed + (r - from) * apart(m.mix()) + head * size, queries + i * size, size * 4);
    }
  }
}

// Room for a pass of n rows that ends at a position.
static void make_room(Model& m, int threads, int n, int end) {
  const Shape& s = m.s;
  auto grow = [](std::vector<float>& to, size_t size) {
    if (to.size() < size) to.resize(size);
  };
  grow(m.x, size_t(n) * s.width), grow(m.branch, size_t(n) * s.width), grow(m.qkv, size_t(n) * m.joined());
  grow(m.mixed, n * apart(m.mix())), grow(m.act, n * apart(s.hidden));
  if (!m.output_ids.empty()) grow(m.narrow, size_t(n) * m.output_ids.size());
  if (m.own.size() < size_t(threads)) m.own.resize(threads);
  for (Model::Own& own : m.own) {
    grow(own.h, n * apart(s.width)), grow(own.q, size_t(ROWS) * s.size + PANEL), grow(own.gate, size_t(n) * GATES * PANEL);
    if (size_t scores = ROWS * apart(up(end, PANEL)); own.scores.size() < scores) own.scores.resize(2 * scores);
  }
}

// Reads the tokens of some sequences, one after another; logits [rows, v] and states [rows, w] (or null) of what is wanted of each, in
// their order. What layer `seen` reads of all n rows goes to `inputs` [n, w]. A model that scores some tokens only gives minus infinity for the
// others; of an `output` that is given the logits are [rows, num()]. With `given` [n, w], what layer `first` reads, the pass
// begins there. One call at a time for a model.
static void pass(Model& m, int threads, Part* parts, int num_parts, const int64_t* tokens, float* logits, float* states, int seen = -1,
                 float* inputs = nullptr, const Output* output = nullptr, int first = 0, const float* given = nullptr) {
  const Shape& s = m.s;
  int n = 0, end = 0, rows = 0;
  std::vector<int> places;  // of the rows that are wanted, among these
  for (Part* part = parts; part < parts + num_parts; ++part)
    part->row = n, n += part->n, places.push_back(rows), rows += part->rows, end = std::max(end, part->start + part->n);
  make_room(m, threads, n, end);
  float* x = m.x.data();
  if (given) std::memcpy(x, given, size_t(n) * s.width * 4);
  for (int r = 0; r < n && !given; ++r) {
    float* row = x + size_t(r) * s.width;
    row_of(m.embedding(), int(tokens[r]), row);
    for (int i = 0; s.embedding_scale != 1.0f && i < s.width; ++i) row[i] *= s.embedding_scale;
  }
  together(threads, [&](int t, int threads, Barrier& barrier) {
    Model::Own& own = m.own[t];
    float* h = own.h.data();
    auto read = [&](const Matrix& w, const float* x, int n) { return own.room.inputs(w, x, n, s.rounds_to); };
    // The thread's share of x W for several matrices over one x, each into its part of y [n, stride].
    auto into = [&](std::initializer_list<const Matrix*> matrices, const float* x, int n, float* y, size_t stride, bool adds) {
      int num = 0, before = 0;
      for (const Matrix* w : matrices) num += w->num_panels();
      Share share(num, t, threads);
      const Matrix* last = nullptr;
      Inputs inputs{};
      for (const Matrix* w : matrices) {
        int begin = std::max(share.begin - before, 0), end = std::min(share.end - before, w->num_panels());
        if (begin < end) {
          if (!last || !last->reads_like(*w)) inputs = read(*w, x, n), last = w;
          product(*w, inputs, n, begin, end, Store{y, stride, w->out, adds});
        }
        y += w->out, before += w->num_panels();
      }
    };
    // The residual of rows x [n], of a product that may have a norm of its own.
    auto add = [&](const Matrix& w, const float* x_of, const float* weight, float* x, int n) {
      if (!weight) return into({&w}, x_of, n, x, s.width, true);
      into({&w}, x_of, n, m.branch.data(), s.width, false);
      barrier.wait();
      Share share(n, t, threads);
      for (int r = share.begin; r < share.end; ++r) {
        float* of = m.branch.data() + size_t(r) * s.width;
        norm(of, weight, s.eps, 1, s.width, of, s.width);
        for (int i = 0; i < s.width; ++i) x[size_t(r) * s.width + i] += of[i];
      }
    };
    for (int l = first; l < s.layers; ++l) {
      if (l == seen && t == 0) std::memcpy(inputs, x, size_t(n) * s.width * 4);  // nobody adds to x before a barrier
      const Layer& layer = m.layers[l];
      const Matrix* w = layer.matrices;
      // The last layer's keys and values are all that later passes read of rows whose logits nobody wants. The others close ranks.
      bool is_last = l + 1 == s.layers;
      int left = is_last ? rows : n;
      norm(x, layer.norms[INPUT], s.eps, n, s.width, h, apart(s.width));  // each thread for itself: cheaper than to wait
      into({&w[QUERY], &w[KEY], &w[VALUE]}, h, n, m.qkv.data(), m.joined(), false);
      barrier.wait();
      for (int p = 0; is_last && t == 0 && p < num_parts; ++p) {
        const Part& part = parts[p];
        std::memmove(x + size_t(places[p]) * s.width, x + size_t(part.row + part.n - part.rows) * s.width, size_t(part.rows) * s.width * 4);
      }
      for (int i = t; i < num_parts * s.kv_heads; i += threads) {
        const Part& part = parts[i / s.kv_heads];
        int from = is_last ? part.n - part.rows : 0, to_row = is_last ? places[i / s.kv_heads] : part.row;
        attend(m, layer, part, l, i % s.kv_heads, from, to_row, own);
      }
      barrier.wait();
      if (!left) break;
      add(w[MIX], m.mixed.data(), layer.norms[AFTER_ATTENTION], x, left);
      barrier.wait();
      norm(x, layer.norms[MLP], s.eps, left, s.width, h, apart(s.width));
      const Matrix &gate = w[GATE], &up = w[UP];
      Share share(gate.num_panels(), t, threads);
      Inputs inputs = read(gate, h, left);
      for (int panel = share.begin, size; panel < share.end; panel += size) {
        size = std::min(share.end - panel, GATES);
        float* held = own.gate.data() - panel * PANEL;
        if (!gate.reads_like(up) && panel > share.begin) inputs = read(gate, h, left);
        product(gate, inputs, left, panel, panel + size, Store{held, GATES * PANEL, gate.num_panels() * PANEL});
        if (!gate.reads_like(up)) inputs = read(up, h, left);
        Store gated{m.act.data(), apart(s.hidden), s.hidden};
        gated.gate = held, gated.gate_stride = GATES * PANEL, gated.is_gelu = s.is_gelu;
        product(up, inputs, left, panel, panel + size, gated);
      }
      barrier.wait();
      add(w[DOWN], m.act.data(), layer.norms[AFTER_MLP], x, left);
      barrier.wait();
    }
    if (!rows) return;
    norm(x, m.ends.norms[FINAL], s.eps, rows, s.width, h, apart(s.width));
    for (int r = t; states && r < rows; r += threads) std::memcpy(states + size_t(r) * s.width, h + r * apart(s.width), s.width * 4);
    const Output own_output = m.output(), &wanted = output ? *output : own_output;
    bool widens = !output && wanted.ids;
    int num = wanted.num();
    into({wanted.rows}, h, rows, widens ? m.narrow.data() : logits, num, false);
    if (!widens) return;
    barrier.wait();
    for (int r = t; r < rows; r += threads) widen(m.narrow.data() + size_t(r) * num, wanted.ids, num, -INFINITY, logits + size_t(r) * s.vocab, s.vocab);
  });
}
