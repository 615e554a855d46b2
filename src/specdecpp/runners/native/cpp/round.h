// The halves of a round as one call each: `propose` draws candidates until a floor is undercut, `verify` tests them.

#pragma once

#include <chrono>

#include "pass.h"
#include "sampling.h"

// The acceptance head of the form that looks ahead (`head.AcceptanceHead`), for a row: x = W [state, scalars] + table[token], blocks
// x + SiLU(B x + b), P(accepted) = sigmoid(slope (output x + shift) + bias).
struct Head {
  int32_t in, scalars, width, blocks;
  int32_t kinds[4];  // of the scalars: LOG_Q, ENTROPY, GAP or DEPTH
  const float *weight, *table, *block, *block_bias, *output;
  double shift, slope, bias;
  bool reads(int kind) const { return std::find(kinds, kinds + scalars, kind) != kinds + scalars; }
};
enum { LOG_Q, ENTROPY, GAP, DEPTH };
enum { NOTHING, LAST_Q, PRODUCT_OF_Q, SURVIVAL };  // the evidence that floors ask of
enum { ON, STOPPED, ENDED };

// What a half round is told and says.
struct Drafting {
  const int64_t *unread, *ends;
  const double *uniforms, *least;
  const Head* head;
  int64_t* tokens;            // said: the candidates,
  float* rows;                // [limit, v] q or, greedily, logits,
  double *confidence, *accept;  // q of each and what the head expects of it,
  double forward_s, head_s;   // seconds,
  int32_t why;                // and why drafting stopped
  int32_t num_unread, num_ends, start, limit, evidence;
  Sampling sampling;
};
struct Verifying {
  const int64_t* tokens;  // those the target has not read and the candidates
  const double* coins;    // a uniform for each candidate, and one for the token that follows
  const float* q;
  float *logits, *states;  // [num + 1, v], [num + 1, w]
  int64_t next;            // said
  double forward_s;
  int32_t num_accepted;
  int32_t num_tokens, num, start, is_block;
  Sampling sampling;
};

static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// `x` and `p` are as in `spread`.
static double judged(const Head& head, const float* state, int64_t token, double q, int depth, const float* x, const float* p, int n, float factor) {
  static thread_local std::vector<float> read, h, z;
  read.assign(state, state + head.in), h.resize(head.width), z.resize(head.width);
  float scalars[] = {float(std::log(std::max(q, 1e-30))), 0, 0, float(depth)};
  if (head.reads(ENTROPY) || head.reads(GAP)) spread(x, p, n, factor, scalars + ENTROPY, scalars + GAP);
  for (int i = 0; i < head.scalars; ++i) read.push_back(scalars[head.kinds[i]]);
  int in = int(read.size()), width = head.width;
  for (int o = 0; o < width; ++o) h[o] = dot(head.weight + size_t(o) * in, read.data(), in) + head.table[token * width + o];
  for (int b = 0; b < head.blocks; ++b) {
    const float* w = head.block + size_t(b) * width * width;
    for (int o = 0; o < width; ++o) z[o] = dot(w + size_t(o) * width, h.data(), width) + head.block_bias[b * width + o];
    for (int o = 0; o < width; ++o) h[o] += z[o] / (1.0f + std::exp(-z[o]));
  }
  double logit = (dot(head.output, h.data(), width) + head.shift) * head.slope + head.bias;
  return 1.0 / (1.0 + std::exp(-std::min(std::max(logit, -700.0), 700.0)));
}

