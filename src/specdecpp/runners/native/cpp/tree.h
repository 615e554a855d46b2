// What is the same in the round of a tree whatever its shape, `rounds.tree_host` being the specification: the draft's pass over the nodes of
// a depth with the distribution after each, the draw of one more child, and the target's pass over all nodes with the test of their branches.
// The shape is decided between these calls, by a rule in Python.

#pragma once

#include "round.h"

// Rows of trees are numbered as their parents are (`Part`). Seen tokens of a context: the text's and those of a row's branch.
static void see_branch(Seen& seen, const int64_t* tokens, const int32_t* parents, int row) {
  for (; parents && row >= 0; row = parents[row]) seen.add(tokens[row]);
}

// What the draft is told and says of the nodes that it reads in one pass; without parents it reads unread text, and says of its last token.
struct Opening {
  const int64_t* tokens;   // [known + num] of all rows of the tree, those of this pass the last of them
  const int32_t* parents;  // of the same
  float* rows;             // [wanted, v] said: q after each, greedily a softmax at temperature 1
  int64_t* likeliest;      // [wanted, most] its likeliest tokens, those first, -1 where there are no more,
  float* chances;          // [wanted, most] and their q
  double forward_s;
  int32_t known, num, start, text, most;
  Sampling sampling;
};

// q [v] of the logits [scored()] after a row, and its likeliest tokens.
static void believe(const Model& m, Opening& o, float* said, int row, int i, float* held) {
  int vocab = m.s.vocab, size = m.scored();
  const int32_t* ids = size < vocab ? m.output_ids.data() : nullptr;
  float *q = o.rows + size_t(i) * vocab, *p = ids ? held : q;
  Seen seen(o.sampling);
  see_branch(seen, o.tokens, o.parents, row);
  penalise(said, size, o.sampling, ids);
  if (o.sampling.temperature > 0) distribution(said, size, o.sampling, p);
  else law(said, size, 1.0f, p);
  static thread_local std::vector<std::pair<float, int32_t>> found;
  likeliest(p, size, 0.0, std::min(o.most, size), found);
  for (int j = 0; j < o.most; ++j) {
    bool is_there = j < int(found.size()) && found[j].first > 0;
    o.likeliest[i * o.most + j] = !is_there ? -1 : ids ? ids[found[j].second] : found[j].second;
    o.chances[i * o.most + j] = is_there ? found[j].first : 0.0f;
  }
  if (ids) m.widen(p, 0.0f, q);
}

static void open(Model* m, int threads, Sequence* seq, Opening& o) {
  static thread_local std::vector<float> logits, states;
  int wanted = o.parents ? o.num : 1;
  size_t size = m->scored();
  logits.resize(wanted * size), states.resize(size_t(wanted) * m->s.width);
  Part part{seq, o.start, o.num, wanted, 0, o.text, o.parents};
  double started = now();
  pass(*m, threads, &part, 1, o.tokens + o.known, logits.data(), states.data(), -1, nullptr, true);
  o.forward_s = now() - started;
  auto one = [&, said = logits.data()](int i) {
    static thread_local std::vector<float> held;
    held.resize(size);
    believe(*m, o, said + i * size, o.known + i, i, held.data());
  };
  if (wanted == 1 || o.sampling.seen) {  // tokens that count as seen are marked for one row at a time
    for (int i = 0; i < wanted; ++i) one(i);
    return;
  }
  together(std::min(threads, wanted), [&](int t, int threads, Barrier&) {
    for (int i = t; i < wanted; i += threads) one(i);
  });
}

// While this lives some tokens have no share of q [v].
class Without {
 public:
  explicit Without(float* q) : q_(q) {}
  ~Without() {
    for (auto [token, share] : taken_) q_[token] = share;
  }
  void take(int64_t token) { taken_.emplace_back(token, q_[token]), q_[token] = 0; }

 private:
  float* q_;
  std::vector<std::pair<int64_t, float>> taken_;
};

static double mass(const float* q, int n) {
  double sum = 0;
  int i = 0;
  for (Vec part{}; i + LANES <= n; i += LANES) {
    part += at(q + i);
    if (i + 2 * LANES > n || i % (64 * LANES) == 63 * LANES) sum += total(part), part = Vec{};
  }
  for (; i < n; ++i) sum += q[i];
  return sum;
}

