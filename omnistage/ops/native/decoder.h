// One step of a decoder in which every sequence adds one row: all layers in one parallel region.
//
// Threads share the panels of each product and the heads of attention, and meet at barriers.  A row's
// result does not depend on the rows beside it.
#pragma once

#include <vector>

#include "tiles.h"

namespace omnistage {

// A gated MLP: down(silu(gate) * up).  size: of the middle.  Both packed, gate_up as `linear` says.
struct Gated {
  const void* gate_up;
  const void* down;
  long size;
};

struct Layer {
  const void* attention_norm;
  const void* qkv;
  const void* qkv_bias;  // may be null
  const void* query_norm;  // may be null, with key_norm
  const void* key_norm;
  const void* output;
  const void* output_bias;  // may be null
  const void* mlp_norm;
  const void* router;  // null: the layer has one MLP, experts[0]
  const Gated* experts;
  const Gated* shared;  // may be null
};

struct Model {
  const Layer* layers;
  long num_layers, hidden, num_heads, num_kv_heads, head_dim;
  long num_experts, num_active, normalises;
  float eps;
};

// pages: per layer, [num_blocks, block_size, 2, num_kv_heads, head_dim].  slots: where each row goes.
// tables: [count, table_width] block ids.  lengths: rows of each context, the new one included.
// cosine, sine: [count, head_dim] as rotary factors.  hidden: [count, hidden] in and out.
// captured: [count, hidden], what hidden is after capture_layer layers; may be null.
// sees_batch: rows of one sequence are in the step, so keys of all are written before any is read.
struct Step {
  void* const* pages;
  long block_size, count, table_width;
  const int64_t* slots;
  const int64_t* tables;
  const int64_t* lengths;
  const void* cosine;
  const void* sine;
  void* hidden;
  void* captured;
  long capture_layer, sees_batch;
};

struct Pick {
  long expert, row;
  float weight;
};

constexpr long kGroup = 4;  // query heads that meet a key at once

template <class T>
class Decode {
 public:
  Decode(const Model& model, long max_rows) : model_(model) {
    const long heads = model.num_heads + 2 * model.num_kv_heads;
    qkv_size_ = heads * model.head_dim;
    attended_size_ = model.num_heads * model.head_dim;
    for (long i = 0; i < model.num_layers; ++i) {
      const Layer& layer = model.layers[i];
      const long experts = layer.router ? model.num_experts : 1;
      for (long e = 0; e < experts; ++e) middle_ = std::max(middle_, layer.experts[e].size);
      if (layer.shared) middle_ = std::max(middle_, layer.shared->size);
    }
    middle_ = (middle_ + 31) / 32 * 32;
    const long slots = max_rows * (model.num_experts ? model.num_active + 1 : 1);
    hidden_.resize(max_rows * model.hidden);
    normed_.resize(max_rows * model.hidden);
    qkv_.resize(max_rows * qkv_size_);
    attended_.resize(max_rows * attended_size_);
    act_.resize(slots * middle_);
    scores_.resize(max_rows * (model.num_experts + 1));
    picks_.resize(slots);
  }

  // Called by all threads of a parallel region, with equal arguments.
  void run(const Step& step) {
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const long H = model_.hidden;
    const Share values(step.count * H, thread, threads);
    T* outside = static_cast<T*>(step.hidden);
    for (long i = values.first; i < values.last; ++i) hidden_[i] = to_float(outside[i]);
#pragma omp barrier
    for (long index = 0; index < model_.num_layers; ++index) {
      const Layer& layer = model_.layers[index];
      if (step.captured && step.capture_layer == index) keep(step, values);
      norms(step.count, layer.attention_norm, thread, threads);
      product(step.count, normed_.data(), H, layer.qkv, qkv_size_, thread, threads,
              [&](long row, long first, long width, const float* sums) {
                store(qkv_.data() + row * qkv_size_ + first, layer.qkv_bias, first, width, sums);
              });
#pragma omp barrier
      attention(step, layer, index, thread, threads);
#pragma omp barrier
      product(step.count, attended_.data(), attended_size_, layer.output, H, thread, threads,
              [&](long row, long first, long width, const float* sums) {
                float values[kPanel];
                store(values, layer.output_bias, first, width, sums);
                float* target = hidden_.data() + row * H + first;
                for (long n = 0; n < width; ++n) target[n] += values[n];
              });
#pragma omp barrier
      norms(step.count, layer.mlp_norm, thread, threads);
      mlp(step.count, layer, thread, threads);
#pragma omp barrier
    }
    if (step.captured && step.capture_layer == model_.num_layers) keep(step, values);
    for (long i = values.first; i < values.last; ++i) outside[i] = from_float<T>(hidden_[i]);
#pragma omp barrier
  }

