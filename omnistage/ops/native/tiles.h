// Matrix products with weights packed in panels, for any number of rows.
//
// A weight [N, K] lies in panels of 64 outputs: [N / 64][K / U][64][U], zero-padded, where U values of
// one output stand together (2 for bfloat16, 1 for float32).  One panel meets up to 6 rows at a time in
// registers.  Each row's sum runs over k in one order, whatever rows are beside it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace omnistage {

constexpr long kPanel = 64;
constexpr int kRows = 6;  // of a register tile: 24 accumulators, 4 weights, a broadcast

typedef float Vector __attribute__((vector_size(64)));
typedef int32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

struct bfloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(bfloat16 value) {
  uint32_t wide = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &wide, 4);
  return result;
}

template <class T>
T from_float(float value);
template <>
inline float from_float<float>(float value) {
  return value;
}
template <>
inline bfloat16 from_float<bfloat16>(float value) {  // to nearest, ties to even; NaN stays NaN
  uint32_t wide;
  std::memcpy(&wide, &value, 4);
  if ((wide & 0x7fffffff) > 0x7f800000) return {uint16_t((wide >> 16) | 0x40)};
  return {uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};
}

template <class T>
struct Group;  // U: values of one output that stand together
template <>
struct Group<float> {
  static constexpr long U = 1;
};
template <>
struct Group<bfloat16> {
  static constexpr long U = 2;
};

template <class T>
long padded_groups(long K) {
  return (K + Group<T>::U - 1) / Group<T>::U;
}

template <class T>
long panel_size(long K) {  // values
  return padded_groups<T>(K) * kPanel * Group<T>::U;
}

inline long num_panels(long N) { return (N + kPanel - 1) / kPanel; }

// Rounds `count` floats.
inline void round_row(const float* source, float* target, long count) {
  std::memcpy(target, source, count * sizeof(float));
}

inline void round_row(const float* source, bfloat16* target, long count) {
  long i = 0;
#ifdef __AVX512BF16__
  for (; i + 16 <= count; i += 16) {
    const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(source + i));
    std::memcpy(target + i, &rounded, 32);
  }
#endif
  for (; i < count; ++i) target[i] = from_float<bfloat16>(source[i]);
}

// Writes row `source` [K] as output `column` of a panel.
inline void pack_row(const float* source, long K, float* panel, long column) {
  for (long k = 0; k < K; ++k) panel[k * kPanel + column] = source[k];
}

inline void pack_row(const bfloat16* source, long K, bfloat16* panel, long column) {
  for (long pair = 0; pair < K / 2; ++pair) std::memcpy(panel + (pair * kPanel + column) * 2, source + pair * 2, 4);
  if (K % 2) panel[(K / 2 * kPanel + column) * 2] = source[K - 1];
}

// Writes row `source` [width] as input k of the outputs of a panel.
inline void pack_column(const float* source, long width, float* panel, long k) {
  std::memcpy(panel + k * kPanel, source, width * sizeof(float));
}

inline void pack_column(const bfloat16* source, long width, bfloat16* panel, long k) {
  bfloat16* target = panel + k / 2 * kPanel * 2 + k % 2;
  for (long n = 0; n < width; ++n) target[n * 2] = source[n];
}

// Two rows as inputs k and k + 1, k even.
inline void pack_columns(const bfloat16* first, const bfloat16* second, long width, bfloat16* panel, long k) {
  bfloat16* target = panel + k / 2 * kPanel * 2;
#pragma omp simd
  for (long n = 0; n < width; ++n) {
    const uint32_t pair = first[n].bits | uint32_t(second[n].bits) << 16;
    std::memcpy(target + n * 2, &pair, 4);
  }
}
inline void pack_columns(const float* first, const float* second, long width, float* panel, long k) {
  pack_column(first, width, panel, k);
  pack_column(second, width, panel, k + 1);
}

inline Vector broadcast(float value) {
  return Vector{value, value, value, value, value, value, value, value,
                value, value, value, value, value, value, value, value};
}

inline Vector load(const float* p) {
  Vector v;
  std::memcpy(&v, p, 64);
  return v;
}

