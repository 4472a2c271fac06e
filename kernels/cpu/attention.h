// Paged attention: causal, grouped heads, sliding window, soft cap; over blocks where they lie, nothing gathered.
//
// One row (a query of one head) goes through its context in tiles of 32 tokens that begin at multiples of 32, keeping
// the largest score, the sum of weights and the mixed values so far (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018). It takes the same steps whatever else is computed beside it: a decode step, a
// prefill chunk of any size and any block table give the same bits.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"
#include "team.h"

namespace kvferry {

constexpr int64_t TOKENS = 32;   // of a tile
constexpr int64_t QUERIES = 16;  // positions of one task: each of their heads shares the loaded keys
constexpr int MOST_AT_ONCE = 6;  // rows that share what is loaded: 6 rows · 4 vectors are 24 sums

struct Cache {
  void* data;  // [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
  int64_t num_layers, num_kv_heads, block_size, head_dim;

  // First element of a block's keys (part 0) or values (part 1), counted in elements.
  int64_t offset(int64_t block, int64_t layer, int64_t part, int64_t head) const {
    return (((block * num_layers + layer) * 2 + part) * num_kv_heads + head) * block_size * head_dim;
  }
};

struct Sequences {
  int64_t num_sequences, max_blocks;
  const int64_t* block_tables;     // [num_sequences, max_blocks]
  const int64_t* first_rows;       // [num_sequences + 1]
  const int64_t* context_lengths;  // [num_sequences]
};

struct AttentionSettings {
  int64_t num_heads, layer;
  int64_t window;  // tokens a token sees, itself included; 0: all
  float scaling;
  float softcap;  // 0: none
};

// One task: QUERIES positions of a sequence, the heads that share one KV head.
struct AttentionTask {
  int64_t sequence, first_query, num_queries, kv_head;
};

inline std::vector<AttentionTask> attention_tasks(const Sequences& of, int64_t num_kv_heads) {
  std::vector<AttentionTask> tasks;
  for (int64_t sequence = 0; sequence < of.num_sequences; ++sequence) {
    const int64_t num_queries = of.first_rows[sequence + 1] - of.first_rows[sequence];
    for (int64_t first = 0; first < num_queries; first += QUERIES)
      for (int64_t head = 0; head < num_kv_heads; ++head)
        tasks.push_back({sequence, first, std::min(QUERIES, num_queries - first), head});
  }
  return tasks;
}

// A thread's memory for one task.
template <typename T>
struct AttentionScratch {
  std::vector<T> queries, padded_row;         // [rows][padded(head_dim)], one row
  std::vector<uint32_t> keys;                 // of a tile, turned: [units][TOKENS]
  std::vector<float> values;                  // of a tile: [TOKENS][padded(head_dim)]
  std::vector<float> mixed, largest, sum;     // [rows][padded(head_dim)], [rows], [rows]

  void resize(int64_t num_rows, int64_t width) {
    queries.assign(num_rows * width, T{});
    padded_row.assign(width, T{});
    keys.resize(TOKENS * width / PER_UNIT<T>);
    values.resize(TOKENS * width);
    mixed.assign(num_rows * width, 0.0f);
    largest.assign(num_rows, NO_SCORE);
    sum.assign(num_rows, 0.0f);
  }
};

template <typename T>
class AttentionTile {
 public:
  AttentionTile(const Cache& cache, const Sequences& of, const AttentionSettings& settings, const AttentionTask& task,
                AttentionScratch<T>& scratch)
      : cache_(cache), settings_(settings), scratch_(scratch), width_(padded(cache.head_dim)),
        group_(settings.num_heads / cache.num_kv_heads), num_rows_(group_ * task.num_queries), task_(task),
        table_(of.block_tables + task.sequence * of.max_blocks) {
    const int64_t num_queries = of.first_rows[task.sequence + 1] - of.first_rows[task.sequence];
    first_position_ = of.context_lengths[task.sequence] - num_queries + task.first_query;
    first_visible_ = first_seen(first_position_);
    scratch_.resize(num_rows_, width_);
  }

  // `query`: [tokens, num_heads, stride] of T, from the task's first row on; `output` alike, rows of head_dim.
  void run(const T* query, int64_t query_stride, T* output, int64_t output_stride) {
    for (int64_t row = 0; row < num_rows_; ++row)
      std::copy_n(query + row / group_ * query_stride + (task_.kv_head * group_ + row % group_) * cache_.head_dim,
                  cache_.head_dim, &scratch_.queries[row * width_]);
    const int64_t last_position = first_position_ + task_.num_queries - 1;
    for (int64_t start = first_visible_ / TOKENS * TOKENS; start <= last_position; start += TOKENS) {
      load_tile(start, last_position);
      int64_t rows[MOST_AT_ONCE];
      int count = 0;
      for (int64_t row = 0; row < num_rows_; ++row) {
        if (start <= position(row) && start + TOKENS > first_seen(position(row))) rows[count++] = row;
        if (count == MOST_AT_ONCE || (row == num_rows_ - 1 && count > 0)) {
          step_up_to<MOST_AT_ONCE>(rows, count, start);
          count = 0;
        }
      }
    }
    for (int64_t row = 0; row < num_rows_; ++row) write(row, output, output_stride);
  }