  // The MLP of one layer alone: out = residual + mlp(normed), all [count, hidden].  Called as `run` is.
  void run_mlp(const Layer& layer, long count, const T* normed, const T* residual, T* out) {
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const Share values(count * model_.hidden, thread, threads);
    for (long i = values.first; i < values.last; ++i) {
      hidden_[i] = to_float(residual[i]);
      normed_[i] = normed[i];
    }
#pragma omp barrier
    mlp(count, layer, thread, threads);
#pragma omp barrier
    round_row(hidden_.data() + values.first, out + values.first, values.last - values.first);
  }

 private:
  void keep(const Step& step, const Share& values) {
    T* captured = static_cast<T*>(step.captured);
    for (long i = values.first; i < values.last; ++i) captured[i] = from_float<T>(hidden_[i]);
  }

  void norms(long count, const void* weight, int thread, int threads) {
    const long H = model_.hidden;
    for (long row = thread; row < count; row += threads)
      norm_row(hidden_.data() + row * H, static_cast<const T*>(weight), H, model_.eps,
               normed_.data() + row * H);
#pragma omp barrier
  }

  // target = sums + bias[first ...]
  static void store(float* target, const void* bias, long first, long width, const float* sums) {
    const T* terms = static_cast<const T*>(bias);
    if (!terms) std::copy(sums, sums + width, target);
    else
      for (long n = 0; n < width; ++n) target[n] = sums[n] + to_float(terms[first + n]);
  }

  // Calls use(row, first output, number of outputs, sums) for this thread's panels and rows [count, K].
  template <class Use>
  void product(long count, const T* x, long K, const void* packed, long N, int thread, int threads,
               Use&& use) {
    const T* weights = static_cast<const T*>(packed);
    const Share mine(num_panels(N), thread, threads);
    std::vector<const T*>& rows = pointers(count);
    for (long m = 0; m < count; ++m) rows[m] = x + m * K;
    for (long panel = mine.first; panel < mine.last; ++panel)
      rows_by_panel<T>(rows.data(), count, K, weights + panel * panel_size<T>(K),
                       [&](long m, const float* sums) {
                         use(m, panel * kPanel, std::min(kPanel, N - panel * kPanel), sums);
                       });
  }

  static std::vector<const T*>& pointers(long count) {
    static thread_local std::vector<const T*> rows;
    if (long(rows.size()) < count) rows.resize(count);
    return rows;
  }

  // Query or key head: normalised, rotated.
  void prepare_head(const float* head, const void* norm, const T* cosine, const T* sine, float* out) {
    const long D = model_.head_dim, half = D / 2;
    float scale = 1.0f;
    if (norm) {
      float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
      for (long d = 0; d < D; ++d) squares += head[d] * head[d];
      scale = 1.0f / std::sqrt(squares / float(D) + model_.eps);
    }
    float normed[1024];
    for (long d = 0; d < D; ++d)
      normed[d] = head[d] * scale * (norm ? to_float(static_cast<const T*>(norm)[d]) : 1.0f);
    for (long d = 0; d < half; ++d) {
      out[d] = normed[d] * to_float(cosine[d]) + normed[d + half] * to_float(sine[d]);
      out[d + half] = normed[d + half] * to_float(cosine[d + half]) + normed[d] * to_float(sine[d + half]);
    }
  }

  void attention(const Step& step, const Layer& layer, long index, int thread, int threads) {
    const long items = step.count * model_.num_kv_heads;
    T* pages = static_cast<T*>(step.pages[index]);
    if (step.sees_batch) {
      for (long item = thread; item < items; item += threads) write(step, layer, pages, item);
#pragma omp barrier
    }
    for (long item = thread; item < items; item += threads) {
      if (!step.sees_batch) write(step, layer, pages, item);
      attend(step, layer, pages, item);
    }
  }

  void write(const Step& step, const Layer& layer, T* pages, long item) {
    const long D = model_.head_dim, kv_heads = model_.num_kv_heads;
    const long row = item / kv_heads, head = item % kv_heads;
    const float* qkv = qkv_.data() + row * qkv_size_;
    const T* cosine = static_cast<const T*>(step.cosine) + row * D;
    const T* sine = static_cast<const T*>(step.sine) + row * D;
    T* slot = pages + step.slots[row] * 2 * kv_heads * D;
    float key[1024];
    prepare_head(qkv + (model_.num_heads + head) * D, layer.key_norm, cosine, sine, key);
    const float* value = qkv + (model_.num_heads + kv_heads + head) * D;
    for (long d = 0; d < D; ++d) {
      slot[head * D + d] = from_float<T>(key[d]);
      slot[(kv_heads + head) * D + d] = from_float<T>(value[d]);
    }
  }

