// Products of rows with a weight matrix that was packed once.
//
// Packed: tiles of 32 output features, in each the units of the input in order, in each unit 32 lanes:
// [tiles][units][32], one or two elements a lane (`PER_UNIT`). Features that do not exist are zero.
//
// Every output is one lane that goes through the input from its first unit to its last, whatever the number of rows:
// a row's result depends on nothing but the row. With weights in int8 the row is rounded to bytes, by its own largest
// value, and sums are whole numbers.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "simd.h"
#include "team.h"

namespace kvferry {

constexpr int64_t TILE = 32;
constexpr int64_t MOST_ROWS = 12;  // 12 rows · 2 vectors are 24 sums, and leave 8 registers
constexpr int64_t ROWS_A_SHARE = 48;

struct Linear {
  const uint32_t* packed;
  const float* bias;       // [padded(num_outputs)] or null
  const float* scales;     // int8: of each output
  const int32_t* offsets;  // int8: 128 · the sum of each output's weights
  int64_t num_inputs, num_outputs;
};

// Rows as a product takes them. int8: bytes are 128 + value / scale, rounded, and each row has its scale.
struct Rows {
  const uint32_t* units;
  const float* scales;
  int64_t stride;  // units
};

enum class After { STORE, ADD, SILU_MUL };

// Where results go. STORE and ADD: float rows. SILU_MUL: a tile is 16 gates and their 16 partners, and 16 results go
// to rows of T.
template <typename T>
struct Output {
  float* values;
  T* activations;
  int64_t stride;
};

inline F32x16 silu(F32x16 x) { return x / (1.0f + exp_of(smaller(-x, splat(88.0f)))); }

template <After AFTER, typename T>
inline void finish(const Output<T>& out, int64_t row, int64_t tile, F32x16 first, F32x16 second) {
  if constexpr (AFTER == After::SILU_MUL) {
    store(out.activations + row * out.stride + tile * LANES, silu(first) * second);
    return;
  }
  float* to = out.values + row * out.stride + tile * TILE;
  if constexpr (AFTER == After::ADD) {
    first += load(to);
    second += load(to + LANES);
  }
  store(to, first);
  store(to + LANES, second);
}

// The type of a sum, a step of it, and what it stands for in the end.
template <typename W>
struct Sum {
  F32x16 value;
  void add(U32x16 row, U32x16 weights) { value = dot_units<W>(value, row, weights); }
  F32x16 result(const Rows&, int64_t, const Linear&, int64_t) const { return value; }
};

template <>
struct Sum<Int8> {
  I32x16 value;
  void add(U32x16 row, U32x16 weights) { value = dot_bytes(value, row, weights); }
  F32x16 result(const Rows& rows, int64_t row, const Linear& linear, int64_t output) const {
    const I32x16 exact = value - load_bytes<I32x16>(linear.offsets + output);
    return __builtin_convertvector(exact, F32x16) * (rows.scales[row] * load(linear.scales + output));
  }
};

template <typename W, typename T, After AFTER, int ROWS>
inline void multiply_rows(const Rows& rows, const Linear& linear, int64_t tile, int64_t row, const Output<T>& out) {
  const int64_t num_units = linear.num_inputs / PER_UNIT<W>;
  const uint32_t* weights = linear.packed + tile * num_units * TILE;
  Sum<W> sums[ROWS][2] = {};
  for (int64_t unit = 0; unit < num_units; ++unit) {
    const U32x16 first = load_bytes<U32x16>(weights + unit * TILE);
    const U32x16 second = load_bytes<U32x16>(weights + unit * TILE + LANES);
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) {
      const U32x16 one = splat_bits(rows.units[(row + i) * rows.stride + unit]);
      sums[i][0].add(one, first);
      sums[i][1].add(one, second);
    }
  }
  const int64_t output = tile * TILE;
#pragma GCC unroll 12
  for (int i = 0; i < ROWS; ++i) {
    F32x16 left = sums[i][0].result(rows, row + i, linear, output);
    F32x16 right = sums[i][1].result(rows, row + i, linear, output + LANES);
    if (linear.bias != nullptr) {
      left += load(linear.bias + output);
      right += load(linear.bias + output + LANES);
    }
    finish<AFTER, T>(out, row + i, tile, left, right);
  }
}

