// Products of rows with matrices: every weight is read once for a block of rows, and a row's bits depend on nothing else.

#pragma once

#include "rounded_sums.h"

// work(first row, N as a type) for n rows in blocks of nearly one size, of at most MOST rows.
template <int N>
struct Size {
  static constexpr int num = N;
};
template <int MOST, class Work>
static inline void in_blocks(int n, const Work& work) {
  for (int row = 0, sweeps = (n + MOST - 1) / MOST; sweeps; --sweeps) {
    int block = (n - row + sweeps - 1) / sweeps;
    switch (block) {
#define CASE(N) \
  case N:       \
    if constexpr (N <= MOST) work(row, Size<N>()); \
    break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
    row += block;
  }
}

template <class Read, int N, int P>
static inline void plain_panels(const Matrix& m, const float* x, const Store& put, int panel, int row) {
  const float* bias = m.bias ? m.bias + panel * PANEL : nullptr;
  plain_sums<Read, N, P>(m.panel(panel), Read::STEP, m.panel_bytes(), bias, m.in, x, apart(m.in), put, panel, row);
}

template <int N, int P>
static inline void plain_panels(const Matrix& m, const Inputs& inputs, const Store& put, int panel, int row) {
  const float* x = inputs.x + row * apart(m.in);
  if (m.form == Form::WHOLE) return plain_panels<Whole, N, P>(m, x, put, panel, row);
  if (m.form == Form::HALF) return plain_panels<Half, N, P>(m, x, put, panel, row);
  plain_panels<Float16, N, P>(m, x, put, panel, row);
}

template <int N>
static inline void coded_panel(const Matrix& m, const Inputs& inputs, const Store& put, int panel, int row) {
  bool is_nibbles = m.form == Form::NIBBLES;
#if HAS_DOTS
  if (inputs.codes) {
    Inputs from = inputs.from(m, row);
    if (from.width == 1) return (is_nibbles ? rounded_sums<true, 1, N> : rounded_sums<false, 1, N>)(m, from, put, panel, row);
    return (is_nibbles ? rounded_sums<true, 2, N> : rounded_sums<false, 2, N>)(m, from, put, panel, row);
  }
#endif
  const float *x = inputs.x + row * apart(m.in), *sums = inputs.sums + row * m.num_groups();
  (is_nibbles ? coded_sums<Nibbles, N> : coded_sums<Bytes, N>)(m, x, apart(m.in), sums, put, panel, row);
}

// How many plain panels are summed at once: a single sum of few rows would wait for itself. Codes give it enough else to do.
template <int N>
constexpr int panels_at_once() { return LANES < 16 ? 1 : N == 1 ? 4 : N == 2 ? 2 : 1; }

// Panels `begin` to `end` of x W for n rows of x.
static void product(const Matrix& m, const Inputs& x, int n, int begin, int end, const Store& put) {
  int panel = begin;
  if (m.is_coded()) {
    for (; panel < end; ++panel)
      in_blocks<ROWS>(n, [&](int row, auto size) { coded_panel<decltype(size)::num>(m, x, put, panel, row); });
    return;
  }
  if (n <= 2)
    in_blocks<2>(n, [&](int row, auto size) {
      constexpr int N = decltype(size)::num, P = panels_at_once<N>();
      for (; panel + P <= end; panel += P) plain_panels<N, P>(m, x, put, panel, row);
    });
  for (; panel < end; ++panel)
    in_blocks<ROWS>(n, [&](int row, auto size) { plain_panels<decltype(size)::num, 1>(m, x, put, panel, row); });
}

// The thread's share of so many panels.
struct Share {
  int begin, end;
  Share(int num, int thread, int threads)
      : begin(int(int64_t(num) * thread / threads)), end(int(int64_t(num) * (thread + 1) / threads)) {}
};
