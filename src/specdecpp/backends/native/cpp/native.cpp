// A pass of a Llama-like model as one call, sums in float32, and the halves of a step: what `library.py` compiles or has shipped.
//
//   vectors -> memory, threads -> matrix -> packing, inputs -> sums, rounded_sums -> products -> model -> pass -> step
//
// Every weight is read once for all rows of a pass, and the bits of a row do not depend on how many there are.

#include "step.h"

extern "C" {

// Whether products of whole numbers are to be had (`rounds_to`): not on every processor.
bool native_has_dots() { return HAS_DOTS; }

// Null where there is no memory.
Model* native_new(const Shape* shape) {
  try {
    return new Model(*shape);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void native_free(Model* m) { delete m; }

// A matrix of a layer, or with layer -1 of the ends: rows [out, in] of a kind of GGML's, `stride` bytes apart, and biases [out] or null.
// False where there is no memory, or the kind is unknown or not for rows of this width. Packed by so many threads.
bool native_matrix(Model* m, int layer, int role, int kind, const uint8_t* rows, int out, int in, int64_t stride, const float* bias, int threads) {
  Matrix& matrix = m->layer(layer).matrices[role];
  if (!pack(matrix, m->arena, kind, rows, out, in, stride, threads)) return false;
  if (!bias) return true;
  uint8_t* to = m->arena.take(matrix.num_panels() * PANEL * 4);
  if (to) std::memcpy(to, bias, size_t(out) * 4), matrix.bias = reinterpret_cast<float*>(to);
  return to;
}

// Which tokens the rows of the output layer are of [num], in rising order; without it row i is of token i.
void native_output_ids(Model* m, const int32_t* ids, int num) { m->output_ids.assign(ids, ids + num); }

// A copy of the rows of the output layer for some tokens [num], in rising order. Null where there is no memory.
Subset* native_subset(const Model* m, const int32_t* ids, int num) {
  auto found = new Subset;
  if (found->take(m->ends.matrices[OUTPUT], ids, num)) return found;
  delete found;
  return nullptr;
}

void native_subset_free(Subset* subset) { delete subset; }

// A norm's weights [size].
bool native_norm(Model* m, int layer, int role, const float* weight, int size) {
  uint8_t* to = m->arena.take(size_t(size) * 4);
  if (to) std::memcpy(to, weight, size_t(size) * 4), m->layer(layer).norms[role] = reinterpret_cast<float*>(to);
  return to;
}

// How far a layer sees (0: all positions), and which table of angles it has.
void native_layer(Model* m, int layer, int window, int angles) { m->layers[layer].window = window, m->layers[layer].angles = angles; }

// A table of cosines and sines of positions from the first [n, s], which has to stay where it is.
void native_angles(Model* m, int table, const float* cos, const float* sin) { m->angles[table] = {cos, sin}; }

Sequence* native_sequence() { return new Sequence; }

void native_sequence_free(Sequence* seq) {
  release(seq->keys), release(seq->values);
  delete seq;
}

int native_capacity(const Sequence* seq) { return seq->capacity; }

// Room for `capacity` positions or more in `to`, the first `length` of them those of `from`. False where there is no memory; nothing
// is lost then. What has room already keeps its memory: new pages take longer than the copy.
bool native_copy(const Model* m, const Sequence* from, Sequence* to, int capacity, int length) {
  const Shape& s = m->s;
  bool has_room = to != from && to->capacity >= capacity;
  capacity = has_room ? to->capacity : int(up(capacity, PANEL));
  size_t planes = size_t(s.layers) * s.kv_heads, size = planes * s.size * capacity + PANEL;  // a panel may reach past the last value
  auto keys = has_room ? to->keys : reinterpret_cast<float*>(zeros(size * 4));
  auto values = has_room ? to->values : reinterpret_cast<float*>(zeros(size * 4));
  if (!keys || !values) return release(keys), release(values), false;
  for (size_t plane = 0; plane < planes && from->keys; ++plane) {
    size_t at = plane * s.size * capacity, of = plane * s.size * from->capacity;
    std::memcpy(keys + at, from->keys + of, up(length, PANEL) * s.size * 4);
    std::memcpy(values + at, from->values + of, size_t(length) * s.size * 4);
  }
  if (!has_room) release(to->keys), release(to->values);
  *to = {capacity, keys, values};
  return true;
}

int64_t native_draw(const float* p, int64_t n, double u) { return draw(p, n, u); }

// The distribution p [n] of logits x [n], which a penalty changes in place.
void native_distribution(float* x, int n, const Sampling* s, float* p) { penalise(x, n, *s), distribution(x, n, *s, p); }

// P(accepted) of a token by a head, `x` being the logits and p [n] the distribution softmax(factor x) that it was drawn from.
double native_judge(const Head* head, const float* state, int64_t token, int depth, const float* x, const float* p, int n, float factor) {
  float scalars[] = {float(std::log(std::max(p[token], 1e-30f))), 0, 0, float(depth)};
  spread(x, p, n, factor, scalars + ENTROPY, scalars + GAP);
  return judged(*head, state, token, scalars);
}

// A pass over tokens of several sequences, those of each after those of the one before.
void native_pass(Model* m, int threads, Part* parts, int num_parts, const int64_t* tokens, float* logits, float* states, int seen, float* inputs) {
  pass(*m, threads, parts, num_parts, tokens, logits, states, seen, inputs);
}

// How many first layers two models have in common (but for their angles).
int32_t native_common(const Model* m, const Model* other) { return m->common(*other); }

// A model whose first layers are another's has them no second time. The other has to stay.
void native_share(Model* m, const Model* other, int num) { m->share(*other, num); }

// Tokens into the caches of two models with so many first layers in common: these are computed once.
void native_extend_both(Model* m, int threads, Sequence* seq, Model* other, int other_threads, Sequence* to, const int64_t* tokens, int n, int start,
                        int common) {
  const Shape& s = m->s;
  std::vector<float> states(size_t(n) * s.width);
  Part part{seq, start, n, 0, 0}, further{to, start, n, 0, 0};
  pass(*m, threads, &part, 1, tokens, nullptr, nullptr, common, states.data());
  size_t end = size_t(start) + n, first = start / PANEL * PANEL;  // keys lie in blocks; those before `start` are the same in both
  for (int plane = 0; plane < common * s.kv_heads; ++plane) {
    size_t of = size_t(plane) * s.size * seq->capacity, at = size_t(plane) * s.size * to->capacity;
    std::memcpy(to->keys + at + first * s.size, seq->keys + of + first * s.size, (up(end, PANEL) - first) * s.size * 4);
    std::memcpy(to->values + at + start * size_t(s.size), seq->values + of + start * size_t(s.size), size_t(n) * s.size * 4);
  }
  if (common < other->s.layers) pass(*other, other_threads, &further, 1, tokens, nullptr, nullptr, -1, nullptr, nullptr, common, states.data());
}

}  // extern "C"
