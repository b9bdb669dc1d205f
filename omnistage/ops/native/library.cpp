// The functions that Python calls.  dtype: 0 float32, 1 bfloat16.
#include "attention.h"
#include "frames.h"

using omnistage::bfloat16;

extern "C" {

long omnistage_packed_bytes(long dtype, long N, long K) {
  const long panels = omnistage::num_panels(N);
  return dtype ? panels * omnistage::panel_size<bfloat16>(K) * 2 : panels * omnistage::panel_size<float>(K) * 4;
}

// source: [N, K] row-major.  is_gated: N is twice the middle's size, gates first; target must be zeroed and
// have room for omnistage_packed_bytes of 2 * (size rounded up to 32) outputs.
void omnistage_pack(long dtype, long N, long K, long is_gated, const void* source, void* target) {
  const long half = omnistage::kPanel / 2, size = N / 2;
  for (long n = 0; n < N; ++n) {
    long panel = n / omnistage::kPanel, column = n % omnistage::kPanel;
    if (is_gated) {
      const long output = n < size ? n : n - size;
      panel = output / half;
      column = output % half + (n < size ? 0 : half);
    }
    if (dtype) {
      omnistage::pack_row(static_cast<const bfloat16*>(source) + n * K, K,
                          static_cast<bfloat16*>(target) + panel * omnistage::panel_size<bfloat16>(K), column);
    } else {
      omnistage::pack_row(static_cast<const float*>(source) + n * K, K,
                          static_cast<float*>(target) + panel * omnistage::panel_size<float>(K), column);
    }
  }
}

void omnistage_linear(long dtype, long threads, long M, long N, long K, long is_gated, const void* x, long ldx,
                      const void* packed, const void* bias, const void* residual, void* out) {
  const long ldo = is_gated ? N / 2 : N;
  if (dtype) {
    omnistage::linear(threads, static_cast<const bfloat16*>(x), ldx, M, static_cast<const bfloat16*>(packed), N, K,
                      static_cast<const bfloat16*>(bias), static_cast<const bfloat16*>(residual),
                      static_cast<bfloat16*>(out), ldo, is_gated);
  } else {
    omnistage::linear(threads, static_cast<const float*>(x), ldx, M, static_cast<const float*>(packed), N, K,
                      static_cast<const float*>(bias), static_cast<const float*>(residual),
                      static_cast<float*>(out), ldo, is_gated);
  }
}

void omnistage_snake(long dtype, long threads, long rows, long channels, const void* x, long ldx, const void* alpha,
                     const void* gain, void* out, long ldo) {
  if (dtype) {
    omnistage::snake(threads, rows, channels, static_cast<const bfloat16*>(x), ldx, static_cast<const bfloat16*>(alpha),
                     static_cast<const bfloat16*>(gain), static_cast<bfloat16*>(out), ldo);
  } else {
    omnistage::snake(threads, rows, channels, static_cast<const float*>(x), ldx, static_cast<const float*>(alpha),
                     static_cast<const float*>(gain), static_cast<float*>(out), ldo);
  }
}

void omnistage_attention(long dtype, long threads, const omnistage::Attention* shape, const void* query,
                         const void* key, const void* value, void* output) {
  if (dtype) {
    omnistage::attention(threads, *shape, static_cast<const bfloat16*>(query), static_cast<const bfloat16*>(key),
                         static_cast<const bfloat16*>(value), static_cast<bfloat16*>(output));
  } else {
    omnistage::attention(threads, *shape, static_cast<const float*>(query), static_cast<const float*>(key),
                         static_cast<const float*>(value), static_cast<float*>(output));
  }
}

// The MLP of model->layers[layer].  normed, residual, out: [count, hidden].
void omnistage_mlp(long dtype, long threads, const omnistage::Model* model, long layer, long count, const void* normed,
                   const void* residual, void* out) {
  if (dtype) {
    omnistage::mixture(threads, *model, model->layers[layer], count, static_cast<const bfloat16*>(normed),
                       static_cast<const bfloat16*>(residual), static_cast<bfloat16*>(out));
  } else {
    omnistage::mixture(threads, *model, model->layers[layer], count, static_cast<const float*>(normed),
                       static_cast<const float*>(residual), static_cast<float*>(out));
  }
}

void omnistage_decode(long dtype, long threads, const omnistage::Model* model, const omnistage::Step* step) {
  if (dtype) {
    omnistage::decode<bfloat16>(threads, *model, *step);
  } else {
    omnistage::decode<float>(threads, *model, *step);
  }
}

void omnistage_predict(long dtype, long threads, const omnistage::Predictor* predictor, long count,
                       const void* hidden, const void* first, void* const* pages, const void* cosine, const void* sine,
                       const omnistage::Sampling* sampling, int64_t* codes, void* total) {
  if (dtype) {
    omnistage::predict(threads, *predictor, count, static_cast<const bfloat16*>(hidden), static_cast<const bfloat16*>(first),
                       pages, static_cast<const bfloat16*>(cosine), static_cast<const bfloat16*>(sine), *sampling,
                       codes, static_cast<bfloat16*>(total));
  } else {
    omnistage::predict(threads, *predictor, count, static_cast<const float*>(hidden), static_cast<const float*>(first), pages,
                       static_cast<const float*>(cosine), static_cast<const float*>(sine), *sampling, codes,
                       static_cast<float*>(total));
  }
}
}
