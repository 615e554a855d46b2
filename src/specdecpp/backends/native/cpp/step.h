// The halves of a step: `propose` draws draft tokens until evidence falls below a floor, `verify` tests them. Requests share passes, and
// pieces of prompts are read in them; the bits of a request do not depend on the others.

#pragma once

#include <chrono>

#include "pass.h"
#include "sampling.h"

// The acceptance head (`head.AcceptanceHead`) for a row: x = W [state, scalars] + table[token], or the state itself without W; blocks
// x + SiLU(B x + b); P(accepted) = sigmoid(slope (output x + shift) + bias). One that lags judges a draft token by the state that has read
// it. `rows` is 1 where the table is the same for all tokens.
struct Head {
  int32_t in, scalars, width, blocks, lags, rows;
  int32_t kinds[4];  // of the scalars: LOG_Q, ENTROPY, GAP or DEPTH
  const float *weight, *table, *block, *block_bias, *output;
  double shift, slope, bias;
  bool reads(int kind) const { return std::find(kinds, kinds + scalars, kind) != kinds + scalars; }
};
enum { LOG_Q, ENTROPY, GAP, DEPTH };
enum { NOTHING, LAST_Q, PRODUCT_OF_Q, NEGATIVE_ENTROPY, SURVIVAL };  // the evidence that a rule looks at
enum { ON, STOPPED, ENDED, UNSCORED };
enum { TOKEN, BLOCK, COMPARE };  // verifications

// Inputs and outputs of native_propose. With a `limit` of 0 the draft only reads `unread`.
struct Drafting {
  Sequence* seq;
  const int64_t *unread, *ends;
  const double *uniforms, *least;
  const Head* head;
  const Subset* more;           // tokens that are scored beside those of the call's `subset`, or null
  const uint8_t* allowed;       // [places, v] tokens that a grammar allows behind 0, 1, 2, ... draft tokens, or null
  void (*follow)();             // takes the last draft token into the grammar: fills in `allowed`, adds what is forced
  // Outputs:
  int64_t* tokens;              // draft tokens
  float* rows;                  // [limit, v] q or, greedily, logits
  double *confidence, *accept;  // q of each, and the probability that it is accepted
  double forward_s, head_s;     // seconds; those of a pass are shared by rows
  double value;                 // evidence, input too
  double bias, slope;           // input: the score that estimates are read with, where there is one
  int32_t why, num;             // ON, STOPPED, ENDED or UNSCORED; how many draft tokens there are; inputs too
  int32_t drawn, read;          // outputs: how many of these were drawn; how many tokens the draft has read, unread ones included
  int32_t num_unread, num_ends, start, limit, most, evidence, judges_by_q, scores;  // `limit` may grow to `most` by what is forced
  Sampling sampling;
};
// Inputs and outputs of native_verify. With a `num` of -1 the target only reads `tokens`.
struct Verifying {
  Sequence* seq;
  const int64_t* tokens;   // those the target has not read, then the draft tokens
  const double* uniforms;  // one for each draft token, and one for the token that follows
  const float* q;
  const uint8_t* allowed;  // [num + 1, v] tokens that a grammar allows, or null
  // Outputs:
  float* logits;           // [num + 1, v] before sampling, or null
  double* overlaps;        // [num] sum min(p, q) of each draft token that the ratio test looked at, or null
  int64_t next;
  double forward_s;
  int32_t num_accepted;
  int32_t num_tokens, num, start, verification;  // inputs
  Sampling sampling;
};

static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// P(accepted), from the state and the scalars of a draft token in the order LOG_Q, ENTROPY, GAP, DEPTH.
static double judged(const Head& head, const float* state, int64_t token, const float* scalars) {
  static thread_local std::vector<float> read, h, z;
  read.assign(state, state + head.in), h.resize(head.width), z.resize(head.width);
  for (int i = 0; i < head.scalars; ++i) read.push_back(scalars[head.kinds[i]]);
  int in = int(read.size()), width = head.width;
  const float* row = head.table + (head.rows == 1 ? 0 : token * width);
  if (!head.weight) h = read;
  for (int o = 0; head.weight && o < width; ++o) h[o] = dot(head.weight + size_t(o) * in, read.data(), in) + row[o];
  for (int b = 0; b < head.blocks; ++b) {
    const float* w = head.block + size_t(b) * width * width;
    for (int o = 0; o < width; ++o) z[o] = dot(w + size_t(o) * width, h.data(), width) + head.block_bias[b * width + o];
    for (int o = 0; o < width; ++o) h[o] += z[o] / (1.0f + std::exp(-z[o]));
  }
  double logit = (dot(head.output, h.data(), width) + head.shift) * head.slope + head.bias;
  return 1.0 / (1.0 + std::exp(-std::min(std::max(logit, -700.0), 700.0)));
}

