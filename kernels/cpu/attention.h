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
constexpr int MOST_MIXED = 4;    // rows whose values are mixed together, 4 vectors each

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
  std::vector<T> queries, keys, values;             // rows of padded(head_dim)
  std::vector<float> weights, mixed, largest, sum;  // [rows][TOKENS], [rows][padded(head_dim)], [rows], [rows]

  void resize(int64_t num_rows, int64_t width) {
    queries.assign(num_rows * width, T{});
    keys.resize(TOKENS * width);
    values.resize(TOKENS * width);
    weights.resize(num_rows * TOKENS);
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
    first_visible_ = settings.window > 0 ? std::max<int64_t>(0, first_position_ - settings.window + 1) : 0;
    scratch_.resize(num_rows_, width_);
  }

  // `query`: [tokens, num_heads, stride] of T, from the task's first row on; `output` alike, rows of head_dim.
  void run(const T* query, int64_t query_stride, T* output, int64_t output_stride) {
    for (int64_t row = 0; row < num_rows_; ++row)
      std::copy_n(query + row / group_ * query_stride + (task_.kv_head * group_ + row % group_) * cache_.head_dim,
                  cache_.head_dim, &scratch_.queries[row * width_]);
    const int64_t last_position = first_position_ + task_.num_queries - 1;
    for (int64_t start = first_visible_ / TOKENS * TOKENS; start <= last_position; start += TOKENS) {
      find_tokens(start, last_position);
      for (int64_t row = 0; row < num_rows_; ++row) score(row, start);
      mix();
    }
    for (int64_t row = 0; row < num_rows_; ++row) write(row, output, output_stride);
  }

 private:
  int64_t position(int64_t row) const { return first_position_ + row / group_; }

  // Where the tile's keys and values are. Tokens that no row sees stand for another that one does.
  void find_tokens(int64_t start, int64_t last_position) {
    const T* data = static_cast<const T*>(cache_.data);
    for (int64_t i = 0; i < TOKENS; ++i) {
      const int64_t token = std::clamp(start + i, first_visible_, last_position);
      const int64_t block = table_[token / cache_.block_size], place = token % cache_.block_size * cache_.head_dim;
      keys_[i] = data + cache_.offset(block, settings_.layer, 0, task_.kv_head) + place;
      values_[i] = data + cache_.offset(block, settings_.layer, 1, task_.kv_head) + place;
      if (cache_.head_dim != width_) {  // the vectors' width: elsewhere there would be a neighbour's
        keys_[i] = copied(keys_[i], &scratch_.keys[i * width_]);
        values_[i] = copied(values_[i], &scratch_.values[i * width_]);
      }
    }
  }

  const T* copied(const T* from, T* to) const {
    std::fill_n(std::copy_n(from, cache_.head_dim, to), width_ - cache_.head_dim, T{});
    return to;
  }

  // Scores of a row, the weights that follow from them, and the row's factor for what was mixed before.
  void score(int64_t row, int64_t start) {
    const int64_t last = position(row);
    const int64_t first = settings_.window > 0 ? std::max<int64_t>(0, last - settings_.window + 1) : 0;
    is_skipped_[row] = start > last || start + TOKENS <= first;
    if (is_skipped_[row]) return;
    const F32x16 places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F32x16 scores[2];
    for (int half = 0; half < 2; ++half) {
      scores[half] = scores_of(&scratch_.queries[row * width_], keys_ + half * LANES);
      const F32x16 token = places + float(half * LANES);
      const F32x16 is_outside = splat(NO_SCORE);
      scores[half] = token > float(last - start) ? is_outside : scores[half];
      scores[half] = token < float(first - start) ? is_outside : scores[half];
    }
    const float largest = std::max(scratch_.largest[row], largest_of(larger(scores[0], scores[1])));
    const F32x16 weights[2] = {exp_of(scores[0] - largest), exp_of(scores[1] - largest)};
    factors_[row] = exp_of(splat(scratch_.largest[row] - largest))[0];
    scratch_.largest[row] = largest;
    scratch_.sum[row] = __builtin_fmaf(scratch_.sum[row], factors_[row], sum_of(weights[0] + weights[1]));
    store(&scratch_.weights[row * TOKENS], weights[0]);
    store(&scratch_.weights[row * TOKENS + LANES], weights[1]);
  }

  F32x16 scores_of(const T* query, const T* const* keys) const {
    F32x16 sums[LANES];
    for (int64_t token = 0; token < LANES; ++token) {
      F32x16 sum = {};
      for (int64_t at = 0; at < width_; at += LANES * PER_UNIT<T>)
        sum = dot_units<T>(sum, load_bytes<U32x16>(query + at), load_bytes<U32x16>(keys[token] + at));
      sums[token] = sum;
    }
    const F32x16 scores = sums_of(sums) * settings_.scaling;
    if (settings_.softcap == 0.0f) return scores;
    const F32x16 power = exp_of(larger(scores * (-2.0f / settings_.softcap), splat(-80.0f)) );
    return (1.0f - power) / (1.0f + power) * settings_.softcap;  // tanh
  }

  void mix() {
    int64_t rows[MOST_MIXED];
    int count = 0;
    for (int64_t row = 0; row < num_rows_; ++row) {
      if (!is_skipped_[row]) rows[count++] = row;
      if (count == MOST_MIXED || (row == num_rows_ - 1 && count > 0)) {
        mix_up_to<MOST_MIXED>(rows, count);
        count = 0;
      }
    }
  }

  template <int ROWS>
  void mix_up_to(const int64_t* rows, int count) {
    if (count == ROWS) {
      int64_t at = 0;
      for (; at + 4 * LANES <= width_; at += 4 * LANES) mix_rows<ROWS, 4>(rows, at);
      for (; at < width_; at += LANES) mix_rows<ROWS, 1>(rows, at);
      return;
    }
    if constexpr (ROWS > 1) mix_up_to<ROWS - 1>(rows, count);
  }

  template <int ROWS, int VECTORS>
  void mix_rows(const int64_t* rows, int64_t at) {
    F32x16 sums[ROWS][VECTORS];
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < VECTORS; ++v)
        sums[i][v] = load(&scratch_.mixed[rows[i] * width_ + at + v * LANES]) * factors_[rows[i]];
    for (int64_t token = 0; token < TOKENS; ++token)
      for (int v = 0; v < VECTORS; ++v) {
        const F32x16 value = load(values_[token] + at + v * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; ++i)
          sums[i][v] = fma(splat(scratch_.weights[rows[i] * TOKENS + token]), value, sums[i][v]);
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
  const T* keys_[TOKENS];
  const T* values_[TOKENS];
  std::vector<char> is_skipped_ = std::vector<char>(num_rows_);
  std::vector<float> factors_ = std::vector<float>(num_rows_);
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