  void attend(const Step& step, const Layer& layer, const T* pages, long item) {
    const long D = model_.head_dim, kv_heads = model_.num_kv_heads;
    const long row = item / kv_heads, head = item % kv_heads;
    const long group = model_.num_heads / kv_heads, length = step.lengths[row];
    const float* qkv = qkv_.data() + row * qkv_size_;
    const T* cosine = static_cast<const T*>(step.cosine) + row * D;
    const T* sine = static_cast<const T*>(step.sine) + row * D;
    static thread_local std::vector<float> buffer;
    buffer.resize(group * (2 * D + length));
    float* query = buffer.data();
    float* sums = query + group * D;
    float* scores = sums + group * D;
    for (long g = 0; g < group; ++g)
      prepare_head(qkv + (head * group + g) * D, layer.query_norm, cosine, sine, query + g * D);
    const int64_t* table = step.tables + row * step.table_width;
    for (long g = 0; g < group; g += kGroup) {
      const long some = std::min(kGroup, group - g);
      float* q = query + g * D;
      float* s = scores + g * length;
      switch (some) {
        case 1: mix<1>(step, pages, table, head, length, q, s, sums + g * D); break;
        case 2: mix<2>(step, pages, table, head, length, q, s, sums + g * D); break;
        case 3: mix<3>(step, pages, table, head, length, q, s, sums + g * D); break;
        default: mix<4>(step, pages, table, head, length, q, s, sums + g * D);
      }
    }
    T* out = attended_.data() + row * attended_size_ + head * group * D;
    round_row(sums, out, group * D);
  }

  // Attention of G query heads to one key head: scores [G, length], sums [G, head_dim].
  template <int G>
  void mix(const Step& step, const T* pages, const int64_t* table, long head, long length, const float* query,
           float* scores, float* sums) {
    const long D = model_.head_dim, kv_heads = model_.num_kv_heads, stride = 2 * kv_heads * D;
    const float scale = 1.0f / std::sqrt(float(D));
    for (long position = 0; position < length; ++position) {
      const T* key = at(step, pages, table, position, stride) + head * D;
      Vector dots[G];
      for (int g = 0; g < G; ++g) dots[g] = broadcast(0.0f);
      for (long d = 0; d < D; d += 16) {
        const Vector k = load(key + d, D - d);
        for (int g = 0; g < G; ++g) dots[g] += load(query + g * D + d, D - d) * k;
      }
      for (int g = 0; g < G; ++g) scores[g * length + position] = total(dots[g]) * scale;
    }
    for (int g = 0; g < G; ++g) softmax(scores + g * length, length);
    for (long d = 0; d < D; d += 16) {
      Vector mixed[G];
      for (int g = 0; g < G; ++g) mixed[g] = broadcast(0.0f);
      for (long position = 0; position < length; ++position) {
        const Vector v = load(at(step, pages, table, position, stride) + (kv_heads + head) * D + d, D - d);
        for (int g = 0; g < G; ++g) mixed[g] += broadcast(scores[g * length + position]) * v;
      }
      const long width = std::min(16L, D - d);
      for (int g = 0; g < G; ++g) std::memcpy(sums + g * D + d, &mixed[g], width * sizeof(float));
    }
  }

  static const T* at(const Step& step, const T* pages, const int64_t* table, long position, long stride) {
    return pages + (table[position / step.block_size] * step.block_size + position % step.block_size) * stride;
  }

  static void softmax(float* scores, long length) {
    float top = scores[0];
    for (long i = 1; i < length; ++i) top = std::max(top, scores[i]);
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (long i = 0; i < length; ++i) {
      scores[i] = fast_exp(scores[i] - top);
      total += scores[i];
    }
    const float scale = 1.0f / total;
    for (long i = 0; i < length; ++i) scores[i] *= scale;
  }