// `policies.score`: MIN_OTHERS and CLIP, and what a score makes of an estimate.
static constexpr double MIN_OTHERS = 1e-2, CLIP = 1e-6;
static double scored(const Drafting& d, double estimate) {
  double logit = std::copysign(std::log((1 - CLIP) / CLIP), estimate - 0.5);
  if (estimate > CLIP && estimate < 1 - CLIP) logit = std::log(estimate / (1 - estimate));
  return d.scores ? 1 / (1 + std::exp(-(d.bias + d.slope * logit))) : estimate;
}

// Two lists of tokens in rising order as one, and values of theirs likewise.
struct Merged {
  std::vector<int32_t> ids;
  std::vector<int> places;  // of the tokens of the second list, in the first

  void merge(const int32_t* first, int num, const int32_t* second, int more) {
    ids.resize(num + more), places.clear();
    for (int i = 0; i < more; ++i) places.push_back(int(std::lower_bound(first, first + num, second[i]) - first));
    values(first, num, second, ids.data());
  }
  template <class T>
  void values(const T* first, int num, const T* second, T* to) const {
    int begin = 0;
    for (int place : places) {
      to = std::copy(first + begin, first + place, to);
      *to++ = *second++, begin = place;
    }
    std::copy(first + begin, first + num, to);
  }
};

// Draft tokens of one request while they are drawn, as `step.propose` draws them. Where the draft scores some tokens only, all is
// computed of these, and becomes a row of the vocabulary at last.
struct Drawing {
  Drafting& d;
  const Model& m;
  const int32_t* ids;  // of the tokens that are scored; null: all of them
  int size, listed;    // how many these are, and how many of them the call's output layer has
  int vocab = m.s.vocab;
  Merged merged;  // the tokens of the call's output layer and the request's own
  const int64_t* pending = d.unread;
  int n = d.num_unread, start = d.start;
  bool is_drawn = d.sampling.temperature > 0, spreads, reads_q;
  float scalars[4] = {};  // of the last draft token
  Seen seen;

  Drawing(Drafting& d, const Model& m, const Output& output)
      : d(d), m(m), ids(output.ids), size(output.num()), listed(size), seen(d.sampling) {
    if (d.more) {
      merged.merge(ids, size, d.more->ids.data(), d.more->rows.out);
      size = int(merged.ids.size()), ids = merged.ids.data();
    }
    spreads = d.evidence == NEGATIVE_ENTROPY || (d.head && (d.head->reads(ENTROPY) || d.head->reads(GAP)));
    reads_q = d.head || d.judges_by_q || d.evidence == LAST_Q || d.evidence == PRODUCT_OF_Q || spreads;
    for (int i = 0; i < d.num; ++i) seen.add(d.tokens[i]);
    d.drawn = d.read = 0, d.forward_s = d.head_s = 0;
  }

  // Whether there is to be one more.
  bool goes_on() {
    if (d.why != ON || d.num >= d.limit) return false;
    if (d.value >= d.least[d.num]) return true;
    d.why = STOPPED;
    return false;
  }

  float* row() { return d.rows + size_t(d.num) * vocab; }

  void judge(int i, const float* state) {
    double started = now();
    d.accept[i] = d.head ? judged(*d.head, state, d.tokens[i], scalars) : 1 / (1 + std::max(1 - d.confidence[i], MIN_OTHERS));
    if (d.evidence == SURVIVAL) d.value *= scored(d, d.accept[i]);
    d.head_s += now() - started;
  }

  // Logits x [listed] of the call's output layer, and those of the request's own tokens, which its state [width] gives.
  float* with_own(const float* x, const float* state) const {
    static thread_local std::vector<float> own, joined;
    static thread_local Room room;
    const Matrix& rows = d.more->rows;
    own.resize(rows.out), joined.resize(size);
    product(rows, room.inputs(rows, state, 1, m.s.rounds_to), 1, 0, rows.num_panels(), Store{own.data(), own.size(), rows.out});
    merged.values(x, listed, own.data(), joined.data());
    return joined.data();
  }

