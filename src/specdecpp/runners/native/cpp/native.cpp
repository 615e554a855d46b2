// A pass of a Llama-like model as one call, in float32: what `native.py` compiles for the machine it runs on.
//
// A small model's step is bound by how often something is called and by how often threads are waited for, a larger one's by
// how fast its weights come from memory. So there is one call a pass, one set of threads that stays in it (those of torch, by the
// OpenMP that it has loaded, see team.h), and every weight is read once for all rows of the pass.
//
//   embed -> each layer: [norm, q k v | turn, store, attend | out + residual | norm, gate up, SiLU | down + residual] -> norm, logits
//
// Around it the halves of a round, for the same reason: `native_propose` draws candidates until a floor is undercut, `native_verify`
// tests them.
//
// A bar is a barrier. n rows, w width, h heads of s values, g of them share keys and values, f width of the feed-forward.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 14;  // floats of a register; rows whose sums of two registers each still fit
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 6;
#else
constexpr int LANES = 4, ROWS = 6;
#endif
constexpr int PANEL = 2 * LANES;
constexpr int AHEAD = 1024;  // floats: the processor's own reading ahead ends with every page, and is late with several rows

typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), aligned(4)));
constexpr uint32_t HIGH = 0xffff0000u;  // the half of a float32 that is its bfloat16
typedef uint32_t Words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline Vec& at(float* p) { return *reinterpret_cast<Vec*>(p); }
static inline const Vec& at(const float* p) { return *reinterpret_cast<const Vec*>(p); }
static inline Vec all(float x) { return Vec{} + x; }
static inline Vec floats(Words bits) {
  Vec x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
static inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
static inline uint32_t word_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// exp to the last two bits: 2^n times a polynomial for what is left, |r| <= ln 2 / 2. Below -87 it is 0.
static inline Vec exponential(Vec x) {
  Vec low = all(-87.0f);
  Ints tiny = x < low;
  x = x < low ? low : x;
  Vec high = all(88.0f);
  x = x > high ? high : x;
  Vec shifted = x * 1.44269504088896f + 12582912.0f;  // the sum's last bits are the nearest integer
  Vec n = shifted - 12582912.0f;
  Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return tiny ? Vec{} : p * floats(Words((__builtin_convertvector(n, Ints) + 127) << 23));
}

static inline size_t up(size_t num, size_t to) { return (num + to - 1) / to * to; }

// Zeros, or null. What is large lies in large pages where the system has them: small ones end every stretch of reading ahead
// after 4 kB, and the processor knows the places of a few thousand of them only.
static float* room(size_t num) {
  constexpr size_t LARGE = 1 << 21;
  size_t bytes = num * 4, page = bytes < LARGE / 2 ? 64 : LARGE;
  bytes = up(bytes, page);
  void* p = std::aligned_alloc(page, bytes);
#if defined(MADV_HUGEPAGE)
  if (p && page == LARGE) madvise(p, bytes, MADV_HUGEPAGE);
#endif
  if (p) std::memset(p, 0, bytes);
  return static_cast<float*>(p);
}

// Where the threads of a pass wait for each other.
class Barrier {
 public:
  explicit Barrier(int size) : size_(size) {}
  void wait() {
    if (size_ == 1) return;
    uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins)
        if (spins < 1 << 10) relax(); else std::this_thread::yield();
    }
  }

 private:
  int size_;
  std::atomic<uint32_t> phase_{0};
  std::atomic<int> arrived_{0};
};
#include "team.h"

// A matrix [out, in] in panels: the weights of PANEL outputs lie together, input by input. Where all are numbers that bfloat16 has too
// only those halves of them are kept, in words of two: LANES outputs in the low halves, the next LANES in the high ones. Its memory is
// the model's.
struct Matrix {
  int in = 0, out = 0;
  bool is_half = false;
  float* panels = nullptr;
  float* bias = nullptr;