 private:
  int64_t position(int64_t row) const { return first_position_ + row / group_; }
  int64_t first_seen(int64_t position) const {
    return settings_.window > 0 ? std::max<int64_t>(0, position - settings_.window + 1) : 0;
  }

  // The tile's keys, turned so that a vector has 16 tokens, and its values as floats. Tokens that no row sees stand for
  // another that one does.
  void load_tile(int64_t start, int64_t last_position) {
    const T *keys[TOKENS], *values[TOKENS];
    find_tokens(start, last_position, keys, values);
    const int64_t num_units = width_ / PER_UNIT<T>;
    for (int64_t first = 0; first < TOKENS; first += LANES)
      for (int64_t unit = 0; unit < num_units; unit += LANES) {
        U32x16 square[LANES];
        for (int64_t i = 0; i < LANES; ++i) square[i] = load_bytes<U32x16>(whole_row(keys[first + i], unit) + unit * PER_UNIT<T>);
        transpose(square);
        for (int64_t i = 0; i < LANES; ++i) std::memcpy(&scratch_.keys[(unit + i) * TOKENS + first], &square[i], VECTOR_BYTES);
      }
    for (int64_t i = 0; i < TOKENS; ++i) {
      const T* from = whole_row(values[i], width_ / PER_UNIT<T> - LANES);
      for (int64_t at = 0; at < width_; at += LANES) store(&scratch_.values[i * width_ + at], load(from + at));
    }
  }

  // Where they are; the next tile's are asked for, so that they are near when it comes.
  void find_tokens(int64_t start, int64_t last_position, const T** keys, const T** values) const {
    const T* data = static_cast<const T*>(cache_.data);
    int64_t token = std::clamp(start, first_visible_, last_position);
    int64_t column = token / cache_.block_size, place = token % cache_.block_size;
    const T *block_keys = nullptr, *block_values = nullptr;
    const auto enter_block = [&] {
      block_keys = data + cache_.offset(table_[column], settings_.layer, 0, task_.kv_head);
      block_values = data + cache_.offset(table_[column], settings_.layer, 1, task_.kv_head);
    };
    enter_block();
    const int64_t ahead = TOKENS * cache_.head_dim;  // within a block; others are found by what loads them
    for (int64_t i = 0; i < TOKENS; ++i) {
      keys[i] = block_keys + place * cache_.head_dim;
      values[i] = block_values + place * cache_.head_dim;
      __builtin_prefetch(keys[i] + ahead);
      __builtin_prefetch(values[i] + ahead);
      if (start + i + 1 <= token || token == last_position) continue;
      ++token;
      if (++place == cache_.block_size) {
        place = 0;
        ++column;
        enter_block();
      }
    }
  }

  // The row, or a copy with zeros behind it where 16 units from `unit` on would reach beyond it.
  const T* whole_row(const T* row, int64_t unit) {
    if ((unit + LANES) * PER_UNIT<T> <= cache_.head_dim) return row;
    std::copy_n(row, cache_.head_dim, scratch_.padded_row.data());
    return scratch_.padded_row.data();
  }

  template <int ROWS>
  void step_up_to(const int64_t* rows, int count, int64_t start) {
    if (count == ROWS) return step<ROWS>(rows, start);
    if constexpr (ROWS > 1) step_up_to<ROWS - 1>(rows, count, start);
  }

  // One tile more for these rows.
  template <int ROWS>
  void step(const int64_t* rows, int64_t start) {
    F32x16 scores[ROWS][2];
    score<ROWS>(rows, scores);
    float weights[ROWS][TOKENS], factors[ROWS];
    for (int i = 0; i < ROWS; ++i) factors[i] = weigh(rows[i], start, scores[i], weights[i]);
    int64_t at = 0;
    for (; at + 4 * LANES <= width_; at += 4 * LANES) mix<ROWS, 4>(rows, weights, factors, at);
    for (; at < width_; at += LANES) mix<ROWS, 1>(rows, weights, factors, at);
  }

