// Products of rows with matrices: every weight is read once for a block of rows, and a row's bits depend on nothing else.

#pragma once

#include "rounded_sums.h"

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

// One panel of codes for n rows of x.
template <int BITS, int GROUP>
static void coded_panel(const Matrix& m, const Inputs& x, int n, const Store& put, int panel) {
#if HAS_DOTS
  auto rounded = [&](auto form, auto most) {
    in_blocks<decltype(most)::num>(n, [&](int row, auto size) { rounded_sums<BITS, GROUP, Codes(decltype(form)::num), decltype(size)::num>(m, x, put, panel, row); });
  };
  if (x.form == Codes::BYTES) return rounded(Size<int(Codes::BYTES)>(), Size<MANY>());
  if (x.form == Codes::PLANES) return rounded(Size<int(Codes::PLANES)>(), Size<FEW>());
  if (x.form == Codes::WORDS) return rounded(Size<int(Codes::WORDS)>(), Size<MANY>());
#endif
  in_blocks<ROWS>(n, [&](int row, auto size) { coded_sums<decltype(size)::num>(m, x, put, panel, row); });
}
static void coded_panel(const Matrix& m, const Inputs& x, int n, const Store& put, int panel) {
  if (m.bits == 4) return (m.group == 32 ? coded_panel<4, 32> : coded_panel<4, 16>)(m, x, n, put, panel);
  if (m.bits == 5) return coded_panel<5, 32>(m, x, n, put, panel);
  if (m.bits == 6) return coded_panel<6, 16>(m, x, n, put, panel);
  coded_panel<8, 32>(m, x, n, put, panel);
}

// How many plain panels are summed at once: a single sum of few rows would wait for itself. Codes give it enough else to do.
template <int N>
constexpr int panels_at_once() { return LANES < 16 ? 1 : N == 1 ? 4 : N == 2 ? 2 : 1; }

// Panels `begin` to `end` of x W for n rows of x.
static void product(const Matrix& m, const Inputs& x, int n, int begin, int end, const Store& put) {
  int panel = begin;
  if (m.is_coded()) {
    for (; panel < end; ++panel) coded_panel(m, x, n, put, panel);
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