  // Every pick (an expert for a row, with its weight) in the order of experts; then their MLPs.
  void mlp(long count, const Layer& layer, int thread, int threads) {
    if (layer.router) {
      const long E = model_.num_experts, outputs = E + (layer.shared ? 1 : 0);
      product(count, normed_.data(), model_.hidden, layer.router, outputs, thread, threads,
              [&](long row, long first, long width, const float* sums) {
                std::copy(sums, sums + width, scores_.begin() + row * (E + 1) + first);
              });
#pragma omp barrier
#pragma omp single
      choose(count, layer);
    } else {
#pragma omp single
      {
        for (long row = 0; row < count; ++row) picks_[row] = {0, row, 1.0f};
        num_picks_ = count;
      }
    }
    // `single` ends with a barrier
    for_experts(layer, true, [&](const Gated& gated, long first, long some, const T* const* rows, const Share& mine) {
      const T* weights = static_cast<const T*>(gated.gate_up);
      for (long panel = mine.first; panel < mine.last; ++panel)
        rows_by_panel<T>(rows, some, model_.hidden, weights + panel * panel_size<T>(model_.hidden),
                         [&](long m, const float* sums) {
                           const long begin = panel * kPanel / 2;
                           const long width = std::min<long>(kPanel / 2, gated.size - begin);
                           float middle[kPanel / 2];
                           gate(sums, middle);
                           round_row(middle, act_.data() + (first + m) * middle_ + begin, width);
                         });
    }, thread, threads);
#pragma omp barrier
    const long H = model_.hidden;
    for_experts(layer, false, [&](const Gated& gated, long first, long some, const T* const* rows, const Share& mine) {
      const T* weights = static_cast<const T*>(gated.down);
      for (long panel = mine.first; panel < mine.last; ++panel)
        rows_by_panel<T>(rows, some, gated.size, weights + panel * panel_size<T>(gated.size),
                         [&](long m, const float* sums) {
                           const Pick& pick = picks_[first + m];
                           const long width = std::min(kPanel, H - panel * kPanel);
                           float* target = hidden_.data() + pick.row * H + panel * kPanel;
                           for (long n = 0; n < width; ++n) target[n] += pick.weight * sums[n];
                         });
    }, thread, threads);
  }

  // Calls use(mlp, first pick, number of picks, their input rows, this thread's panels) per expert.
  template <class Use>
  void for_experts(const Layer& layer, bool is_first, Use&& use, int thread, int threads) {
    const long H = model_.hidden;
    long first = 0;
    while (first < num_picks_) {
      const long expert = picks_[first].expert;
      long last = first;
      while (last < num_picks_ && picks_[last].expert == expert) ++last;
      const bool is_shared = layer.router && expert == model_.num_experts;
      const Gated& gated = is_shared ? *layer.shared : layer.experts[expert];
      const long panels = is_first ? (gated.size + kPanel / 2 - 1) / (kPanel / 2) : num_panels(H);
      const Share mine(panels, thread, threads);
      std::vector<const T*>& rows = pointers(last - first);
      for (long m = 0; m < last - first; ++m)
        rows[m] = is_first ? normed_.data() + picks_[first + m].row * H : act_.data() + (first + m) * middle_;
      use(gated, first, last - first, rows.data(), mine);
      first = last;
    }
  }

  void choose(long count, const Layer& layer) {
    const long E = model_.num_experts;
    num_picks_ = 0;
    std::vector<float> scores(E);
    std::vector<long> order(E);
    for (long row = 0; row < count; ++row) {
      const float* raw = scores_.data() + row * (E + 1);
      float top = raw[0], total = 0.0f;
      for (long e = 1; e < E; ++e) top = std::max(top, raw[e]);
      for (long e = 0; e < E; ++e) total += scores[e] = std::exp(raw[e] - top);
      for (long e = 0; e < E; ++e) order[e] = e;
      std::partial_sort(order.begin(), order.begin() + model_.num_active, order.end(), [&](long a, long b) {
        return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
      });
      float chosen = 0.0f;
      for (long i = 0; i < model_.num_active; ++i) chosen += scores[order[i]];
      const float scale = 1.0f / (model_.normalises ? chosen : total);
      for (long i = 0; i < model_.num_active; ++i)
        picks_[num_picks_++] = {order[i], row, scores[order[i]] * scale};
      if (layer.shared) picks_[num_picks_++] = {E, row, 1.0f / (1.0f + std::exp(-raw[E]))};
    }
    std::stable_sort(picks_.begin(), picks_.begin() + num_picks_,
                     [](const Pick& a, const Pick& b) { return a.expert < b.expert; });
  }

  const Model& model_;
  long qkv_size_, attended_size_, middle_ = 0, num_picks_ = 0;
  std::vector<float> hidden_, qkv_, scores_;
  std::vector<T> normed_, attended_, act_;
  std::vector<Pick> picks_;
};

template <class T>
void mixture(long threads, const Model& model, const Layer& layer, long count, const T* normed, const T* residual,
             T* out) {
  Decode<T> work(model, count);
#pragma omp parallel num_threads(threads)
  work.run_mlp(layer, count, normed, residual, out);
}

template <class T>
void decode(long threads, const Model& model, const Step& step) {
  Decode<T> work(model, step.count);
#pragma omp parallel num_threads(threads)
  work.run(step);
}

}  // namespace omnistage