// A draw from q [v] without some tokens; -1 where there is nothing else. `left` says what share of q they leave.
static int64_t draw_without(float* q, int n, const int64_t* tokens, int num, double u, double* left) {
  Without rest(q);
  for (int i = 0; i < num; ++i) rest.take(tokens[i]);
  *left = num ? mass(q, n) : 1.0;
  return *left > 0 ? draw(q, n, u) : -1;
}

// What the target is told and says of a tree: row 0 is the last token of the text, the others are candidates in order.
struct Testing {
  const int64_t* tokens;   // [num + 1]
  const int32_t* parents;  // [num + 1]
  const int32_t* open;     // [num + 1] which row of `q` the children of a row were drawn from
  const double* uniforms;  // [num + 1] one for each candidate and one for what follows; comparing: one after the other
  float *q, *logits, *states;  // [.., v], [num + 1, v], [num + 1, w]
  float* raw;              // the logits again, as they were before sampling; null where nobody asks
  int32_t *path, *tried;   // said: the rows that are accepted, and those that were tested
  double* overlaps;        // said of drawn ones that were tested by recursive rejection: how likely a draw in their place passes
  int64_t next;
  double forward_s;
  int32_t num_path, num_tried, num, start, text, verification, is_drawn;
  Sampling sampling;
};

// The child of a row with some token; 0 where there is none. All before it have been tested, as it has.
static int following(Testing& t, int row, int64_t token) {
  for (int child = row + 1; child <= t.num; ++child) {
    if (t.parents[child] != row) continue;
    t.tried[t.num_tried++] = child;
    if (t.tokens[child] == token) return child;
  }
  return 0;
}

// The child of a row that recursive rejection accepts, p [v] being the target's distribution there; 0 where there is none, and p is then what
// is left of it.
static int surviving(const Testing& t, int row, float* p, int vocab, int32_t* tried, int32_t* num_tried) {
  static thread_local std::vector<float> residue;
  float *q = t.q + size_t(std::max(t.open[row], 0)) * vocab, scale = 1.0f;
  Without rest(q);
  for (int child = row + 1; child <= t.num; ++child) {
    if (t.parents[child] != row) continue;
    int64_t token = t.tokens[child];
    if (t.is_drawn) t.overlaps[*num_tried] = overlap(p, q, vocab, scale);
    tried[(*num_tried)++] = child;
    float ratio = t.is_drawn ? p[token] / (q[token] * scale) : p[token];
    if (t.uniforms[child - 1] < ratio) return child;
    if (t.is_drawn) {  // p - scale q, up to a factor
      residue.resize(vocab);
      double left = residual(p, q, 1 / scale, vocab, residue.data());
      float factor = left > 0 ? float(1 / left) : 0.0f;
      for (int i = 0; left > 0 && i < vocab; ++i) p[i] = residue[i] * factor;
      rest.take(token);
      double more = mass(q, vocab);
      scale = more > 0 ? float(1 / more) : 0.0f;
    } else {
      float share = p[token];
      p[token] = 0;
      double left = mass(p, vocab);
      if (left > 0)
        for (int i = 0; i < vocab; ++i) p[i] = float(p[i] / left);
      else
        p[token] = share;
    }
  }
  return 0;
}

// The target's pass over a tree, and the test of `rounds.tree_verification`.
static void test(Model* m, int threads, Sequence* seq, Testing& t) {
  int vocab = m->s.vocab;
  Part part{seq, t.start, t.num + 1, t.num + 1, 0, t.text, t.parents};
  double started = now();
  pass(*m, threads, &part, 1, t.tokens, t.logits, t.states);
  t.forward_s = now() - started;
  if (t.raw) std::copy(t.logits, t.logits + size_t(t.num + 1) * vocab, t.raw);
  const Sampling& s = t.sampling;
  Seen seen(s);
  t.num_path = t.num_tried = 0;
  for (int row = 0, step = 0;; ++step) {
    float* p = t.logits + size_t(row) * vocab;
    penalise(p, vocab, s);
    int child;
    if (s.temperature > 0 && t.verification == TOKEN) {
      distribution(p, vocab, s, p);
      child = surviving(t, row, p, vocab, t.tried, &t.num_tried);
      if (!child) t.next = draw(p, vocab, t.uniforms[t.num]);
    } else {
      if (s.temperature > 0) distribution(p, vocab, s, p);
      t.next = s.temperature > 0 ? draw(p, vocab, t.uniforms[step]) : argmax(p, vocab);
      child = following(t, row, t.next);
    }
    if (!child) return;
    seen.add(t.tokens[child]);
    t.path[t.num_path++] = row = child;
  }
}
