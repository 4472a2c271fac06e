// What is done to rows one by one: RMS norm, rotary embedding with the write of keys and values.
#pragma once

#include <cmath>
#include <vector>

#include "attention.h"
#include "simd.h"
#include "team.h"

namespace kvferry {

constexpr int64_t ROWS_AT_ONCE = 8;

// 1 / rms(from). `from`: `count` values and zeros up to padded(count).
inline float norm_factor(const float* from, int64_t count, float epsilon) {
  F32x16 squares[2] = {};
  for (int64_t at = 0; at < padded(count); at += 2 * LANES)
    for (int half = 0; half < 2; ++half) {
      const F32x16 values = load(from + at + half * LANES);
      squares[half] = fma(values, values, squares[half]);
    }
  return 1.0f / std::sqrt(sum_of(squares[0] + squares[1]) / count + epsilon);
}

// to = from / rms(from) · weight, all padded.
template <typename T>
inline void normalise(const float* from, const float* weight, int64_t count, float epsilon, T* to) {
  const float factor = norm_factor(from, count, epsilon);
  for (int64_t at = 0; at < padded(count); at += LANES) store(to + at, load(from + at) * factor * load(weight + at));
}

template <typename T>
inline void normalise_rows(Team& team, const float* from, int64_t stride, int64_t num_rows, const float* weight,
                           int64_t count, float epsilon, T* to, int64_t to_stride) {
  team.share((num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, [&](int64_t part) {
    for (int64_t row = part * ROWS_AT_ONCE; row < std::min(num_rows, (part + 1) * ROWS_AT_ONCE); ++row)
      normalise(from + row * stride, weight, count, epsilon, to + row * to_stride);
  });
}

// x += from / rms(from) · weight, rows of `stride`.
inline void add_normalised_rows(Team& team, const float* from, int64_t stride, int64_t num_rows, const float* weight,
                                int64_t count, float epsilon, float* x) {
  team.share((num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, [&](int64_t part) {
    for (int64_t row = part * ROWS_AT_ONCE; row < std::min(num_rows, (part + 1) * ROWS_AT_ONCE); ++row) {
      const float factor = norm_factor(from + row * stride, count, epsilon);
      for (int64_t at = row * stride; at < row * stride + padded(count); at += LANES)
        store(x + at, load(from + at) * factor * load(weight + at - row * stride) + load(x + at));
    }
  });
}

struct Rotation {
  const float *cosines, *sines;         // [tokens, head_dim]
  const float *query_norm, *key_norm;   // [padded(head_dim)] or null
  float epsilon;
};

// The first half and the second turn as pairs.
template <typename T>
inline void rotate(const float* from, const float* cosines, const float* sines, int64_t head_dim, T* to) {
  const int64_t half = head_dim / 2;
  if (half % LANES == 0) {
    for (int64_t at = 0; at < half; at += LANES) {
      const F32x16 first = load(from + at), second = load(from + half + at);
      store(to + at, first * load(cosines + at) + -second * load(sines + at));
      store(to + half + at, second * load(cosines + half + at) + first * load(sines + half + at));
    }
    return;
  }
  float turned[LANES];
  for (int64_t at = 0; at < head_dim; at += LANES) {
    const int64_t count = std::min(LANES, head_dim - at);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t j = at + i;
      const float partner = j < half ? -from[j + half] : from[j - half];
      turned[i] = from[j] * cosines[j] + partner * sines[j];
    }
    T rounded[LANES];
    store(rounded, load(turned));
    std::copy_n(rounded, count, to + at);
  }
}

// Queries of the projected rows [tokens, stride] (heads of queries, keys, values) are turned into `queries`, keys are
// turned into their slots of the cache, values written to theirs. Of all threads together.
template <typename T>
inline void rotate_and_write(Team& team, const float* projected, int64_t stride, int64_t num_tokens, int64_t num_heads,
                             const Rotation& rotation, const Cache& cache, int64_t layer, const int64_t* slots,
                             T* queries, int64_t query_stride) {
  const int64_t dim = cache.head_dim;
  team.share(num_tokens, [&](int64_t token) {
    std::vector<float> head(padded(dim));
    const auto normed = [&](const float* from, const float* weight) {
      if (weight == nullptr) return from;
      std::copy_n(from, dim, head.data());
      normalise(head.data(), weight, dim, rotation.epsilon, head.data());
      return static_cast<const float*>(head.data());
    };
    const float *row = projected + token * stride, *cosines = rotation.cosines + token * dim,
                *sines = rotation.sines + token * dim;
    for (int64_t i = 0; i < num_heads; ++i)
      rotate(normed(row + i * dim, rotation.query_norm), cosines, sines, dim, queries + token * query_stride + i * dim);
    const int64_t block = slots[token] / cache.block_size, place = slots[token] % cache.block_size * dim;
    for (int64_t i = 0; i < cache.num_kv_heads; ++i) {
      T* data = static_cast<T*>(cache.data);
      T* key = data + cache.offset(block, layer, 0, i) + place;
      T* value = data + cache.offset(block, layer, 1, i) + place;
      rotate(normed(row + (num_heads + i) * dim, rotation.key_norm), cosines, sines, dim, key);
      const float* from = row + (num_heads + cache.num_kv_heads + i) * dim;
      T rounded[LANES];
      float last[LANES] = {};
      for (int64_t at = 0; at < dim; at += LANES) {
        const int64_t count = std::min(LANES, dim - at);
        std::copy_n(from + at, count, last);
        store(rounded, load(last));
        std::copy_n(rounded, count, value + at);
      }
    }
  });
}

}  // namespace kvferry