  // Draws the next draft token from the logits x [listed] after `pending`, which may be `row()`.
  void draws(float* x, const float* state) {
    static thread_local std::vector<float> held;
    if (d.more) x = with_own(x, state);
    if (d.head && d.head->lags && d.num) judge(d.num - 1, state);
    if (d.allowed && !restrict_to(d.allowed + size_t(d.num) * vocab, x, size, ids)) {
      d.why = UNSCORED;
      return;
    }
    bool needs_q = is_drawn || reads_q;
    if (needs_q && (ids || !is_drawn)) held.resize(size);
    float* p = ids || !is_drawn ? held.data() : row();
    penalise(x, size, d.sampling, ids);
    double q = 1.0;
    int64_t place;
    if (is_drawn) {
      distribution(x, size, d.sampling, p);
      place = draw(p, size, d.uniforms[d.drawn]);
    } else {
      place = argmax(x, size);
      if (reads_q) softmax(x, size, 1.0f, p);
    }
    if (needs_q) q = p[place];
    if (ids) widen(is_drawn ? p : x, ids, size, is_drawn ? 0.0f : -INFINITY, row(), vocab);
    else if (!is_drawn && x != row()) std::copy(x, x + size, row());
    int64_t& token = d.tokens[d.num];
    token = ids ? ids[place] : place;
    d.confidence[d.num] = q;
    scalars[LOG_Q] = float(std::log(std::max(q, 1e-30))), scalars[DEPTH] = float(d.num + 1);
    if (spreads) spread(x, p, size, is_drawn ? 1.0f / d.sampling.temperature : 1.0f, scalars + ENTROPY, scalars + GAP);
    if (d.evidence == LAST_Q) d.value = q;
    if (d.evidence == PRODUCT_OF_Q) d.value *= q;
    if (d.evidence == NEGATIVE_ENTROPY) d.value = -scalars[ENTROPY];
    if (d.judges_by_q || (d.head && !d.head->lags)) judge(d.num, state);
    seen.add(token);
    pending = &token, start += n, n = 1, ++d.num, ++d.drawn;
    if (std::find(d.ends, d.ends + d.num_ends, token) != d.ends + d.num_ends) d.why = ENDED;
    else if (d.follow) follow();
  }

  // What the grammar forces is read together with the token before it.
  void follow() {
    int before = d.num;
    d.follow();
    for (n += d.num - before; before < d.num; ++before) {
      if (d.evidence == SURVIVAL && (d.judges_by_q || d.head)) d.value *= scored(d, 1.0);
      if (d.evidence == LAST_Q) d.value = 1.0;
      if (d.evidence == NEGATIVE_ENTROPY) d.value = 0.0;
      seen.add(d.tokens[before]);
    }
  }
};

// Draft tokens of `count` requests, a pass of the draft for all that go on. With a `subset` q is 0 for all but its tokens.
extern "C" void native_propose(Model* m, int threads, Drafting** tasks, int count, const Subset* subset) {
  const Shape& s = m->s;
  const Output output = subset ? subset->output() : m->output();
  static thread_local std::vector<float> logits, states;
  static thread_local std::vector<int64_t> tokens;
  std::vector<Drawing> all;
  all.reserve(count);
  for (int i = 0; i < count; ++i) all.emplace_back(*tasks[i], *m, output);
  std::vector<Drawing*> on;
  std::vector<Part> parts;
  for (bool is_first = true;; is_first = false) {
    on.clear(), parts.clear(), tokens.clear();
    for (Drawing& one : all) {
      bool draws = one.goes_on();
      if (!draws && !(is_first && one.d.limit == 0)) continue;
      if (draws) on.push_back(&one);
      one.d.read += one.n;
      parts.push_back({one.d.seq, one.start, one.n, draws, 0});
      tokens.insert(tokens.end(), one.pending, one.pending + one.n);
    }
    int num = int(on.size());
    if (parts.empty()) break;
    size_t size = output.num();
    logits.resize(num * size), states.resize(size_t(num) * s.width);
    double started = now();
    bool is_row = num == 1 && !on[0]->is_drawn && !on[0]->ids;  // they are what is wanted
    float* x = is_row ? on[0]->row() : logits.data();
    pass(*m, threads, parts.data(), int(parts.size()), tokens.data(), x, states.data(), -1, nullptr, &output);
    double row_s = (now() - started) / tokens.size();
    for (Drawing& one : all) one.d.forward_s += is_first && !one.d.limit ? one.n * row_s : 0;
    auto one = [&, x, state = states.data()](int i) {
      on[i]->d.forward_s += on[i]->n * row_s;
      on[i]->draws(x + i * size, state + size_t(i) * s.width);
    };
    for_each(threads, num, one);
  }
}

// sum min(p, q).
static double overlap(const float* p, const float* q, int n) {
  Vec sum{};
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    Vec a = at(p + i), b = at(q + i);
    sum += a < b ? a : b;
  }
  double mass = total(sum);
  for (; i < n; ++i) mass += std::min(p[i], q[i]);
  return mass;
}