  template <int ROWS>
  void score(const int64_t* rows, F32x16 (&scores)[ROWS][2]) const {
    const uint32_t* queries[ROWS];
    for (int i = 0; i < ROWS; ++i) queries[i] = reinterpret_cast<const uint32_t*>(&scratch_.queries[rows[i] * width_]);
    F32x16 sums[ROWS][2] = {};
    for (int64_t unit = 0; unit < width_ / PER_UNIT<T>; ++unit) {
      const U32x16 first = load_bytes<U32x16>(&scratch_.keys[unit * TOKENS]);
      const U32x16 second = load_bytes<U32x16>(&scratch_.keys[unit * TOKENS + LANES]);
#pragma GCC unroll 6
      for (int i = 0; i < ROWS; ++i) {
        const U32x16 one = splat_bits(load_bytes<uint32_t>(queries[i] + unit));
        sums[i][0] = dot_units<T>(sums[i][0], one, first);
        sums[i][1] = dot_units<T>(sums[i][1], one, second);
      }
    }
    for (int i = 0; i < ROWS; ++i)
      for (int half = 0; half < 2; ++half) scores[i][half] = capped(sums[i][half] * settings_.scaling);
  }

  F32x16 capped(F32x16 scores) const {
    if (settings_.softcap == 0.0f) return scores;
    const F32x16 power = exp_of(larger(scores * (-2.0f / settings_.softcap), splat(-80.0f)));
    return (1.0f - power) / (1.0f + power) * settings_.softcap;  // tanh
  }

  // Weights that follow from a row's scores; returns the factor for what was mixed before.
  float weigh(int64_t row, int64_t start, F32x16 (&scores)[2], float* weights) {
    const int64_t last = position(row), first = first_seen(last);
    const F32x16 places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const F32x16 is_outside = splat(NO_SCORE);
    for (int half = 0; half < 2; ++half) {
      const F32x16 token = places + float(half * LANES);
      scores[half] = token > float(last - start) ? is_outside : scores[half];
      scores[half] = token < float(first - start) ? is_outside : scores[half];
    }
    const float largest = std::max(scratch_.largest[row], largest_of(larger(scores[0], scores[1])));
    const F32x16 powers[2] = {exp_of(scores[0] - largest), exp_of(scores[1] - largest)};
    const float factor = exp_of(splat(scratch_.largest[row] - largest))[0];
    scratch_.largest[row] = largest;
    scratch_.sum[row] = __builtin_fmaf(scratch_.sum[row], factor, sum_of(powers[0] + powers[1]));
    store(weights, powers[0]);
    store(weights + LANES, powers[1]);
    return factor;
  }

  template <int ROWS, int VECTORS>
  void mix(const int64_t* rows, const float (&weights)[ROWS][TOKENS], const float (&factors)[ROWS], int64_t at) {
    F32x16 sums[ROWS][VECTORS];
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < VECTORS; ++v)
        sums[i][v] = load(&scratch_.mixed[rows[i] * width_ + at + v * LANES]) * factors[i];
    for (int64_t token = 0; token < TOKENS; ++token) {
      F32x16 values[VECTORS];
      for (int v = 0; v < VECTORS; ++v) values[v] = load(&scratch_.values[token * width_ + at + v * LANES]);
#pragma GCC unroll 6
      for (int i = 0; i < ROWS; ++i)
        for (int v = 0; v < VECTORS; ++v) sums[i][v] = fma(splat(weights[i][token]), values[v], sums[i][v]);
    }
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < VECTORS; ++v) store(&scratch_.mixed[rows[i] * width_ + at + v * LANES], sums[i][v]);
  }

  void write(int64_t row, T* output, int64_t output_stride) {
    T* to = output + row / group_ * output_stride + (task_.kv_head * group_ + row % group_) * cache_.head_dim;
    T last[LANES];
    for (int64_t at = 0; at < cache_.head_dim; at += LANES) {
      const F32x16 values = load(&scratch_.mixed[row * width_ + at]) / scratch_.sum[row];
      store(last, values);
      std::copy_n(last, std::min(LANES, cache_.head_dim - at), to + at);
    }
  }

  const Cache& cache_;
  const AttentionSettings& settings_;
  AttentionScratch<T>& scratch_;
  const int64_t width_, group_, num_rows_;
  const AttentionTask task_;
  const int64_t* table_;
  int64_t first_position_, first_visible_;
};

// `query`, `output`: [tokens, stride]. Of all threads together.
template <typename T>
inline void attend(Team& team, const std::vector<AttentionTask>& tasks, const Cache& cache, const Sequences& of,
                   const AttentionSettings& settings, const T* query, int64_t query_stride, T* output,
                   int64_t output_stride) {
  thread_local AttentionScratch<T> scratch;
  team.share(tasks.size(), [&](int64_t number) {
    const AttentionTask& task = tasks[number];
    const int64_t row = of.first_rows[task.sequence] + task.first_query;
    AttentionTile<T>(cache, of, settings, task, scratch)
        .run(query + row * query_stride, query_stride, output + row * output_stride, output_stride);
  });
}

}  // namespace kvferry
