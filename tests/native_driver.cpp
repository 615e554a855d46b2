// Plays recorded calls to the compiled backend and writes what they give: for processors that Python and torch do not run on here.
// See test_native_processors.py, which records them.
//
//   driver RECORD RESULTS
//
// A record is its name's first letters (8 bytes), the number of whole numbers, these (8 bytes each), the number of bytes, and these.

#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "native.cpp"

struct Record {
  std::string name;
  std::vector<int64_t> numbers;
  std::vector<uint8_t> bytes;

  bool read(std::istream& from) {
    char letters[9] = {};
    int64_t num = 0;
    if (!from.read(letters, 8)) return false;
    name = letters;
    from.read(reinterpret_cast<char*>(&num), 8), numbers.resize(num);
    from.read(reinterpret_cast<char*>(numbers.data()), num * 8);
    from.read(reinterpret_cast<char*>(&num), 8), bytes.resize(num);
    return bool(from.read(reinterpret_cast<char*>(bytes.data()), num));
  }
  int at(int i) const { return int(numbers.at(i)); }
  const float* floats(size_t from = 0) const { return reinterpret_cast<const float*>(bytes.data() + from); }
};

// Threads in the place of torch's.
static thread_local int number = 0, size = 1;
static void parallel(void (*work)(void*), void* task, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  auto as = [=](int i) { number = i, size = int(threads), work(task); };
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(as, int(i));
  as(0);
  for (auto& other : others) other.join();
}

int main(int, char** paths) {
  native_team(parallel, [] { return number; }, [] { return size; });
  std::ifstream from(paths[1], std::ios::binary);
  std::ofstream to(paths[2], std::ios::binary);
  std::vector<Record> kept;  // tables of angles stay where they are
  kept.reserve(64);
  Model* m = nullptr;
  Sequence* sequence = nullptr;
  auto write = [&](const auto& values) { to.write(reinterpret_cast<const char*>(values.data()), values.size() * sizeof values[0]); };
  for (Record r; r.read(from);) {
    bool is_done = true;
    if (r.name == "new") {
      native_free(m);
      is_done = m = native_new(reinterpret_cast<const Shape*>(r.bytes.data()));
    } else if (r.name == "matrix") {
      size_t rows = size_t(r.at(3)) * r.numbers.at(5);
      is_done = native_matrix(m, r.at(0), r.at(1), r.at(2), r.bytes.data(), r.at(3), r.at(4), r.numbers[5], r.at(6) ? r.floats(rows) : nullptr, 2);
    } else if (r.name == "norm") {
      is_done = native_norm(m, r.at(0), r.at(1), r.floats(), r.at(2));
    } else if (r.name == "layer") {
      native_layer(m, r.at(0), r.at(1), r.at(2));
    } else if (r.name == "angles") {
      kept.push_back(r);
      native_angles(m, r.at(0), kept.back().floats(), kept.back().floats(r.bytes.size() / 2));
    } else if (r.name == "sequence") {
      if (sequence) native_sequence_free(sequence);
      sequence = native_sequence();
      is_done = native_copy(m, sequence, sequence, r.at(0), 0);
    } else if (r.name == "extend") {  // threads, start, rows; tokens
      std::vector<int64_t> tokens(r.bytes.size() / 8);
      std::memcpy(tokens.data(), r.bytes.data(), r.bytes.size());
      std::vector<float> logits(size_t(r.at(2)) * m->s.vocab), states(size_t(r.at(2)) * m->s.width);
      Part part{sequence, r.at(1), int(tokens.size()), r.at(2), 0};
      native_pass(m, r.at(0), &part, 1, tokens.data(), logits.data(), states.data(), -1, nullptr);
      write(logits), write(states);
    } else if (r.name == "draw") {  // a millionth of u; probabilities
      write(std::vector<int64_t>{native_draw(r.floats(), int64_t(r.bytes.size() / 4), double(r.numbers.at(0)) * 1e-6)});
    } else {
      is_done = false;
    }
    if (!is_done) return std::fprintf(stderr, "%s cannot be done\n", r.name.c_str()), 1;
  }
  native_free(m);
  if (sequence) native_sequence_free(sequence);
}
