// The residual codes of one frame per request: a small decoder over a short row of its own, one code
// after the other, in one parallel region.
#pragma once

#include "decoder.h"

namespace omnistage {

// heads: num_codes packed projections to codebook_size.  tables: num_codes embedding tables.
struct Predictor {
  Model model;
  const void* final_norm;
  void* const* heads;
  void* const* tables;
  long num_codes, codebook_size;
};

// uniforms: [count, num_codes], each in [0, 1); negative takes the most probable code.
struct Sampling {
  const float* temperature;
  const int64_t* top_k;
  const double* top_p;
  const double* uniforms;
};

// Top-k, then top-p of what that leaves, then inverse transform by code order.  Candidates are cut by a
// threshold on the score.
inline long draw(const float* logits, long size, float temperature, long top_k, double top_p, double uniform) {
  static thread_local std::vector<float> scores, best;
  scores.assign(logits, logits + size);
  for (float& score : scores) score /= temperature;
  const long width = top_k > 0 ? std::min(top_k, size) : size;
  best = scores;
  std::partial_sort(best.begin(), best.begin() + width, best.end(), std::greater<float>());
  double total = 0.0;
  for (long i = 0; i < width; ++i) total += std::exp(double(best[i] - best[0]));
  double before = 0.0;
  long last = 0;
  for (long i = 0; i < width; ++i) {
    const double mass = std::exp(double(best[i] - best[0])) / total;
    if (i && !(before < top_p && mass > 0)) break;
    last = i;
    before += mass;
  }
  const float threshold = best[last];
  double sum = 0.0;
  for (long i = 0; i < size; ++i)
    if (scores[i] >= threshold) sum += std::exp(scores[i] - best[0]);
  const double target = std::min(uniform * sum, std::nextafter(sum, 0.0));
  double reached = 0.0;
  long code = 0;
  for (long i = 0; i < size; ++i) {
    if (scores[i] < threshold) continue;
    code = i;
    reached += std::exp(scores[i] - best[0]);
    if (reached > target) break;
  }
  return code;
}

// first: [count, hidden] embeddings of the first codes.  hidden: [count, hidden] the talker's, normalised.
// codes: [count, num_codes] out.  total: [count, hidden] out, the sum of all codes' embeddings.
// pages: the keys and values of one frame per request, a block each.  cosine, sine: [num_codes + 1, head_dim].
template <class T>
void predict(long num_threads, const Predictor& predictor, long count, const T* hidden, const T* first, void* const* pages,
             const T* cosine, const T* sine, const Sampling& sampling, int64_t* codes, T* total) {
  const Model& model = predictor.model;
  const long H = model.hidden, D = model.head_dim, length = predictor.num_codes + 1;
  Decode<T> work(model, 2 * count);
  std::vector<T> rows(2 * count * H), normed(count * H), factors_c(2 * count * D), factors_s(2 * count * D);
  std::vector<float> logits(count * predictor.codebook_size), sums(count * H);
  std::vector<int64_t> slots(2 * count), tables(2 * count), lengths(2 * count);
  for (long i = 0; i < count * H; ++i) {
    rows[i] = hidden[i];
    rows[count * H + i] = first[i];
    sums[i] = to_float(first[i]);
  }
#pragma omp parallel num_threads(num_threads)
  {
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (long index = 0; index < predictor.num_codes; ++index) {
      const long num_rows = index ? count : 2 * count, base = index ? index + 1 : 0;
#pragma omp single
      for (long row = 0; row < num_rows; ++row) {
        const long request = row % count, position = base + row / count;
        slots[row] = request * length + position;
        tables[row] = request;
        lengths[row] = position + 1;
        std::copy(cosine + position * D, cosine + (position + 1) * D, factors_c.begin() + row * D);
        std::copy(sine + position * D, sine + (position + 1) * D, factors_s.begin() + row * D);
      }
      const Step step{pages, length, num_rows, 1, slots.data(), tables.data(), lengths.data(),
                      factors_c.data(), factors_s.data(), rows.data(), nullptr, 0, index == 0};
      work.run(step);
      const T* last = rows.data() + (num_rows - count) * H;
      for (long row = thread; row < count; row += threads) {
        std::vector<float> wide(H);
        for (long i = 0; i < H; ++i) wide[i] = to_float(last[row * H + i]);
        norm_row(wide.data(), static_cast<const T*>(predictor.final_norm), H, model.eps, normed.data() + row * H);
      }
#pragma omp barrier
      const long V = predictor.codebook_size;
      const Share mine(num_panels(V), thread, threads);
      const T* head = static_cast<const T*>(predictor.heads[index]);
      std::vector<const T*> inputs(count);
      for (long row = 0; row < count; ++row) inputs[row] = normed.data() + row * H;
      for (long panel = mine.first; panel < mine.last; ++panel)
        rows_by_panel<T>(inputs.data(), count, H, head + panel * panel_size<T>(H), [&](long row, const float* values) {
          const long width = std::min(kPanel, V - panel * kPanel);
          for (long n = 0; n < width; ++n) logits[row * V + panel * kPanel + n] = to_float(from_float<T>(values[n]));
        });
#pragma omp barrier
      const T* table = static_cast<const T*>(predictor.tables[index]);
      for (long row = thread; row < count; row += threads) {
        const float* scores = logits.data() + row * V;
        const double uniform = sampling.uniforms[row * predictor.num_codes + index];
        const long code = uniform < 0 ? std::max_element(scores, scores + V) - scores
                                      : draw(scores, V, sampling.temperature[row], sampling.top_k[row],
                                             sampling.top_p[row], uniform);
        codes[row * predictor.num_codes + index] = code;
        for (long i = 0; i < H; ++i) {
          const T value = table[code * H + i];
          rows[row * H + i] = value;
          sums[row * H + i] = to_float(from_float<T>(sums[row * H + i] + to_float(value)));
        }
      }
#pragma omp barrier
    }
  }
  for (long i = 0; i < count * H; ++i) total[i] = from_float<T>(sums[i]);
}

}  // namespace omnistage
