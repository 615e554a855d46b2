// Distributions over a vocabulary: made of logits, drawn from, and how they are spread.

#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

static float largest(const float* x, int n) {
  float most = x[0];
  int i = 0;
  if (n >= LANES) {
    Vec top = at(x);
    for (i = LANES; i + LANES <= n; i += LANES) top = at(x + i) > top ? at(x + i) : top;
    for (int j = 0; j < LANES; ++j) most = std::max(most, top[j]);
  }
  for (; i < n; ++i) most = std::max(most, x[i]);
  return most;
}

static int64_t argmax(const float* x, int n) {
  float most = largest(x, n);
  for (int i = 0; i < n; ++i)
    if (x[i] == most) return i;
  return 0;
}

// exp((x - max x) / temperature) into y; their sum.
static double powers(const float* x, int n, float temperature, float* y) {
  float top = largest(x, n), factor = 1.0f / temperature;
  double sum = 0;
  int i = 0;
  for (Vec part{}; i + LANES <= n; i += LANES) {
    Vec power = exponential((at(x + i) - top) * factor);
    part += at(y + i) = power;
    if (i + 2 * LANES > n || i % (64 * LANES) == 63 * LANES) sum += total(part), part = Vec{};
  }
  for (; i < n; ++i) {
    float power = std::exp((x[i] - top) * factor);
    sum += y[i] = power;
  }
  return sum;
}

// p = softmax(x / temperature).
static void softmax(const float* x, int n, float temperature, float* p) {
  float scale = float(1.0 / powers(x, n, temperature, p));
  for (int i = 0; i < n; ++i) p[i] *= scale;
}

static float dot(const float* a, const float* b, int n) {
  Vec sum{};
  int i = 0;
  for (; i + LANES <= n; i += LANES) sum += at(a + i) * at(b + i);
  float rest = total(sum);
  for (; i < n; ++i) rest += a[i] * b[i];
  return rest;
}

// How a distribution p = softmax(factor x) is spread: its entropy in nats, and how far its two largest probabilities lie apart.
static void spread(const float* x, const float* p, int n, float factor, float* entropy, float* gap) {
  float top = largest(x, n), first = 0, second = 0, sum = 0;  // of p x, which is the entropy but for a constant
  auto add = [&](float share) { second = std::max(second, std::min(first, share)), first = std::max(first, share); };
  int i = 0;
  Vec most{}, next{}, part{};
  for (; i + LANES <= n; i += LANES) {
    Vec share = at(p + i), least = share < most ? share : most, term = share * (at(x + i) - top);
    next = least > next ? least : next;
    most = share > most ? share : most;
    part += share > 0.0f ? term : Vec{};
  }
  for (int j = 0; j < LANES; ++j) add(most[j]), add(next[j]);
  for (; i < n; ++i) {
    add(p[i]);
    if (p[i] > 0) sum += p[i] * (x[i] - top);
  }
  *entropy = std::max(0.0f, -std::log(first) - factor * (sum + total(part)));
  *gap = n > 1 ? first - second : 0.0f;
}

// The index in whose share of p [n], of any positive scale, the point u in [0, 1) lies: `sampling.inverted`, in one call.
static int64_t draw(const float* p, int64_t n, double u) {
  constexpr int64_t BLOCK = 64;
  static thread_local std::vector<double> before;  // the running sum in front of each block, and the whole at last
  before.assign(1, 0.0);
  for (int64_t start = 0; start < n; start += BLOCK) {
    double parts[8] = {};
    int64_t end = std::min(start + BLOCK, n), even = start + (end - start) / 8 * 8;
    for (int64_t i = start; i < even; i += 8)
      for (int j = 0; j < 8; ++j) parts[j] += p[i + j];
    for (int64_t i = even; i < end; ++i) parts[0] += p[i];
    double sum = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
    before.push_back(before.back() + sum);
  }
  double point = u * before.back();
  int64_t num = int64_t(before.size()) - 1;
  int64_t block = std::min(int64_t(std::upper_bound(before.begin() + 1, before.end(), point) - before.begin()) - 1, num - 1);
  double sum = before[block];
  for (int64_t i = block * BLOCK; i < std::min((block + 1) * BLOCK, n); ++i)
    if ((sum += p[i]) > point) return i;
  for (int64_t i = std::min((block + 1) * BLOCK, n) - 1; i > 0; --i)  // rounding carried the point past the block
    if (p[i] > 0) return i;
  return 0;
}
