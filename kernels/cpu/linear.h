// Products of rows with a weight matrix that was packed once.
//
// Packed: tiles of 32 output features, in each the units of the input in order, in each unit 32 lanes:
// [tiles][units][32], one or two elements a lane (`PER_UNIT`). Features that do not exist are zero.
//
// Every output is one lane that goes through the input from its first unit to its last, whatever the number of rows:
// a row's result depends on nothing but the row.
#pragma once

#include "simd.h"
#include "team.h"

namespace kvferry {

constexpr int64_t TILE = 32;
constexpr int64_t MOST_ROWS = 12;  // 12 rows · 2 vectors are 24 sums, and leave 8 registers
constexpr int64_t ROWS_A_SHARE = 48;

struct Linear {
  const uint32_t* packed;
  const float* bias;  // [padded(num_outputs)] or null
  int64_t num_inputs, num_outputs;
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

template <typename T, After AFTER, int ROWS>
inline void multiply_rows(const uint32_t* input, int64_t stride, const Linear& linear, int64_t tile, int64_t row,
                          const Output<T>& out) {
  const int64_t num_units = linear.num_inputs / PER_UNIT<T>;
  const uint32_t* weights = linear.packed + tile * num_units * TILE;
  F32x16 sums[ROWS][2] = {};
  for (int64_t unit = 0; unit < num_units; ++unit) {
    const U32x16 first = load_bytes<U32x16>(weights + unit * TILE);
    const U32x16 second = load_bytes<U32x16>(weights + unit * TILE + LANES);
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) {
      const U32x16 one = splat_bits(input[(row + i) * stride + unit]);
      sums[i][0] = dot_units<T>(sums[i][0], one, first);
      sums[i][1] = dot_units<T>(sums[i][1], one, second);
    }
  }
  const float* bias = linear.bias == nullptr ? nullptr : linear.bias + tile * TILE;
#pragma GCC unroll 12
  for (int i = 0; i < ROWS; ++i) {
    if (bias != nullptr) {
      sums[i][0] += load(bias);
      sums[i][1] += load(bias + LANES);
    }
    finish<AFTER, T>(out, row + i, tile, sums[i][0], sums[i][1]);
  }
}

template <typename T, After AFTER, int ROWS>
inline void multiply_up_to(int64_t num_rows, const uint32_t* input, int64_t stride, const Linear& linear, int64_t tile,
                           int64_t row, const Output<T>& out) {
  if (num_rows == ROWS) return multiply_rows<T, AFTER, ROWS>(input, stride, linear, tile, row, out);
  if constexpr (ROWS > 1) multiply_up_to<T, AFTER, ROWS - 1>(num_rows, input, stride, linear, tile, row, out);
}

// out = rows · weightsᵀ + bias. `input`: [num_rows, stride] units. Of all threads together.
template <typename T, After AFTER>
inline void multiply(Team& team, const T* input, int64_t stride, int64_t num_rows, const Linear& linear,
                     const Output<T>& out) {
  const uint32_t* units = reinterpret_cast<const uint32_t*>(input);
  const int64_t num_tiles = (linear.num_outputs + TILE - 1) / TILE;
  const int64_t num_parts = (num_rows + ROWS_A_SHARE - 1) / ROWS_A_SHARE;
  team.share(num_tiles * num_parts, [&](int64_t share) {
    const int64_t tile = share / num_parts, begin = share % num_parts * ROWS_A_SHARE;
    const int64_t end = begin + ROWS_A_SHARE < num_rows ? begin + ROWS_A_SHARE : num_rows;
    const int64_t num_steps = (end - begin + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t step = 0; step < num_steps; ++step) {  // of nearly equal size
      const int64_t from = begin + (end - begin) * step / num_steps, to = begin + (end - begin) * (step + 1) / num_steps;
      multiply_up_to<T, AFTER, MOST_ROWS>(to - from, units, stride / PER_UNIT<T>, linear, tile, from, out);
    }
  });
}

}  // namespace kvferry
