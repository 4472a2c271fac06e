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
constexpr int64_t CACHE_LINE_BYTES = 64;

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

// One task: up to QUERIES positions of a sequence, the heads that share one KV head, or each of several.
struct AttentionTask {
  int64_t sequence, first_query, num_queries, first_kv_head, num_kv_heads;
};

// Who decodes reads the KV heads of a block one after the other, as they lie in memory, where there are tasks enough.
inline std::vector<AttentionTask> attention_tasks(const Sequences& of, int64_t num_kv_heads, int64_t num_threads) {
  std::vector<AttentionTask> tasks;
  const bool are_many = of.num_sequences >= 2 * num_threads;
  for (int64_t sequence = 0; sequence < of.num_sequences; ++sequence) {
    const int64_t num_queries = of.first_rows[sequence + 1] - of.first_rows[sequence];
    const int64_t heads = num_queries == 1 && are_many ? num_kv_heads : 1;
    for (int64_t first = 0; first < num_queries; first += QUERIES)
      for (int64_t head = 0; head < num_kv_heads; head += heads)
        tasks.push_back({sequence, first, std::min(QUERIES, num_queries - first), head, heads});
  }
  return tasks;
}

// A thread's memory for one task.
template <typename T>
struct AttentionScratch {
  std::vector<T> queries, padded_rows;        // [rows][padded(head_dim)], two rows
  std::vector<uint32_t> keys;                 // of a tile, turned: [units][TOKENS]
  std::vector<uint32_t> values;               // of a tile, in units of neighbouring tokens: [units][padded(head_dim)]
  std::vector<float> mixed, largest, sum;     // [rows][padded(head_dim)], [rows], [rows]

  void resize(int64_t num_rows, int64_t width) {
    queries.assign(num_rows * width, T{});
    padded_rows.assign(2 * width, T{});
    keys.resize(TOKENS * width / PER_UNIT<T>);
    values.resize(TOKENS * width / PER_UNIT<T>);
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
    last_position_ = first_position_ + task.num_queries - 1;
    first_visible_ = first_seen(first_position_);
    takes_values_there_ = num_rows_ <= MOST_AT_ONCE && width_ == cache.head_dim;
  }

  // `query`: [tokens, num_heads, stride] of T, from the task's first row on; `output` alike, rows of head_dim. `next`: what
  // this thread is likely to do then.
  void run(const T* query, int64_t query_stride, T* output, int64_t output_stride, const AttentionTile& next) {
    scratch_.resize(num_rows_ * task_.num_kv_heads, width_);
    for (int64_t row = 0; row < num_rows_ * task_.num_kv_heads; ++row)
      std::copy_n(query + query_of(row) * query_stride + head_of(row) * cache_.head_dim, cache_.head_dim,
                  &scratch_.queries[row * width_]);
    for (int64_t start = first_tile(); start <= last_position_; start += TOKENS)
      for (int64_t head = 0; head < task_.num_kv_heads; ++head) {
        if (start + TOKENS <= last_position_) load_tile(start, head, *this, start + TOKENS);
        else load_tile(start, head, next, next.first_tile());
        step_all(start, head);
      }
    for (int64_t row = 0; row < num_rows_ * task_.num_kv_heads; ++row)
      write(row, output + query_of(row) * output_stride + head_of(row) * cache_.head_dim);
  }

  int64_t first_tile() const { return first_visible_ / TOKENS * TOKENS; }

  // Asks memory for the tile's keys and values, so that they are near when it comes.
  void fetch(int64_t start, int64_t count, int64_t head) const {
    const int64_t first = std::max(start, first_visible_), end = std::min(start + count, last_position_ + 1);
    visit_runs(head, first, end - first, [&](int64_t, int64_t length, const T* keys, const T* values) {
      for (int64_t at = 0; at < length * cache_.head_dim; at += CACHE_LINE_BYTES / sizeof(T)) {
        fetch_line(keys + at);
        fetch_line(values + at);
      }
    });
  }

 private:
  // Rows are ordered by KV head of the task, query, head of the group.
  int64_t query_of(int64_t row) const { return row % num_rows_ / group_; }
  int64_t head_of(int64_t row) const { return (task_.first_kv_head + row / num_rows_) * group_ + row % group_; }
  struct Row {
    int64_t number, position;
  };
  int64_t first_seen(int64_t position) const {
    return settings_.window > 0 ? std::max<int64_t>(0, position - settings_.window + 1) : 0;
  }