inline Vector load(const bfloat16* p) {
  Halves halves;
  std::memcpy(&halves, p, 32);
  return (Vector)(__builtin_convertvector(halves, Bits) << 16);
}

// The first `count` of sixteen values, zeros behind them.
template <class T>
Vector load(const T* p, long count) {
  if (count >= 16) return load(p);
  T values[16] = {};
  std::copy(p, p + count, values);
  return load(values);
}

inline float total(Vector v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lanes[16];
  std::memcpy(lanes, &v, 64);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

inline void multiply_add(Vector& sum, float x, const float* w) { sum += broadcast(x) * load(w); }

inline void multiply_add(Vector& sum, uint32_t pair, const bfloat16* w) {
#ifdef __AVX512BF16__
  __m512i weights = _mm512_loadu_si512(w);
  __m512i rows = _mm512_set1_epi32(int(pair));
  sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)rows, (__m512bh)weights);
#else
  Bits raw;
  std::memcpy(&raw, w, 64);
  Bits even = raw << 16;
  Bits odd = raw & int32_t(0xffff0000);
  uint32_t low = pair << 16, high = pair & 0xffff0000u;
  float first, second;
  std::memcpy(&first, &low, 4);
  std::memcpy(&second, &high, 4);
  sum += broadcast(first) * (Vector)even;
  sum += broadcast(second) * (Vector)odd;
#endif
}

inline float group_of(const float* row, long group, long) { return row[group]; }
inline uint32_t group_of(const bfloat16* row, long group, long K) {
  uint32_t pair;
  if (2 * group + 1 < K) {
    std::memcpy(&pair, row + 2 * group, 4);
    return pair;
  }
  return row[2 * group].bits;  // the odd one at the end
}

// sums[m][0..3] = rows[m] . one panel
template <class T, int M>
void tile(const T* const* rows, long K, const T* panel, Vector (*sums)[4]) {
  constexpr long step = 16 * Group<T>::U;
  Vector c[M][4];
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < 4; ++j) c[m][j] = broadcast(0.0f);
  const long groups = padded_groups<T>(K);
  for (long g = 0; g < groups; ++g) {
    const T* w = panel + g * 4 * step;
    for (int m = 0; m < M; ++m) {
      auto x = group_of(rows[m], g, K);
      for (int j = 0; j < 4; ++j) multiply_add(c[m][j], x, w + j * step);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < 4; ++j) sums[m][j] = c[m][j];
}

// Calls use(row, sums) for each of M rows against one panel; sums: 64 floats.
template <class T, class Use>
void rows_by_panel(const T* const* rows, long M, long K, const T* panel, Use&& use) {
  alignas(64) Vector sums[kRows][4];
  for (long m = 0; m < M; m += kRows) {
    const long count = std::min<long>(kRows, M - m);
    switch (count) {
      case 1: tile<T, 1>(rows + m, K, panel, sums); break;
      case 2: tile<T, 2>(rows + m, K, panel, sums); break;
      case 3: tile<T, 3>(rows + m, K, panel, sums); break;
      case 4: tile<T, 4>(rows + m, K, panel, sums); break;
      case 5: tile<T, 5>(rows + m, K, panel, sums); break;
      default: tile<T, 6>(rows + m, K, panel, sums);
    }
    for (long i = 0; i < count; ++i) use(m + i, (const float*)sums[i]);
  }
}