// Candidates of one round, as `drafting.propose` draws them; how many.
static int propose(Model* m, int threads, Sequence* seq, Drafting* d) {
  const Shape& s = m->s;
  const int64_t* pending = d->unread;
  int num = 0, n = d->num_unread, start = d->start;
  static thread_local std::vector<float> logits, state;
  logits.resize(s.vocab), state.resize(s.width);
  bool reads_q = d->head || d->evidence == LAST_Q || d->evidence == PRODUCT_OF_Q;
  const Sampling& sampling = d->sampling;
  bool is_drawn = sampling.temperature > 0;
  Seen seen(sampling);
  double evidence = 1.0;
  d->why = ON, d->forward_s = d->head_s = 0;
  while (num < d->limit) {
    if (!(evidence >= d->least[num])) return d->why = STOPPED, num;
    float* row = d->rows + size_t(num) * s.vocab;
    double started = now();
    float* said = is_drawn ? logits.data() : row;
    extend(*m, threads, *seq, pending, n, start, 1, said, state.data());
    d->forward_s += now() - started;
    penalise(said, s.vocab, sampling);
    int64_t& token = d->tokens[num];
    double q = 1.0;
    if (is_drawn) {
      distribution(said, s.vocab, sampling, row);
      token = draw(row, s.vocab, d->uniforms[num]);
      q = row[token];
    } else {
      token = argmax(row, s.vocab);
      if (reads_q) law(row, s.vocab, 1.0f, logits.data()), q = logits[token];
    }
    d->confidence[num] = q;
    if (d->head) {
      started = now();
      const float *x = is_drawn ? said : row, *p = is_drawn ? row : logits.data();
      float factor = is_drawn ? 1.0f / sampling.temperature : 1.0f;
      d->accept[num] = judged(*d->head, state.data(), token, q, num + 1, x, p, s.vocab, factor);
      d->head_s += now() - started;
    }
    if (d->evidence == LAST_Q) evidence = q;
    if (d->evidence == PRODUCT_OF_Q) evidence *= q;
    if (d->evidence == SURVIVAL) evidence *= d->accept[num];
    seen.add(token);
    pending = &token, start += n, n = 1, ++num;
    if (std::find(d->ends, d->ends + d->num_ends, token) != d->ends + d->num_ends) return d->why = ENDED, num;
  }
  return num;
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

// How many of the candidates are accepted, and the carry of the prefix that they are; p of every row they need is made of its logits.
static int accepted(const Verifying& v, const int64_t* candidates, int vocab, float* carry) {
  float* p = v.logits;
  const float* q = v.q;
  int count = 0;
  float w = 1.0f;
  static thread_local std::vector<float> rest;
  rest.resize(vocab);
  const Sampling& s = v.sampling;
  Seen seen(s);
  penalise(p, vocab, s), distribution(p, vocab, s, p);
  *carry = 1.0f;
  for (int i = 0; i < v.num; ++i, p += vocab, q += vocab) {
    float ratio = p[candidates[i]] / q[candidates[i]], heads;
    if (!v.is_block && !(v.coins[i] < ratio)) return count;
    seen.add(candidates[i]);
    penalise(p + vocab, vocab, s), distribution(p + vocab, vocab, s, p + vocab);
    if (!v.is_block) {
      ++count;
      continue;
    }
    heads = w = std::min(1.0f, w * ratio);
    if (i + 1 < v.num) {
      float missing = float(residual(p + vocab, q + vocab, w, vocab, rest.data()));
      heads = missing + (1 - w) > 0 ? missing / (missing + (1 - w)) : 0.0f;
    }
    if (v.coins[i] < heads) count = i + 1, *carry = w;
  }
  return count;
}

// The target's pass over the candidates, and the test of `verification`: at a temperature by tokens or by block, else greedily.
static void verify(Model* m, int threads, Sequence* seq, Verifying* v) {
  const Shape& s = m->s;
  int num = v->num, vocab = s.vocab, i = 0;
  const int64_t* candidates = v->tokens + v->num_tokens - num;
  double started = now();
  extend(*m, threads, *seq, v->tokens, v->num_tokens, v->start, num + 1, v->logits, v->states);
  v->forward_s = now() - started;
  if (v->sampling.temperature <= 0) {
    Seen seen(v->sampling);
    for (;; seen.add(candidates[i++])) {
      float* row = v->logits + size_t(i) * vocab;
      penalise(row, vocab, v->sampling);
      v->next = argmax(row, vocab);
      if (i == num || v->next != candidates[i]) break;
    }
    v->num_accepted = i;
    return;
  }
  float carry;
  v->num_accepted = i = accepted(*v, candidates, vocab, &carry);
  const float* p = v->logits + size_t(i) * vocab;
  static thread_local std::vector<float> rest;
  rest.resize(vocab);
  bool is_drawn_anew = i < num && residual(p, v->q + size_t(i) * vocab, carry, vocab, rest.data()) > 0;
  v->next = draw(is_drawn_anew ? rest.data() : p, vocab, v->coins[num]);
}