// (w p - q)+ into `rest`; its mass.
static double residual(const float* p, const float* q, float w, int n, float* rest) {
  Vec sum{};
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    Vec more = at(p + i) * w - at(q + i);
    sum += at(rest + i) = more > 0.0f ? more : Vec{};
  }
  double mass = total(sum);
  for (; i < n; ++i) mass += rest[i] = std::max(p[i] * w - q[i], 0.0f);
  return mass;
}

// How many of the draft tokens are accepted, and the token that follows; p of every row they need is made of its logits x [num + 1, vocab].
static int accepted(const Verifying& v, float* x, const int64_t* drafted, int vocab, int64_t* next) {
  const float* q = v.q;
  int count = 0;
  float w = 1.0f, carry = 1.0f;
  static thread_local std::vector<float> rest;
  rest.resize(vocab);
  const Sampling& s = v.sampling;
  Seen seen(s);
  auto row = [&](int i) {
    float* p = x + size_t(i) * vocab;
    penalise(p, vocab, s), distribution(p, vocab, s, p);
    return p;
  };
  float* p = row(0);
  for (int i = 0; i < v.num; ++i, q += vocab) {
    if (v.verification == COMPARE && (*next = draw(p, vocab, v.uniforms[i])) != drafted[i]) return count;
    float ratio = v.verification == COMPARE ? 1.0f : p[drafted[i]] / q[drafted[i]];
    if (v.verification == TOKEN && v.overlaps) v.overlaps[i] = overlap(p, q, vocab);
    if (v.verification == TOKEN && !(v.uniforms[i] < ratio)) break;
    seen.add(drafted[i]);
    p = row(i + 1);
    if (v.verification != BLOCK) {
      ++count;
      continue;
    }
    float chance = w = std::min(1.0f, w * ratio);  // that as many as these are accepted, and not fewer
    if (i + 1 < v.num) {
      float missing = float(residual(p, q + vocab, w, vocab, rest.data()));
      chance = missing + (1 - w) > 0 ? missing / (missing + (1 - w)) : 0.0f;
    }
    if (v.uniforms[i] < chance) count = i + 1, carry = w;
  }
  p = x + size_t(count) * vocab;
  bool is_drawn_anew = count < v.num && residual(p, v.q + size_t(count) * vocab, carry, vocab, rest.data()) > 0;
  *next = draw(is_drawn_anew ? rest.data() : p, vocab, v.uniforms[v.num]);
  return count;
}

// The same at temperature 0.
static int agreed(const Verifying& v, float* x, const int64_t* drafted, int vocab, int64_t* next) {
  Seen seen(v.sampling);
  for (int i = 0;; seen.add(drafted[i++])) {
    float* row = x + size_t(i) * vocab;
    penalise(row, vocab, v.sampling);
    *next = argmax(row, vocab);
    if (i == v.num || *next != drafted[i]) return i;
  }
}

// The target's pass over the draft tokens of some requests, and their acceptance tests.
extern "C" void native_verify(Model* m, int threads, Verifying** tasks, int count) {
  size_t vocab = m->s.vocab;
  static thread_local std::vector<float> logits;
  static thread_local std::vector<int64_t> tokens;
  std::vector<Part> parts;
  std::vector<size_t> rows{0};
  tokens.clear();
  for (int i = 0; i < count; ++i) {
    Verifying& v = *tasks[i];
    parts.push_back({v.seq, v.start, v.num_tokens, v.num + 1, 0}), rows.push_back(rows.back() + v.num + 1);
    tokens.insert(tokens.end(), v.tokens, v.tokens + v.num_tokens);
  }
  if (logits.size() < rows.back() * vocab) logits.resize(rows.back() * vocab);
  double started = now();
  pass(*m, threads, parts.data(), count, tokens.data(), logits.data(), nullptr);
  double row_s = (now() - started) / tokens.size();
  auto one = [&, logits = logits.data()](int i) {
    Verifying& v = *tasks[i];
    float *x = logits + rows[i] * vocab, *end = logits + rows[i + 1] * vocab;
    v.forward_s = v.num_tokens * row_s;
    if (v.num < 0) return;
    for (int k = 0; v.allowed && k <= v.num; ++k) restrict_to(v.allowed + k * vocab, x + k * vocab, int(vocab), nullptr);
    if (v.logits) std::copy(x, end, v.logits);
    v.num_accepted = (v.sampling.temperature > 0 ? accepted : agreed)(v, x, v.tokens + v.num_tokens - v.num, int(vocab), &v.next);
  };
  for_each(threads, count, one);
}