  // The tile's keys, turned so that a vector has 16 tokens, and its values so that a unit has neighbouring ones; few rows
  // take the values from where they are. Tokens that no row sees stand for another that one does.
  void load_tile(int64_t start, int64_t head, const AttentionTile& next, int64_t next_start) {
    find_tokens(start, head);
    const int64_t num_units = width_ / PER_UNIT<T>, share = LANES * LANES / num_units;
    for (int64_t first = 0; first < TOKENS; first += LANES)
      for (int64_t unit = 0; unit < num_units; unit += LANES) {
        U32x16 square[LANES];
        if ((unit + LANES) * PER_UNIT<T> <= cache_.head_dim)
#pragma GCC unroll 16
          for (int64_t i = 0; i < LANES; ++i) square[i] = load_bytes<U32x16>(keys_[first + i] + unit * PER_UNIT<T>);
        else
          for (int64_t i = 0; i < LANES; ++i)
            square[i] = load_bytes<U32x16>(with_zeros(keys_[first + i], 0) + unit * PER_UNIT<T>);
        next.fetch(next_start + first + unit / LANES * share, share, head % next.task_.num_kv_heads);
        transpose(square);
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; ++i) std::memcpy(&scratch_.keys[(unit + i) * TOKENS + first], &square[i], VECTOR_BYTES);
      }
    if (takes_values_there_) return;
    for (int64_t token = 0; token < TOKENS; token += PER_UNIT<T>) {
      const T* rows[PER_UNIT<T>];
      for (int64_t i = 0; i < PER_UNIT<T>; ++i) rows[i] = with_zeros(values_[token + i], i);
      for (int64_t at = 0; at < width_; at += 2 * LANES) {
        const Units units = interleave(rows, at);
        std::memcpy(&scratch_.values[token / PER_UNIT<T> * width_ + at], &units, sizeof units);
      }
    }
  }

  // Calls visit(first, count, keys, values) for the runs of tokens that lie in one block, of `count` from `first` on.
  template <typename Visit>
  void visit_runs(int64_t head, int64_t first, int64_t count, const Visit& visit) const {
    head += task_.first_kv_head;
    const T* data = static_cast<const T*>(cache_.data);
    for (const int64_t end = first + count; first < end;) {
      const int64_t block = table_[first / cache_.block_size], place = first % cache_.block_size;
      const int64_t length = std::min(cache_.block_size - place, end - first);
      visit(first, length, data + cache_.offset(block, settings_.layer, 0, head) + place * cache_.head_dim,
            data + cache_.offset(block, settings_.layer, 1, head) + place * cache_.head_dim);
      first += length;
    }
  }

  void find_tokens(int64_t start, int64_t head) {
    const int64_t first = std::max(start, first_visible_), end = std::min(start + TOKENS, last_position_ + 1);
    visit_runs(head, first, end - first, [&](int64_t token, int64_t length, const T* keys, const T* values) {
      for (int64_t i = 0; i < length; ++i) {
        keys_[token - start + i] = keys + i * cache_.head_dim;
        values_[token - start + i] = values + i * cache_.head_dim;
      }
    });
    std::fill(keys_, keys_ + (first - start), keys_[first - start]);
    std::fill(values_, values_ + (first - start), values_[first - start]);
    std::fill(keys_ + (end - start), keys_ + TOKENS, keys_[end - start - 1]);
    std::fill(values_ + (end - start), values_ + TOKENS, values_[end - start - 1]);
  }

  // The row, or a copy with zeros behind it where its width is not whole.
  const T* with_zeros(const T* row, int64_t copy) {
    if (width_ == cache_.head_dim) return row;
    std::copy_n(row, cache_.head_dim, &scratch_.padded_rows[copy * width_]);
    return &scratch_.padded_rows[copy * width_];
  }

  // One tile more for all rows of a KV head.
  void step_all(int64_t start, int64_t head) {
    Row rows[MOST_AT_ONCE];
    int count = 0;
    const auto take = [&] {
      step_up_to<MOST_AT_ONCE>(rows, count, start);
      count = 0;
    };
    for (int64_t query = 0; query < task_.num_queries; ++query) {
      const int64_t position = first_position_ + query;
      if (start > position || start + TOKENS <= first_seen(position)) continue;
      for (int64_t of_group = 0; of_group < group_; ++of_group) {
        rows[count++] = {head * num_rows_ + query * group_ + of_group, position};
        if (count == MOST_AT_ONCE) take();
      }
    }
    if (count > 0) take();
  }

  template <int ROWS>
  void step_up_to(const Row* rows, int count, int64_t start) {
    if (count == ROWS) return step<ROWS>(rows, start);
    if constexpr (ROWS > 1) step_up_to<ROWS - 1>(rows, count, start);
  }

  // One tile more for these rows.
  template <int ROWS>
  void step(const Row* rows, int64_t start) {
    F32x16 scores[ROWS][2];
    score<ROWS>(rows, scores);
    alignas(VECTOR_BYTES) float factors[LANES] = {};
    for (int i = 0; i < ROWS; ++i) factors[i] = limit(rows[i], start, scores[i]);
    store(factors, exp_of(load(factors)));
    T weights[ROWS][TOKENS];
    for (int i = 0; i < ROWS; ++i) weigh(rows[i].number, scores[i], factors[i], weights[i]);
    if (takes_values_there_) mix_all<ROWS, true>(rows, weights, factors);
    else mix_all<ROWS, false>(rows, weights, factors);
  }

  template <int ROWS, bool IS_THERE>
  void mix_all(const Row* rows, const T (&weights)[ROWS][TOKENS], const float (&factors)[LANES]) {
    int64_t at = 0;
    for (; at + 4 * LANES <= width_; at += 4 * LANES) mix<ROWS, 4, IS_THERE>(rows, weights, factors, at);
    for (; at < width_; at += 2 * LANES) mix<ROWS, 2, IS_THERE>(rows, weights, factors, at);
  }

  template <int ROWS>
  void score(const Row* rows, F32x16 (&scores)[ROWS][2]) const {
    const uint32_t* queries[ROWS];
    for (int i = 0; i < ROWS; ++i) queries[i] = reinterpret_cast<const uint32_t*>(&scratch_.queries[rows[i].number * width_]);
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

  // Leaves out what a row does not see, and takes the largest score so far; returns by how much that has grown, negative.
  float limit(const Row& row, int64_t start, F32x16 (&scores)[2]) {
    const int64_t last = row.position, first = first_seen(last);
    if (first > start || last < start + TOKENS - 1) {
      const F32x16 places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      for (int half = 0; half < 2; ++half) {
        const F32x16 token = places + float(half * LANES);
        scores[half] = token > float(last - start) ? splat(NO_SCORE) : scores[half];
        scores[half] = token < float(first - start) ? splat(NO_SCORE) : scores[half];
      }
    }
    float& largest = scratch_.largest[row.number];
    const float before = largest;
    largest = std::max(before, largest_of(larger(scores[0], scores[1])));
    return before - largest;
  }

  // Weights that follow from a row's scores; `factor` is that of what was mixed before.
  void weigh(int64_t row, const F32x16 (&scores)[2], float factor, T* weights) {
    const float largest = scratch_.largest[row];
    const F32x16 powers[2] = {exp_of(scores[0] - largest), exp_of(scores[1] - largest)};
    scratch_.sum[row] = __builtin_fmaf(scratch_.sum[row], factor, sum_of(powers[0] + powers[1]));
    store(weights, powers[0]);
    store(weights + LANES, powers[1]);
  }

  template <int ROWS, int VECTORS, bool IS_THERE>
  void mix(const Row* rows, const T (&weights)[ROWS][TOKENS], const float (&factors)[LANES], int64_t at) {
    F32x16 sums[ROWS][VECTORS];
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < VECTORS; ++v)
        sums[i][v] = load(&scratch_.mixed[rows[i].number * width_ + at + v * LANES]) * factors[i];
    for (int64_t token = 0; token < TOKENS; token += PER_UNIT<T>) {
      Units values[VECTORS / 2];
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS / 2; ++v)
        values[v] = IS_THERE
                        ? interleave(values_ + token, at + v * 2 * LANES)
                        : load_bytes<Units>(&scratch_.values[token / PER_UNIT<T> * width_ + at + v * 2 * LANES]);
#pragma GCC unroll 6
      for (int i = 0; i < ROWS; ++i) {
        const U32x16 one = splat_bits(load_bytes<uint32_t>(&weights[i][token]));
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS / 2; ++v) {
          sums[i][2 * v] = dot_units<T>(sums[i][2 * v], one, values[v].first);
          sums[i][2 * v + 1] = dot_units<T>(sums[i][2 * v + 1], one, values[v].second);
        }
      }
    }
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < VECTORS; ++v) store(&scratch_.mixed[rows[i].number * width_ + at + v * LANES], sums[i][v]);
  }

  void write(int64_t row, T* to) {
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
  const int64_t width_, group_, num_rows_;  // rows of one KV head
  const AttentionTask task_;
  const int64_t* table_;
  int64_t first_position_, last_position_, first_visible_;
  bool takes_values_there_;
  const T *keys_[TOKENS], *values_[TOKENS];  // of the tile's tokens
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
    const size_t then = std::min<size_t>(number + team.size(), tasks.size() - 1);
    const AttentionTile<T> next(cache, of, settings, tasks[then], scratch);
    AttentionTile<T>(cache, of, settings, task, scratch)
        .run(query + row * query_stride, query_stride, output + row * output_stride, output_stride, next);
  });
}

}  // namespace kvferry
