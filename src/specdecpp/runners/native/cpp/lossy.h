// Laws m(p, q) that a token with a candidate may have in the place of p: `rounds.lossy`, where each is defined.

#pragma once

#include <cmath>

#include "distributions.h"

enum { TOKEN, BLOCK, COMPARE, FUZZY_KL, FUZZY_JS, FUZZY_TV, CHOW, OPT, TOKEN_CASCADE, TYPICAL, TV_BUDGET };  // verifications
static bool is_lossy(int verification) { return verification > COMPARE; }

// TV(p, q).
static double variation(const float* p, const float* q, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += std::abs(p[i] - q[i]);
  return sum / 2;
}

// KL(p || r p + (1 - r) q), in nats.
static double divergence(const float* p, const float* q, float r, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i)
    if (p[i] > 0) sum += p[i] * std::log(p[i] / (r * p[i] + (1 - r) * q[i]));
  return sum;
}

static double entropy(const float* p, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i)
    if (p[i] > 0) sum -= p[i] * std::log(p[i]);
  return sum;
}

// How far from p towards q a law goes that lies between them.
static double share_of(int kind, const float* p, const float* q, int n, double first) {
  if (kind == FUZZY_TV) return variation(p, q, n) <= first;
  if (kind == FUZZY_KL) return divergence(p, q, 0, n) <= first;
  if (kind == FUZZY_JS) return (divergence(p, q, 0.5f, n) + divergence(q, p, 0.5f, n)) / 2 <= first;
  if (kind == CHOW) return !(largest(q, n) < float(1 - first));
  if (kind == OPT) return !(largest(q, n) < largest(p, n) - first * variation(p, q, n));
  return std::min(1.0, first / std::max(variation(p, q, n), 1e-30));
}

// The law of p [n] and q [n] into m [n]; TV(m, p). The two that trust some tokens have q there, and the rest of its mass by p.
static double mixed(int kind, const float* p, const float* q, int n, double first, double second, float* m) {
  if (kind != TOKEN_CASCADE && kind != TYPICAL) {
    float share = float(share_of(kind, p, q, n, first));
    for (int i = 0; i < n; ++i) m[i] = p[i] + share * (q[i] - p[i]);
    if (share == 1) std::copy(q, q + n, m);
    return variation(m, p, n);
  }
  bool is_typical = kind == TYPICAL;
  float least = is_typical ? float(std::min(first, second * std::exp(-entropy(p, n)))) : float(1 - first) * largest(p, n);
  auto trusts = [&](int i) { return is_typical ? p[i] > least : p[i] >= least; };
  double rest = 0;
  for (int i = 0; i < n; ++i) rest += trusts(i) ? 0 : q[i];
  for (int i = 0; i < n; ++i) m[i] = (trusts(i) ? q[i] : 0) + float(rest) * p[i];
  return variation(m, p, n);
}