  static size_t size(int outputs, int inputs, bool is_half) { return up(outputs, PANEL) * inputs / (1 + is_half) + up(outputs, PANEL); }
  int num_panels() const { return (out + PANEL - 1) / PANEL; }
  int step() const { return is_half ? LANES : PANEL; }
  const float* panel(int number) const { return panels + size_t(number) * in * step(); }
  float weight(int o, int i) const {
    const float* row = panel(o / PANEL) + size_t(i) * step();
    if (!is_half) return row[o % PANEL];
    uint32_t both = word_of(row[o % LANES]);
    return float_of(o % PANEL < LANES ? both << 16 : both & HIGH);
  }
  void set(int o, const float* row) {
    for (int i = 0; i < in; ++i) {
      float& to = panels[(size_t(o / PANEL) * in + i) * step() + o % step()];
      if (!is_half) to = row[i];
      else to = float_of(word_of(to) | (o % PANEL < LANES ? word_of(row[i]) >> 16 : word_of(row[i])));
    }
  }
};

// The sums of PANEL outputs for N rows of x, which lie `stride` apart; the weights of an input lie `step` after those of the one
// before. `put` gets (row, first sums, second sums).
template <int N, bool IS_HALF, class Put>
static inline void panel_sums(const float* w, int step, const float* b, int in, const float* x, size_t stride, int row, Put put) {
  Vec first[N], second[N];
  for (int r = 0; r < N; ++r) first[r] = at(b), second[r] = at(b + LANES);
  for (int i = 0; i < in; ++i, w += step) {
    __builtin_prefetch(w + AHEAD, 0, 2);
    Vec w0, w1;
    if (IS_HALF) {
      Words both = *reinterpret_cast<const Words*>(w);
      w0 = floats(both << 16), w1 = floats(both & HIGH);
    } else {
      __builtin_prefetch(w + AHEAD + LANES, 0, 2);
      w0 = at(w), w1 = at(w + LANES);
    }
    for (int r = 0; r < N; ++r) {
      float value = x[r * stride + i];
      first[r] += w0 * value;
      second[r] += w1 * value;
    }
  }
  for (int r = 0; r < N; ++r) put(row + r, first[r], second[r]);
}

// The same for any number of rows, in blocks of one size as far as that goes.
template <bool IS_HALF, class Put>
static inline void sums(const float* w, int step, const float* b, int in, const float* x, size_t stride, int n, Put put) {
  for (int row = 0, sweeps = (n + ROWS - 1) / ROWS; sweeps; --sweeps) {
    int block = (n - row + sweeps - 1) / sweeps;
    const float* of = x + row * stride;
    switch (block) {
#define CASE(N) \
  case N: panel_sums<N, IS_HALF>(w, step, b, in, of, stride, row, put); break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(__AVX512F__)
      CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#endif
#undef CASE
    }
    row += block;
  }
}

// How far apart rows of so many values lie that products read: never a power of two, where rows would share a few places of the cache.
static inline size_t apart(int width) { return (up(width, LANES) / LANES | 1) * LANES; }

// The thread's panels of x W for n rows of x.
template <class Put>
static void product(const Matrix& m, const float* x, int n, int thread, int threads, Put put) {
  int begin = int(int64_t(m.num_panels()) * thread / threads), end = int(int64_t(m.num_panels()) * (thread + 1) / threads);
  for (int panel = begin; panel < end; ++panel) {
    auto here = [&](int row, Vec a, Vec b) { put(panel, row, a, b); };
    const float *w = m.panel(panel), *b = m.bias + panel * PANEL;
    if (m.is_half) sums<true>(w, LANES, b, m.in, x, apart(m.in), n, here);
    else sums<false>(w, PANEL, b, m.in, x, apart(m.in), n, here);
  }
}

