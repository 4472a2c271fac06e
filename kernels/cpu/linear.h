// Products of rows with a weight matrix that was packed once.
//
// Packed: tiles of 32 output features, in each the units of the input in order, in each unit 32 lanes:
// [tiles][units][32], one or two elements a lane (`PER_UNIT`). Features that do not exist are zero.
//
// Every output is one lane that goes through the input from its first unit to its last, whatever the number of rows:
// a row's result depends on nothing but the row. (AMX, where it is, goes through it 32 inputs at a time, and does so for
// every number of rows.) Quantised weights are codes without sign in groups of 32 inputs, of which an output's share a
// scale and a minimum: weight = scale · code + minimum. So do every 32 values of a row share a scale; the row is rounded
// to bytes on its way.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "simd.h"
#include "team.h"

namespace kvferry {

constexpr int64_t TILE = 32;
constexpr int64_t GROUP = 32;  // inputs that share a scale
template <typename W>  // 12 rows · 2 vectors are 24 sums, and leave 8 registers; codes have two kinds of sums
constexpr int64_t MOST_ROWS = std::is_same_v<W, Int8> ? 6 : 12;
constexpr int ROWS_THAT_COMPUTE = 6;  // from so many on a product waits for sums, not for weights: time to ask for more
template <typename W>
constexpr bool IS_ON_AMX = amx::IS_PRESENT && std::is_same_v<W, Bf16>;
template <typename W>
constexpr int64_t ROWS_A_SHARE = IS_ON_AMX<W> ? 64 : 48;

// Rows that buffers have room for, since AMX reads them in sixteens; those beyond `count` may be anything.
inline int64_t whole_rows(int64_t count) { return (count + amx::ROWS - 1) / amx::ROWS * amx::ROWS; }

struct Linear {
  const uint32_t* packed;
  const float* bias;       // [padded(num_outputs)] or null
  const Half *scales, *minimums;  // of codes: [tiles][groups][32]; minimums null: -128 · scale
  int64_t bits;                   // of a code, 4 or 8; 0: weights are no codes
  int64_t num_inputs, num_outputs;
};

// Rows as a product takes them. With codes: bytes are value / scale, rounded; scales and sums of bytes are [rows][groups].
struct Rows {
  const uint32_t* units;
  int64_t stride;  // units
  const float* scales;
  const int32_t* sums;
};

enum class After { STORE, ADD, ACTIVATE_MUL };

// Where results go. STORE and ADD: float rows. ACTIVATE_MUL: a tile is 16 gates and their 16 partners, and 16 results go
// to rows of T, gates through SiLU or GELU.
template <typename T>
struct Output {
  float* values;
  T* activations;
  int64_t stride;
  bool is_gelu = false;
};

inline F32x16 silu(F32x16 x) { return x / (1.0f + exp_of(smaller(-x, splat(88.0f)))); }

// GELU with a hyperbolic tangent, which is a logistic function of twice the argument.
inline F32x16 gelu(F32x16 x) {
  const F32x16 argument = x * fma(x * x, splat(2.0f * 0.7978845608f * 0.044715f), splat(2.0f * 0.7978845608f));
  return x / (1.0f + exp_of(smaller(-argument, splat(88.0f))));
}

template <After AFTER, typename T>
inline void finish(const Output<T>& out, int64_t row, int64_t tile, F32x16 first, F32x16 second) {
  if constexpr (AFTER == After::ACTIVATE_MUL) {
    const F32x16 gates = out.is_gelu ? gelu(first) : silu(first);
    store(out.activations + row * out.stride + tile * LANES, gates * second);
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

// Sums of ROWS rows with a tile's weights: [rows][2 vectors]. Meanwhile the weights of the tile `next` come near.
template <typename W, int ROWS>
inline void sum_rows(const Rows& rows, const Linear& linear, int64_t tile, int64_t next, int64_t row,
                     F32x16 (&sums)[ROWS][2]) {
  const int64_t num_units = linear.num_inputs / PER_UNIT<W>;
  const uint32_t *weights = linear.packed + tile * num_units * TILE, *coming = linear.packed + next * num_units * TILE;
  for (int64_t unit = 0; unit < num_units; ++unit) {
    if constexpr (ROWS >= ROWS_THAT_COMPUTE) {
      fetch_line(coming + unit * TILE);
      fetch_line(coming + unit * TILE + LANES);
    }
    const U32x16 first = load_bytes<U32x16>(weights + unit * TILE);
    const U32x16 second = load_bytes<U32x16>(weights + unit * TILE + LANES);
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) {
      const U32x16 one = splat_bits(rows.units[(row + i) * rows.stride + unit]);
      sums[i][0] = dot_units<W>(sums[i][0], one, first);
      sums[i][1] = dot_units<W>(sums[i][1], one, second);
    }
  }
}

// Sums of a unit's products, added to whole numbers: [rows][2 vectors].
template <int ROWS>
inline void sum_unit(const Rows& rows, int64_t row, int64_t unit, U32x16 first, U32x16 second, I32x16 (&whole)[ROWS][2]) {
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; ++i) {
    const U32x16 one = splat_bits(rows.units[(row + i) * rows.stride + unit]);
    whole[i][0] = dot_bytes(whole[i][0], first, one);
    whole[i][1] = dot_bytes(whole[i][1], second, one);
  }
}

// Sums of a group, exact. Codes of 4 bits: a byte has one of a unit and, above it, that of the unit after.
template <int BITS, int ROWS>
inline void sum_group(const Rows& rows, int64_t row, int64_t group, const uint32_t* codes, I32x16 (&whole)[ROWS][2]) {
  constexpr int64_t UNITS = GROUP / PER_UNIT<Int8>, STEP = 8 / BITS;
#pragma GCC unroll 8
  for (int64_t unit = 0; unit < UNITS; unit += STEP, codes += TILE) {
    const U32x16 first = load_bytes<U32x16>(codes), second = load_bytes<U32x16>(codes + LANES);
    if constexpr (BITS == 8) {
      sum_unit<ROWS>(rows, row, group * UNITS + unit, first, second, whole);
    } else {
      const U32x16 low = splat_bits(0x0f0f0f0fu);
      sum_unit<ROWS>(rows, row, group * UNITS + unit, first & low, second & low, whole);
      sum_unit<ROWS>(rows, row, group * UNITS + unit + 1, (first >> 4) & low, (second >> 4) & low, whole);
    }
  }
}

// Groups in order: (scale · Σ code · byte + minimum · Σ byte) · the row's scale.
template <int BITS, bool HAS_MINIMUMS, int ROWS>
inline void sum_codes(const Rows& rows, const Linear& linear, int64_t tile, int64_t row, F32x16 (&sums)[ROWS][2]) {
  constexpr int64_t WORDS = GROUP * TILE * BITS / 32;  // of a tile's group
  const int64_t num_groups = linear.num_inputs / GROUP;
  const uint32_t* codes = linear.packed + tile * num_groups * WORDS;
  for (int64_t group = 0; group < num_groups; ++group, codes += WORDS) {
    I32x16 whole[ROWS][2] = {};
    sum_group<BITS, ROWS>(rows, row, group, codes, whole);
    for (int half = 0; half < 2; ++half) {
      const int64_t of_outputs = (tile * num_groups + group) * TILE + half * LANES;
      const F32x16 scale = load(linear.scales + of_outputs);
#pragma GCC unroll 6
      for (int i = 0; i < ROWS; ++i) {
        const int64_t place = (row + i) * num_groups + group;
        if constexpr (HAS_MINIMUMS) {
          const F32x16 rest = load(linear.minimums + of_outputs) * float(rows.sums[place]);
          const F32x16 value = fma(__builtin_convertvector(whole[i][half], F32x16), scale, rest);
          sums[i][half] = fma(value, splat(rows.scales[place]), sums[i][half]);
        } else {
          const F32x16 exact = __builtin_convertvector(whole[i][half] - 128 * rows.sums[place], F32x16);
          sums[i][half] = fma(exact, scale * rows.scales[place], sums[i][half]);
        }
      }
    }
  }
}

template <int ROWS>
inline void sum_quantised(const Rows& rows, const Linear& linear, int64_t tile, int64_t row, F32x16 (&sums)[ROWS][2]) {
  if (linear.bits == 4) sum_codes<4, true, ROWS>(rows, linear, tile, row, sums);
  else if (linear.minimums != nullptr) sum_codes<8, true, ROWS>(rows, linear, tile, row, sums);
  else sum_codes<8, false, ROWS>(rows, linear, tile, row, sums);
}

template <typename W, typename T, After AFTER, int ROWS>
inline void multiply_rows(const Rows& rows, const Linear& linear, int64_t tile, int64_t next, int64_t row,
                          const Output<T>& out) {
  F32x16 sums[ROWS][2] = {};
  if constexpr (std::is_same_v<W, Int8>) sum_quantised<ROWS>(rows, linear, tile, row, sums);
  else sum_rows<W, ROWS>(rows, linear, tile, next, row, sums);
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

template <typename W, typename T, After AFTER, int ROWS>
inline void multiply_up_to(int64_t num_rows, const Rows& rows, const Linear& linear, int64_t tile, int64_t next,
                           int64_t row, const Output<T>& out) {
  if (num_rows == ROWS) return multiply_rows<W, T, AFTER, ROWS>(rows, linear, tile, next, row, out);
  if constexpr (ROWS > 1) multiply_up_to<W, T, AFTER, ROWS - 1>(num_rows, rows, linear, tile, next, row, out);
}

// 16 · BLOCKS rows from `row` on, of which those before `end` are wanted.
template <typename T, After AFTER, int BLOCKS>
inline void multiply_on_amx(const Rows& rows, const Linear& linear, int64_t tile, int64_t row, int64_t end,
                            const Output<T>& out) {
  static_assert(amx::COLUMNS == TILE);
  alignas(VECTOR_BYTES) float sums[BLOCKS * amx::ROWS][TILE];
  const int64_t num_units = linear.num_inputs / PER_UNIT<Bf16>;
  amx::sum_rows<BLOCKS>(rows.units + row * rows.stride, rows.stride, linear.packed + tile * num_units * TILE, num_units,
                        sums);
  const float* bias = linear.bias == nullptr ? nullptr : linear.bias + tile * TILE;
  const F32x16 first = bias == nullptr ? F32x16{} : load(bias), second = bias == nullptr ? F32x16{} : load(bias + LANES);
  for (int64_t i = 0; i < std::min(end - row, BLOCKS * amx::ROWS); ++i)
    finish<AFTER, T>(out, row + i, tile, load(sums[i]) + first, load(sums[i] + LANES) + second);
}

// Rows `begin` … `end` with one tile's weights; `next` is the tile after it.
template <typename W, typename T, After AFTER>
inline void multiply_share(const Rows& rows, const Linear& linear, int64_t tile, int64_t next, int64_t begin,
                           int64_t end, const Output<T>& out) {
  if constexpr (IS_ON_AMX<W>) {
    for (int64_t row = begin; row < end; row += 2 * amx::ROWS)
      if (end - row > amx::ROWS) multiply_on_amx<T, AFTER, 2>(rows, linear, tile, row, end, out);
      else multiply_on_amx<T, AFTER, 1>(rows, linear, tile, row, end, out);
    return;
  }
  const int64_t num_steps = (end - begin + MOST_ROWS<W> - 1) / MOST_ROWS<W>;
  for (int64_t step = 0; step < num_steps; ++step) {  // of nearly equal size
    const int64_t from = begin + (end - begin) * step / num_steps, to = begin + (end - begin) * (step + 1) / num_steps;
    multiply_up_to<W, T, AFTER, MOST_ROWS<W>>(to - from, rows, linear, tile, next, from, out);
  }
}

// out = rows · weightsᵀ + bias. Of all threads together.
template <typename W, typename T, After AFTER>
inline void multiply(Team& team, const Rows& rows, int64_t num_rows, const Linear& linear, const Output<T>& out) {
  const int64_t num_tiles = (linear.num_outputs + TILE - 1) / TILE;
  const int64_t num_parts = (num_rows + ROWS_A_SHARE<W> - 1) / ROWS_A_SHARE<W>;
  [[maybe_unused]] const std::conditional_t<IS_ON_AMX<W>, amx::Session, int> session{};
  team.share(num_tiles * num_parts, [&](int64_t share) {
    const int64_t tile = share / num_parts, next = std::min(tile + team.size(), num_tiles - 1);
    const int64_t begin = share % num_parts * ROWS_A_SHARE<W>, end = std::min(begin + ROWS_A_SHARE<W>, num_rows);
    multiply_share<W, T, AFTER>(rows, linear, tile, next, begin, end, out);
  });
}

// A group of a row in bytes; its scale is NaN where a value is not finite. `from`: GROUP values.
template <typename T>
inline void quantise(const T* from, int8_t* to, float& scale, int32_t& total) {
  const F32x16 values[2] = {load(from), load(from + LANES)};
  const F32x16 sizes = larger(larger(values[0], -values[0]), larger(values[1], -values[1]));
  const float most = largest_of(sizes), factor = most > 0.0f ? 127.0f / most : 0.0f;
  const F32x16 magic = splat(12582912.0f);  // rounds, and leaves the value in the lowest bits
  I32x16 sum = {};
  for (int half = 0; half < 2; ++half) {
    const I32x16 whole = bits_of<I32x16>(fma(values[half], splat(factor), magic)) - bits_of<I32x16>(magic);
    const I8x16 bytes = __builtin_convertvector(whole, I8x16);
    std::memcpy(to + half * LANES, &bytes, sizeof bytes);
    sum += whole;
  }
  total = 0;
  for (int64_t lane = 0; lane < LANES; ++lane) total += sum[lane];
  scale = most / 127.0f + sum_of((values[0] + values[1]) * 0.0f);
}

// A team's rows in bytes: [rows][inputs], [rows][groups].
struct Bytes {
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> sums;

  void resize(int64_t num_rows, int64_t num_inputs) {
    values.resize(num_rows * num_inputs);
    scales.resize(num_rows * num_inputs / GROUP);
    sums.resize(num_rows * num_inputs / GROUP);
  }
};

// Rows [num_rows, stride] of T as a product with weights of W takes them.
template <typename W, typename T>
inline Rows as_rows(Team& team, const T* from, int64_t stride, int64_t num_rows, const Linear& linear, Bytes& bytes) {
  if constexpr (!std::is_same_v<W, Int8>) {
    static_assert(std::is_same_v<W, T>);
    return {reinterpret_cast<const uint32_t*>(from), stride / PER_UNIT<T>, nullptr, nullptr};
  } else {
    const int64_t count = linear.num_inputs, num_groups = count / GROUP;
    team.share(num_rows, [&](int64_t row) {
      for (int64_t group = 0; group < num_groups; ++group)
        quantise(from + row * stride + group * GROUP, &bytes.values[row * count + group * GROUP],
                 bytes.scales[row * num_groups + group], bytes.sums[row * num_groups + group]);
    });
    return {reinterpret_cast<const uint32_t*>(bytes.values.data()), count / PER_UNIT<Int8>, bytes.scales.data(),
            bytes.sums.data()};
  }
}

}  // namespace kvferry