// A good approximation of exp (Cephes' polynomial, about 2 ulp) that compilers can vectorise.
inline float fast_exp(float x) {
  x = x > 88.0f ? 88.0f : x;  // so written, NaN stays NaN
  x = x < -87.3f ? -87.3f : x;
  float n = std::nearbyint(x * 1.44269504f);
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t exponent = (int32_t(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &exponent, 4);
  return p * scale;
}

inline float silu(float x) { return x / (1.0f + fast_exp(-x)); }

// Of a panel of 32 gates and 32 ups: silu(gate) * up.
inline void gate(const float* sums, float* middle) {
#pragma omp simd
  for (long n = 0; n < kPanel / 2; ++n) middle[n] = silu(sums[n]) * sums[kPanel / 2 + n];
}

// The square has period pi; within half a period Taylor's terms up to the eleventh err by 6e-8.
inline float sine_squared(float x) {
  const float n = std::nearbyint(x * 0.318309886f);
  const float r = (x - n * 3.140625f) - n * 9.67653589793e-4f;
  const float s = r * r;
  float p = -2.50521084e-8f;
  p = p * s + 2.75573192e-6f;
  p = p * s - 1.98412698e-4f;
  p = p * s + 8.33333333e-3f;
  p = p * s - 1.66666667e-1f;
  const float sine = r + r * s * p;
  return sine * sine;
}

struct Share {  // what of [0, total) is this thread's
  long first, last;
  Share(long total, int thread, int threads)
      : first(total * thread / threads), last(total * (thread + 1) / threads) {}
};

// out = x W^T (+ bias) (+ residual).  With is_gated, panels hold 32 gates and 32 ups, and
// out = silu(gate) * up has half the width.
template <class T>
void linear(long threads, const T* x, long ldx, long M, const T* packed, long N, long K, const T* bias,
            const T* residual, T* out, long ldo, bool is_gated) {
  constexpr long kBlock = 192;  // rows whose inputs stay in the second-level cache
  const long panels = num_panels(N);
#pragma omp parallel num_threads(threads)
  {
    const Share mine(panels, omp_get_thread_num(), omp_get_num_threads());
    const T* rows[kBlock];
    for (long begin = 0; begin < M; begin += kBlock) {
      const long count = std::min(kBlock, M - begin);
      for (long m = 0; m < count; ++m) rows[m] = x + (begin + m) * ldx;
      for (long panel = mine.first; panel < mine.last; ++panel) {
        const T* weights = packed + panel * panel_size<T>(K);
        rows_by_panel<T>(rows, count, K, weights, [&](long m, const float* sums) {
          const long row = begin + m;
          if (is_gated) {
            const long width = std::min<long>(kPanel / 2, N / 2 - panel * kPanel / 2);
            float middle[kPanel / 2];
            gate(sums, middle);
            round_row(middle, out + row * ldo + panel * kPanel / 2, width);
            return;
          }
          const long width = std::min(kPanel, N - panel * kPanel), first = panel * kPanel;
          float values[kPanel];
          std::memcpy(values, sums, sizeof values);
          if (bias)
            for (long n = 0; n < width; ++n) values[n] += to_float(bias[first + n]);
          if (residual)
            for (long n = 0; n < width; ++n) values[n] += to_float(residual[row * N + first + n]);
          round_row(values, out + row * ldo + first, width);
        });
      }
    }
  }
}

// out = x / rms(x) * weight
template <class T>
void norm_row(const float* x, const T* weight, long size, float eps, T* out) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (long i = 0; i < size; ++i) squares += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(squares / float(size) + eps);
  float block[kPanel];
  for (long begin = 0; begin < size; begin += kPanel) {
    const long width = std::min(kPanel, size - begin);
    for (long i = 0; i < width; ++i) block[i] = x[begin + i] * scale * to_float(weight[begin + i]);
    round_row(block, out + begin, width);
  }
}

// out = x + (sin(alpha x) * gain)^2, per channel.  x, out: [rows, channels], may be the same.
template <class T>
void snake(long threads, long rows, long channels, const T* x, long ldx, const T* alpha, const T* gain, T* out,
           long ldo) {
#pragma omp parallel num_threads(threads)
  {
    const Share mine(rows, omp_get_thread_num(), omp_get_num_threads());
    std::vector<float> a(channels), g(channels), y(channels);
    for (long c = 0; c < channels; ++c) {
      a[c] = to_float(alpha[c]);
      g[c] = to_float(gain[c]) * to_float(gain[c]);
    }
    for (long row = mine.first; row < mine.last; ++row) {
      const T* source = x + row * ldx;
#pragma omp simd
      for (long c = 0; c < channels; ++c) {
        const float value = to_float(source[c]);
        y[c] = value + sine_squared(value * a[c]) * g[c];
      }
      round_row(y.data(), out + row * ldo, channels);
    }
  }
}

}  // namespace omnistage
