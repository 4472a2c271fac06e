// What a new library shows before it is used: that its products of bfloat16 are right, and the same bits for every number
// of rows. Processors, compilers and systems may be wrong about what they can do together.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "linear.h"
#include "team.h"

namespace kvferry {

// Numbers between -1 and 1 that bfloat16 has.
class Numbers {
 public:
  Bf16 next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    const float value = static_cast<float>(static_cast<int64_t>(state_) >> 32) / 2147483648.0f;
    return {static_cast<uint16_t>(bits_of<uint32_t>(value) >> 16)};
  }

 private:
  uint64_t state_ = 1;
};

inline double exactly(Bf16 value) { return bits_of<float>(static_cast<uint32_t>(value.bits) << 16); }

// Whether products of `num_rows` rows with `num_outputs` outputs are as far from exact ones as rounding explains, and
// each row's as if it were alone.
inline bool multiplies_well(Team& team, int64_t num_rows, int64_t num_inputs, int64_t num_outputs) {
  constexpr double MOST_ROUNDING = 1e-6;  // of a sum's parts without their signs; one rounding to bfloat16 is 4e-3
  Numbers numbers;
  std::vector<Bf16> rows(whole_rows(num_rows) * num_inputs), weights(padded(num_outputs) * num_inputs);
  for (std::vector<Bf16>* values : {&rows, &weights})
    for (Bf16& value : *values) value = numbers.next();
  const Linear linear = {.packed = reinterpret_cast<const uint32_t*>(weights.data()),
                         .bias = nullptr,
                         .num_inputs = num_inputs,
                         .num_outputs = num_outputs};
  const int64_t width = padded(num_outputs), stride = num_inputs / PER_UNIT<Bf16>;
  const auto product = [&](int64_t first, int64_t count) {
    std::vector<Bf16> some(rows.begin() + first * num_inputs, rows.begin() + (first + count) * num_inputs);
    some.resize(whole_rows(count) * num_inputs, Bf16{0x7fc0});  // rows beside it are NaN
    std::vector<float> output(count * width);
    const Rows taken = {.units = reinterpret_cast<const uint32_t*>(some.data()), .stride = stride};
    team.run([&] {
      multiply<Bf16, Bf16, After::STORE>(team, taken, count, linear, {output.data(), nullptr, width});
    });
    return output;
  };
  const std::vector<float> whole = product(0, num_rows);
  for (int64_t row = 0; row < num_rows; ++row) {
    const std::vector<float> alone = product(row, 1);
    for (int64_t output = 0; output < width; ++output) {
      double sum = 0.0, size = 0.0;
      for (int64_t input = 0; input < num_inputs; ++input) {
        const int64_t unit = output / TILE * stride + input / 2, place = (unit * TILE + output % TILE) * 2 + input % 2;
        const double part = exactly(rows[row * num_inputs + input]) * exactly(weights[place]);
        sum += part;
        size += std::abs(part);
      }
      const float ours = whole[row * width + output];
      if (!(std::abs(ours - sum) <= size * MOST_ROUNDING) || bits_of<uint32_t>(ours) != bits_of<uint32_t>(alone[output]))
        return false;
    }
  }
  return true;
}

}  // namespace kvferry
