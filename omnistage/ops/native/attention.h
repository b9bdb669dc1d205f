// Attention of several query rows over given keys and values: scores and mixtures are products with the
// keys and the values packed as panels (tiles.h).
#pragma once

#include <vector>

#include "tiles.h"

namespace omnistage {

// Distances in values: between segments, rows and heads.
struct Strides {
  long segment, row, head;
};

// Segments that see only themselves.  offset: query i sees keys 0 .. i + offset; negative: all keys.
struct Attention {
  long segments, num_queries, num_keys, num_heads, num_kv_heads, head_dim, offset;
  float scale;
  Strides query, key, value, output;
};

template <class T>
class Attend {
 public:
  explicit Attend(const Attention& shape) : shape_(shape) {
    const long K = shape.num_keys, D = shape.head_dim;
    keys_.resize(num_panels(K) * panel_size<T>(D));
    values_.resize(num_panels(D) * panel_size<T>(K));
    block_ = std::max(1L, std::min(8L, 16384 / std::max(1L, K))) * kRows;
    scores_.resize(block_ * num_panels(K) * kPanel);
    weights_.resize(block_ * K);
    sums_.resize(block_);
  }

  // The queries [first, last) of all heads that share one key head.
  void run(long segment, long kv_head, long first, long last, const T* query, const T* key, const T* value, T* output) {
    pack(key + segment * shape_.key.segment + kv_head * shape_.key.head,
         value + segment * shape_.value.segment + kv_head * shape_.value.head);
    const long group = shape_.num_heads / shape_.num_kv_heads;
    for (long g = 0; g < group; ++g) {
      const long head = kv_head * group + g;
      const T* rows = query + segment * shape_.query.segment + head * shape_.query.head;
      T* out = output + segment * shape_.output.segment + head * shape_.output.head;
      for (long begin = first; begin < last; begin += block_)
        block(rows, out, begin, std::min(block_, last - begin));
    }
  }

 private:
  void pack(const T* key, const T* value) {
    const long K = shape_.num_keys, D = shape_.head_dim;
    std::fill(keys_.begin(), keys_.end(), T{});
    std::fill(values_.begin(), values_.end(), T{});
    for (long k = 0; k < K; ++k)
      pack_row(key + k * shape_.key.row, D, keys_.data() + k / kPanel * panel_size<T>(D), k % kPanel);
    for (long panel = 0; panel < num_panels(D); ++panel) {
      const T* column = value + panel * kPanel;
      T* target = values_.data() + panel * panel_size<T>(K);
      const long width = std::min(kPanel, D - panel * kPanel);
      for (long k = 0; k + 1 < K; k += 2)
        pack_columns(column + k * shape_.value.row, column + (k + 1) * shape_.value.row, width, target, k);
      if (K % 2) pack_column(column + (K - 1) * shape_.value.row, width, target, K - 1);
    }
  }

  long visible(long query) const {
    return shape_.offset < 0 ? shape_.num_keys : std::min(shape_.num_keys, query + shape_.offset + 1);
  }

  void block(const T* query, T* output, long begin, long count) {
    const long K = shape_.num_keys, D = shape_.head_dim, width = num_panels(K) * kPanel;
    std::vector<const T*> rows(count);
    for (long m = 0; m < count; ++m) rows[m] = query + (begin + m) * shape_.query.row;
    const long seen = visible(begin + count - 1);
    for (long panel = 0; panel < num_panels(seen); ++panel)
      rows_by_panel<T>(rows.data(), count, D, keys_.data() + panel * panel_size<T>(D), [&](long m, const float* sums) {
        std::memcpy(scores_.data() + m * width + panel * kPanel, sums, kPanel * sizeof(float));
      });
    for (long m = 0; m < count; ++m) {
      const long length = visible(begin + m);
      softmax(scores_.data() + m * width, weights_.data() + m * K, length, sums_[m]);
      std::fill(weights_.begin() + m * K + length, weights_.begin() + m * K + seen, T{});
      rows[m] = weights_.data() + m * K;
    }
    for (long panel = 0; panel < num_panels(D); ++panel)
      rows_by_panel<T>(rows.data(), count, seen, values_.data() + panel * panel_size<T>(K), [&](long m, const float* sums) {
        float scaled[kPanel];
        for (long d = 0; d < kPanel; ++d) scaled[d] = sums[d] / sums_[m];
        round_row(scaled, output + (begin + m) * shape_.output.row + panel * kPanel, std::min(kPanel, D - panel * kPanel));
      });
  }

  // weights: exp of the scaled scores less their largest; total: their sum, as rounded to T.
  void softmax(float* scores, T* weights, long length, float& total) {
    float top = scores[0];
#pragma omp simd reduction(max : top)
    for (long i = 0; i < length; ++i) top = std::max(top, scores[i]);
    const float scale = shape_.scale;
    for (long i = 0; i < length; ++i) scores[i] = (scores[i] - top) * scale;
#pragma omp simd
    for (long i = 0; i < length; ++i) scores[i] = fast_exp(scores[i]);
    round_row(scores, weights, length);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < length; ++i) sum += to_float(weights[i]);
    total = sum;
  }

  const Attention shape_;
  long block_;
  std::vector<T> keys_, values_, weights_;
  std::vector<float> scores_, sums_;
};

template <class T>
void attention(long threads, const Attention& shape, const T* query, const T* key, const T* value, T* output) {
  const long heads = shape.segments * shape.num_kv_heads;
  // Where heads are few, threads share one head's queries; each packs the head for itself.
  const long parts = std::max(1L, std::min((threads + heads - 1) / heads, shape.num_queries));
#pragma omp parallel num_threads(threads)
  {
    Attend<T> work(shape);
#pragma omp for schedule(dynamic)
    for (long task = 0; task < heads * parts; ++task) {
      const long head = task / parts, part = task % parts;
      work.run(head / shape.num_kv_heads, head % shape.num_kv_heads, shape.num_queries * part / parts,
               shape.num_queries * (part + 1) / parts, query, key, value, output);
    }
  }
}

}  // namespace omnistage