template <typename W, typename T, After AFTER, int ROWS>
inline void multiply_up_to(int64_t num_rows, const Rows& rows, const Linear& linear, int64_t tile, int64_t row,
                           const Output<T>& out) {
  if (num_rows == ROWS) return multiply_rows<W, T, AFTER, ROWS>(rows, linear, tile, row, out);
  if constexpr (ROWS > 1) multiply_up_to<W, T, AFTER, ROWS - 1>(num_rows, rows, linear, tile, row, out);
}

// out = rows · weightsᵀ + bias. Of all threads together.
template <typename W, typename T, After AFTER>
inline void multiply(Team& team, const Rows& rows, int64_t num_rows, const Linear& linear, const Output<T>& out) {
  const int64_t num_tiles = (linear.num_outputs + TILE - 1) / TILE;
  const int64_t num_parts = (num_rows + ROWS_A_SHARE - 1) / ROWS_A_SHARE;
  team.share(num_tiles * num_parts, [&](int64_t share) {
    const int64_t tile = share / num_parts, begin = share % num_parts * ROWS_A_SHARE;
    const int64_t end = begin + ROWS_A_SHARE < num_rows ? begin + ROWS_A_SHARE : num_rows;
    const int64_t num_steps = (end - begin + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t step = 0; step < num_steps; ++step) {  // of nearly equal size
      const int64_t from = begin + (end - begin) * step / num_steps, to = begin + (end - begin) * (step + 1) / num_steps;
      multiply_up_to<W, T, AFTER, MOST_ROWS>(to - from, rows, linear, tile, from, out);
    }
  });
}

// One row in bytes; returns its scale, which is NaN for a row that is not finite.
template <typename T>
inline float quantise(const T* from, int64_t count, uint8_t* to) {
  const auto values = [&](int64_t at) {
    if (at + LANES <= count) return load(from + at);
    T last[LANES] = {};
    std::copy_n(from + at, count - at, last);
    return load(last);
  };
  F32x16 largest = {}, poison = {};
  for (int64_t at = 0; at < count; at += LANES) {
    const F32x16 value = values(at);
    largest = larger(largest, larger(value, -value));
    poison += value * 0.0f;
  }
  const float most = largest_of(largest), factor = most > 0.0f ? 127.0f / most : 0.0f;
  const F32x16 magic = splat(12582912.0f + 128.0f);  // rounds, and leaves 128 + the value in the lowest bits
  for (int64_t at = 0; at < count; at += LANES) {
    const U32x16 bits = bits_of<U32x16>(fma(values(at), splat(factor), magic));
    const U8x16 bytes = __builtin_convertvector(bits & 255u, U8x16);
    std::memcpy(to + at, &bytes, std::min(LANES, count - at));
  }
  return most / 127.0f + sum_of(poison);
}

// A thread team's rows in bytes.
struct Bytes {
  std::vector<uint8_t> values;
  std::vector<float> scales;
};

// Rows [num_rows, stride] of T as a product with weights of W takes them.
template <typename W, typename T>
inline Rows as_rows(Team& team, const T* from, int64_t stride, int64_t num_rows, const Linear& linear, Bytes& bytes) {
  if constexpr (!std::is_same_v<W, Int8>) {
    static_assert(std::is_same_v<W, T>);
    return {reinterpret_cast<const uint32_t*>(from), nullptr, stride / PER_UNIT<T>};
  } else {
    const int64_t count = linear.num_inputs;
    team.share(num_rows, [&](int64_t row) {
      bytes.scales[row] = quantise(from + row * stride, count, &bytes.values[row * count]);
    });
    return {reinterpret_cast<const uint32_t*>(bytes.values.data()), bytes.scales.data(), count / PER_UNIT<Int8>};
  }
}

}  // namespace kvferry