// Writes sums [n, out], the last panel as far as the matrix goes.
struct Store {
  float* y;
  int out;
  bool adds;
  void operator()(int panel, int row, Vec a, Vec b) const {
    float* to = y + size_t(row) * out + panel * PANEL;
    int room = out - panel * PANEL;
    if (room >= PANEL) {
      if (adds) a += at(to), b += at(to + LANES);
      at(to) = a, at(to + LANES) = b;
      return;
    }
    alignas(64) float sums[PANEL];
    at(sums) = a, at(sums + LANES) = b;
    for (int i = 0; i < room; ++i) to[i] = sums[i] + (adds ? to[i] : 0.0f);
  }
};

static inline float total(Vec v) {
  float sum = 0;
  for (int i = 0; i < LANES; ++i) sum += v[i];
  return sum;
}

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

struct Layer {
  Matrix qkv, out, gate_up, down;
  float *norm, *mlp_norm, *q_norm = nullptr, *k_norm = nullptr;
};

struct Shape {
  int32_t layers, width, heads, kv_heads, size, hidden, vocab, is_half;
  float eps;
};

struct Model {
  Shape s;
  std::vector<Layer> layers;
  Matrix output;
  float* final_norm = nullptr;
  void* embedding = nullptr;  // rows of floats or of their high halves; null where it is the output layer
  std::vector<float> x, qkv, mixed, act;
  std::vector<std::vector<float>> h, q, scores;  // of each thread
  explicit Model(const Shape& shape) : s(shape), layers(shape.layers) {
    auto size = [&](int outputs, int inputs) { return Matrix::size(outputs, inputs, s.is_half); };
    size_t layer = size(joined(), s.width) + size(s.width, mix()) + size(pairs(), s.width) + size(s.width, s.hidden) +
                   2 * up(s.width, LANES) + 2 * up(s.size, LANES);
    free_ = memory_ = room(s.layers * layer + size(s.vocab, s.width) + up(s.width, LANES));
  }
  ~Model() { std::free(memory_), std::free(embedding); }

  int joined() const { return (s.heads + 2 * s.kv_heads) * s.size; }
  int mix() const { return s.heads * s.size; }
  int pairs() const { return (s.hidden + LANES - 1) / LANES * PANEL; }  // a panel has the gate and the up of the same places
  bool has_memory() const { return memory_; }

  void embed(int64_t token, float* x) const {
    auto floats = static_cast<const float*>(embedding);
    auto halves = static_cast<const uint16_t*>(embedding);
    for (int64_t i = 0, first = token * s.width; i < s.width; ++i)
      x[i] = !embedding ? output.weight(int(token), int(i)) : s.is_half ? float_of(uint32_t(halves[first + i]) << 16) : floats[first + i];
  }

  float* copied(const float* from, size_t num) {
    float* to = free_;
    free_ += up(num, LANES);
    std::memcpy(to, from, num * 4);
    return to;
  }
  void make(Matrix& matrix, int outputs, int inputs) {
    matrix.in = inputs, matrix.out = outputs, matrix.is_half = s.is_half;
    matrix.panels = free_, matrix.bias = free_ + up(outputs, PANEL) * inputs / (1 + matrix.is_half);
    free_ += Matrix::size(outputs, inputs, s.is_half);
  }

 private:
  float *memory_, *free_;
};

// One sequence: for each layer and key-value head keys [block of PANEL positions, value, position of the block] and values
// [position, value].
struct Sequence {
  int capacity = 0;
  float *keys = nullptr, *values = nullptr;
};

