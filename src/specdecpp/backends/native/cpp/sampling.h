// From logits to the distribution that a token is drawn from: `sampling.probabilities`, in its order: repetition penalty,
// temperature, top-k, top-p, min-p.

#pragma once

#include <functional>
#include <utility>

#include "distributions.h"

// What a request asks for. `seen` [v] marks the tokens of the context for the penalty; null without one.
struct Sampling {
  float temperature, top_p, min_p, penalty;
  int32_t top_k;  // 0: all
  uint8_t* seen;
  bool filters(int n) const { return (top_k && top_k < n) || top_p < 1.0f || min_p > 0.0f; }
};

// Draft tokens that count as seen while this lives.
class Seen {
 public:
  explicit Seen(const Sampling& s) : seen_(s.seen) {}
  ~Seen() {
    for (int64_t token : added_) seen_[token] = 0;
  }
  void add(int64_t token) {
    if (seen_ && !seen_[token]) seen_[token] = 1, added_.push_back(token);
  }

 private:
  uint8_t* seen_;
  std::vector<int64_t> added_;
};

// Sets the logits x [n] of tokens that are not allowed to minus infinity; whether any is left. `ids` are the tokens (null: all in
// their order).
static bool restrict_to(const uint8_t* allowed, float* x, int n, const int32_t* ids) {
  for (int i = 0; i < n; ++i) x[i] = allowed[ids ? ids[i] : i] ? x[i] : -INFINITY;
  return largest(x, n) > -INFINITY;
}

// Logits x [n], of these tokens (null: of all in their order).
static void penalise(float* x, int n, const Sampling& s, const int32_t* ids = nullptr) {
  for (int i = 0; s.seen && i < n; ++i)
    if (s.seen[ids ? ids[i] : i]) x[i] = x[i] < 0 ? x[i] * s.penalty : x[i] / s.penalty;
}

// The num-th largest of p [n]: a heap of the largest so far, which blocks of smaller ones leave alone.
static float nth_largest(const float* p, int n, int num) {
  static thread_local std::vector<float> heap;
  heap.clear();
  for (int i = 0; i < n; i += 64) {
    int end = std::min(i + 64, n);
    if (int(heap.size()) == num && largest(p + i, end - i) <= heap.front()) continue;
    for (int j = i; j < end; ++j) {
      if (int(heap.size()) == num && p[j] <= heap.front()) continue;
      if (int(heap.size()) == num) std::pop_heap(heap.begin(), heap.end(), std::greater<>()), heap.pop_back();
      heap.push_back(p[j]), std::push_heap(heap.begin(), heap.end(), std::greater<>());
    }
  }
  return heap.front();
}

// Those of p [n] that are at least so large, as (p, id); their sum.
static double at_least(const float* p, int n, float least, std::vector<std::pair<float, int32_t>>& found) {
  double sum = 0;
  found.clear();
  for (int i = 0; i < n; i += 64) {
    int end = std::min(i + 64, n);
    if (largest(p + i, end - i) < least) continue;
    for (int j = i; j < end; ++j)
      if (p[j] >= least) found.emplace_back(p[j], j), sum += p[j];
  }
  return sum;
}

// The largest of p [n], in falling order, equal ones in the order of their ids: as many as hold `share` of all; where that is 0
// the first `num`, and those that are equal to the last of them.
// They are looked for among those of a certain size first: sorting a whole vocabulary takes longer than a small model's pass.
static void largest_first(const float* p, int n, double share, int num, std::vector<std::pair<float, int32_t>>& found) {
  float top = largest(p, n);
  if (share == 0) {
    at_least(p, n, nth_largest(p, n, num), found);
  } else {
    for (float least : {top / 64, top / 4096, top / 16777216, 0.0f})
      if (at_least(p, n, least, found) >= share) break;
  }
  auto is_before = [](auto& a, auto& b) { return a.first > b.first || (a.first == b.first && a.second < b.second); };
  std::sort(found.begin(), found.end(), is_before);
}

// Sets what is smaller than that in p [n] to 0, and scales the rest.
static void cut_below(float* p, int n, float least) {
  double mass = 0;
  for (int i = 0; i < n; ++i) mass += p[i] = p[i] < least ? 0.0f : p[i];
  for (int i = 0; i < n; ++i) p[i] = float(p[i] / mass);
}

// Sets what is filtered out of a distribution p [n] to 0, and scales the rest.
static void filter(float* p, int n, const Sampling& s) {
  static thread_local std::vector<std::pair<float, int32_t>> found;
  int most = s.top_k && s.top_k < n ? s.top_k : 0;
  if (!most && s.top_p >= 1.0f) return cut_below(p, n, s.min_p * largest(p, n));
  largest_first(p, n, most ? 0.0 : s.top_p, most ? most : 1, found);
  size_t kept = found.size();
  double whole = most ? 0.0 : 1.0, sum = 0;
  for (size_t i = 0; most && i < kept; ++i) whole += found[i].first;
  if (s.top_p < 1.0f) {
    size_t i = 0;
    for (; i < kept; ++i) {
      float share = float(found[i].first / whole);
      sum += share;
      if (float(sum) - share >= s.top_p) break;
    }
    kept = i;
  }
  while (kept > 1 && found[kept - 1].first < s.min_p * found[0].first) --kept;
  double mass = 0;
  for (size_t i = 0; i < kept; ++i) mass += found[i].first;
  std::fill(p, p + n, 0.0f);
  for (size_t i = 0; i < kept; ++i) p[found[i].second] = float(found[i].first / mass);
}

// The distribution of logits x [n], which may lie where p does. x is penalised already.
static void distribution(const float* x, int n, const Sampling& s, float* p) {
  softmax(x, n, s.temperature, p);
  if (s.filters(n)) filter(p, n, s);
}