static void turn(float* v, const float* cos, const float* sin, int size) {
  int half = size / 2;
  for (int i = 0; i < half; ++i) {
    float a = v[i], b = v[i + half];
    v[i] = a * cos[i] + b * sin[i];
    v[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

// Attention of one key-value head: its keys and values of the new rows are stored, its query heads read all they may see. Queries go
// through the cache in blocks, as rows of a product do through a matrix.
static void attend(Model& m, const Layer& layer, Sequence& seq, int l, int kv, int start, int n, const float* cos, const float* sin, int thread) {
  const Shape& s = m.s;
  int size = s.size, group = s.heads / s.kv_heads, joined = m.joined();
  float* keys = seq.keys + (size_t(l) * s.kv_heads + kv) * size * seq.capacity;
  float* values = seq.values + (size_t(l) * s.kv_heads + kv) * size * seq.capacity;
  for (int r = 0; r < n; ++r) {
    float* row = m.qkv.data() + size_t(r) * joined;
    float* k = row + (s.heads + kv) * size;
    int place = start + r;
    if (layer.k_norm) norm(k, layer.k_norm, s.eps, 1, size, k, size);
    turn(k, cos + r * size, sin + r * size, size);
    float* to = keys + size_t(place / PANEL) * size * PANEL + place % PANEL;
    for (int d = 0; d < size; ++d) to[d * PANEL] = k[d];
    std::memcpy(values + size_t(place) * size, row + (s.heads + s.kv_heads + kv) * size, size * 4);
  }
  alignas(64) static const float none[PANEL] = {};
  float *queries = m.q[thread].data(), *scores = m.scores[thread].data();
  float factor = 1.0f / std::sqrt(float(size));
  int num = n * group;  // query i is head kv * group + i % group of row i / group
  for (int first = 0; first < num; first += ROWS) {
    int block = std::min(num - first, ROWS), end = start + (first + block - 1) / group + 1;
    size_t stride = apart(up(end, PANEL));
    for (int i = 0; i < block; ++i) {
      int r = (first + i) / group;
      const float* of = m.qkv.data() + size_t(r) * joined + (kv * group + (first + i) % group) * size;
      float* q = queries + size_t(i) * size;
      std::memcpy(q, of, size * 4);
      if (layer.q_norm) norm(q, layer.q_norm, s.eps, 1, size, q, size);
      turn(q, cos + r * size, sin + r * size, size);
      for (int d = 0; d < size; ++d) q[d] *= factor;
    }
    for (int p = 0; p < end; p += PANEL)
      sums<false>(keys + size_t(p) * size, PANEL, none, size, queries, size, block, [&](int i, Vec a, Vec b) {
        at(scores + i * stride + p) = a, at(scores + i * stride + p + LANES) = b;
      });
    for (int i = 0; i < block; ++i) {
      float* of = scores + i * stride;
      int seen = start + (first + i) / group + 1, padded = int(up(end, LANES));
      for (int p = seen; p < padded; ++p) of[p] = -INFINITY;
      Vec most = at(of);
      for (int p = LANES; p < padded; p += LANES) most = at(of + p) > most ? at(of + p) : most;
      float top = most[0];
      for (int j = 1; j < LANES; ++j) top = std::max(top, most[j]);
      Vec shares{};
      for (int p = 0; p < padded; p += LANES) shares += at(of + p) = exponential(at(of + p) - top);
      Vec scale = all(1.0f / total(shares));
      for (int p = 0; p < padded; p += LANES) at(of + p) *= scale;
    }
    for (int d = 0; d < size; d += PANEL)
      sums<false>(values + d, size, none, end, scores, stride, block, [&](int i, Vec a, Vec b) {
        float* to = m.mixed.data() + (first + i) / group * apart(m.mix()) + (kv * group + (first + i) % group) * size + d;
        at(to) = a;
        if (d + LANES < size) at(to + LANES) = b;
      });
  }
}

extern "C" {

// Null where there is no memory.
Model* native_new(const Shape* shape) {
  Model* m = new Model(*shape);
  if (m->has_memory()) return m;
  delete m;
  return nullptr;
}

// qkv [(h + 2 g) s, w], its bias or null; out [w, h s]; gate and up [f, w]; down [w, f]; the norms of heads or null.
void native_layer(Model* m, int l, const float* norm, const float* qkv, const float* bias, const float* q_norm, const float* k_norm,
                  const float* out, const float* mlp_norm, const float* gate, const float* up, const float* down) {
  const Shape& s = m->s;
  Layer& layer = m->layers[l];
  layer.norm = m->copied(norm, s.width), layer.mlp_norm = m->copied(mlp_norm, s.width);
  if (q_norm) layer.q_norm = m->copied(q_norm, s.size), layer.k_norm = m->copied(k_norm, s.size);
  m->make(layer.qkv, m->joined(), s.width);
  for (int o = 0; o < m->joined(); ++o) layer.qkv.set(o, qkv + size_t(o) * s.width);
  if (bias) std::memcpy(layer.qkv.bias, bias, m->joined() * 4);
  m->make(layer.out, s.width, m->mix());
  for (int o = 0; o < s.width; ++o) layer.out.set(o, out + size_t(o) * m->mix());
  m->make(layer.gate_up, m->pairs(), s.width);
  for (int o = 0; o < s.hidden; ++o) {
    layer.gate_up.set(o / LANES * PANEL + o % LANES, gate + size_t(o) * s.width);
    layer.gate_up.set(o / LANES * PANEL + LANES + o % LANES, up + size_t(o) * s.width);
  }
  m->make(layer.down, s.width, s.hidden);
  for (int o = 0; o < s.width; ++o) layer.down.set(o, down + size_t(o) * s.hidden);
}

// `embedding` [v, w] is null where it is the output layer. False where there is no memory.
bool native_ends(Model* m, const float* embedding, const float* norm, const float* output, int rows) {
  const Shape& s = m->s;
  m->final_norm = m->copied(norm, s.width);
  m->make(m->output, s.vocab, s.width);
  for (int o = 0; o < s.vocab; ++o) m->output.set(o, output + size_t(o) * s.width);
  if (!embedding) return true;
  size_t num = size_t(rows) * s.width;
  m->embedding = room(s.is_half ? (num + 1) / 2 : num);
  if (!m->embedding) return false;
  if (s.is_half) for (size_t i = 0; i < num; ++i) static_cast<uint16_t*>(m->embedding)[i] = uint16_t(word_of(embedding[i]) >> 16);
  else std::memcpy(m->embedding, embedding, num * 4);
  return true;
}

void native_free(Model* m) { delete m; }

Sequence* native_sequence() { return new Sequence; }

void native_sequence_free(Sequence* seq) {
  std::free(seq->keys), std::free(seq->values);
  delete seq;
}

int native_capacity(const Sequence* seq) { return seq->capacity; }

// Room for `capacity` positions, the first `length` kept. False where there is no memory; nothing is lost then.
bool native_grow(const Model* m, Sequence* seq, int capacity, int length) {
  const Shape& s = m->s;
  capacity = int(up(capacity, PANEL));
  size_t planes = size_t(s.layers) * s.kv_heads, size = planes * s.size * capacity + PANEL;  // a panel may reach past the last value
  float *keys = room(size), *values = room(size);
  if (!keys || !values) return std::free(keys), std::free(values), false;
  for (size_t plane = 0; plane < planes && seq->keys; ++plane) {
    size_t to = plane * s.size * capacity, from = plane * s.size * seq->capacity;
    std::memcpy(keys + to, seq->keys + from, up(length, PANEL) * s.size * 4);
    std::memcpy(values + to, seq->values + from, size_t(length) * s.size * 4);
  }
  std::free(seq->keys), std::free(seq->values);
  *seq = {capacity, keys, values};
  return true;
}

// The index in whose share of p [n], of any positive scale, the point u in [0, 1) lies: `sampling.inverted`, in one call.
int64_t native_draw(const float* p, int64_t n, double u) {
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

// Reads n tokens at `start`; logits [rows, v] and states [rows, w] of the last `rows`. cos and sin [n, s], the sign with the sines.
// One call at a time for a model.
void native_extend(Model* m, int threads, Sequence* seq, const int64_t* tokens, int n, int start, int rows, const float* cos, const float* sin,
                   float* logits, float* states) {
  const Shape& s = m->s;
  int joined = m->joined();
  if (m->x.size() < size_t(n) * s.width) {
    m->x.resize(size_t(n) * s.width), m->qkv.resize(size_t(n) * joined);
    m->mixed.resize(n * apart(m->mix())), m->act.resize(n * apart(s.hidden));
  }
  if (m->h.size() < size_t(threads)) m->h.resize(threads), m->q.resize(threads), m->scores.resize(threads);
  for (int t = 0; t < threads; ++t) {
    if (m->h[t].size() < n * apart(s.width)) m->h[t].resize(n * apart(s.width));
    if (size_t room = ROWS * apart(up(start + n, PANEL)); m->scores[t].size() < room) m->scores[t].resize(2 * room);
    m->q[t].resize(size_t(ROWS) * s.size);
  }
  float* x = m->x.data();
  for (int r = 0; r < n; ++r) m->embed(tokens[r], x + size_t(r) * s.width);
  auto pass = [&](int t, int threads, Barrier& barrier) {
    float* h = m->h[t].data();
    for (int l = 0; l < s.layers; ++l) {
      const Layer& layer = m->layers[l];
      norm(x, layer.norm, s.eps, n, s.width, h, apart(s.width));  // each thread for itself: cheaper than to wait
      product(layer.qkv, h, n, t, threads, Store{m->qkv.data(), joined, false});
      barrier.wait();
      for (int kv = t; kv < s.kv_heads; kv += threads) attend(*m, layer, *seq, l, kv, start, n, cos, sin, t);
      barrier.wait();
      product(layer.out, m->mixed.data(), n, t, threads, Store{x, s.width, true});
      barrier.wait();
      norm(x, layer.mlp_norm, s.eps, n, s.width, h, apart(s.width));
      product(layer.gate_up, h, n, t, threads, [&](int panel, int row, Vec gate, Vec up) {
        alignas(64) float sums[LANES];
        at(sums) = gate / (1.0f + exponential(-gate)) * up;
        int first = panel * LANES;
        std::memcpy(m->act.data() + row * apart(s.hidden) + first, sums, 4 * std::min(LANES, s.hidden - first));
      });
      barrier.wait();
      product(layer.down, m->act.data(), n, t, threads, Store{x, s.width, true});
      barrier.wait();
    }
    const float* last = x + size_t(n - rows) * s.width;
    norm(last, m->final_norm, s.eps, rows, s.width, h, apart(s.width));
    for (int r = t; r < rows; r += threads) std::memcpy(states + size_t(r) * s.width, h + r * apart(s.width), s.width * 4);
    product(m->output, h, rows, t, threads, Store{logits, s.vocab, false});
  };
  together(threads, pass);
}

}  // extern "C"

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

// What a half round is told and says. `cos` and `sin` are of all positions, from the first.
struct Drafting {
  const int64_t *unread, *ends;
  const double *uniforms, *least;
  const Head* head;
  const float *cos, *sin;
  int64_t* tokens;            // said: the candidates,
  float* rows;                // [limit, v] q or, greedily, logits,
  double *confidence, *accept;  // q of each and what the head expects of it,
  double forward_s, head_s;   // seconds,
  int32_t why;                // and why drafting stopped
  int32_t num_unread, num_ends, start, limit, evidence;
  float temperature;
};
struct Verifying {
  const int64_t* tokens;  // those the target has not read and the candidates
  const double* coins;    // a uniform for each candidate, and one for the token that follows
  const float *q, *cos, *sin;
  float *logits, *states;  // [num + 1, v], [num + 1, w]
  int64_t next;            // said
  double forward_s;
  int32_t num_accepted;
  int32_t num_tokens, num, start, is_block;
  float temperature;
};

static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

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

// softmax(x / temperature).
static void law(const float* x, int n, float temperature, float* p) {
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

// How a law p = softmax(factor x) is spread: its entropy in nats, and how far its two largest probabilities lie apart.
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

extern "C" {

// Candidates of one round, as `drafting.propose` draws them; how many.
int native_propose(Model* m, int threads, Sequence* seq, Drafting* d) {
  const Shape& s = m->s;
  const int64_t* pending = d->unread;
  int num = 0, n = d->num_unread, start = d->start;
  static thread_local std::vector<float> logits, state;
  logits.resize(s.vocab), state.resize(s.width);
  bool reads_q = d->head || d->evidence == LAST_Q || d->evidence == PRODUCT_OF_Q;
  double evidence = 1.0;
  d->why = ON, d->forward_s = d->head_s = 0;
  while (num < d->limit) {
    if (!(evidence >= d->least[num])) return d->why = STOPPED, num;
    float* row = d->rows + size_t(num) * s.vocab;
    double started = now();
    float* said = d->temperature > 0 ? logits.data() : row;
    native_extend(m, threads, seq, pending, n, start, 1, d->cos + size_t(start) * s.size, d->sin + size_t(start) * s.size, said, state.data());
    d->forward_s += now() - started;
    int64_t& token = d->tokens[num];
    double q = 1.0;
    if (d->temperature > 0) {
      law(said, s.vocab, d->temperature, row);
      token = native_draw(row, s.vocab, d->uniforms[num]);
      q = row[token];
    } else {
      token = argmax(row, s.vocab);
      if (reads_q) law(row, s.vocab, 1.0f, logits.data()), q = logits[token];
    }
    d->confidence[num] = q;
    if (d->head) {
      started = now();
      const float *x = d->temperature > 0 ? said : row, *p = d->temperature > 0 ? row : logits.data();
      float factor = d->temperature > 0 ? 1.0f / d->temperature : 1.0f;
      d->accept[num] = judged(*d->head, state.data(), token, q, num + 1, x, p, s.vocab, factor);
      d->head_s += now() - started;
    }
    if (d->evidence == LAST_Q) evidence = q;
    if (d->evidence == PRODUCT_OF_Q) evidence *= q;
    if (d->evidence == SURVIVAL) evidence *= d->accept[num];
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
  law(p, vocab, v.temperature, p);
  *carry = 1.0f;
  for (int i = 0; i < v.num; ++i, p += vocab, q += vocab) {
    float ratio = p[candidates[i]] / q[candidates[i]], heads;
    if (!v.is_block && !(v.coins[i] < ratio)) return count;
    law(p + vocab, vocab, v.temperature, p + vocab);
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
void native_verify(Model* m, int threads, Sequence* seq, Verifying* v) {
  const Shape& s = m->s;
  int num = v->num, vocab = s.vocab, i = 0;
  const int64_t* candidates = v->tokens + v->num_tokens - num;
  double started = now();
  native_extend(m, threads, seq, v->tokens, v->num_tokens, v->start, num + 1, v->cos + size_t(v->start) * s.size, v->sin + size_t(v->start) * s.size,
                v->logits, v->states);
  v->forward_s = now() - started;
  if (v->temperature <= 0) {
    while (v->next = argmax(v->logits + size_t(i) * vocab, vocab), i < num && v->next == candidates[i]) ++i;
    v->num_accepted = i;
    return;
  }
  float carry;
  v->num_accepted = i = accepted(*v, candidates, vocab, &carry);
  const float* p = v->logits + size_t(i) * vocab;
  static thread_local std::vector<float> rest;
  rest.resize(vocab);
  bool is_drawn_anew = i < num && residual(p, v->q + size_t(i) * vocab, carry, vocab, rest.data()) > 0;
  v->next = native_draw(is_drawn_anew ? rest.data() : p, vocab, v->coins[num]);
}

}  // extern "C"
