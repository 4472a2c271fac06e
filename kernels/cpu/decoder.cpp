// A decoder of Llama's family as one call: all layers over a step's rows, and the output layer over some of them.
//
//     x ─► norm ─► queries, keys, values ─► rotation, write ─► attention ─► + x ─► norm ─► gate · up ─► down ─► + x
//
// x stays in float between layers; what goes into products and into the cache is rounded to the model's type. The C
// interface takes pointers that the caller keeps alive; nothing here allocates what outlives a call but the team.
#include <memory>

#include "attention.h"
#include "linear.h"
#include "rows.h"

using namespace kvferry;

extern "C" {

struct Layer {
  Linear projection, output, gate_up, down;
  const float *attention_norm, *mlp_norm, *query_norm, *key_norm;
  int64_t window;
};

struct Decoder {
  int64_t is_bfloat16, num_layers, hidden_size, intermediate_size, num_heads;
  float epsilon, scaling, softcap;
  const Layer* layers;
  const float* final_norm;
  Linear head;
};

struct Step {
  int64_t num_tokens;
  const int64_t* slots;  // [num_tokens]
  const float *cosines, *sines;
  float* x;  // [num_tokens, padded(hidden_size)]
  Cache cache;
  Sequences sequences;
};
}

namespace {

template <typename T>
struct Buffers {
  int64_t normed_width, projected_width, attention_width, activation_width;
  std::vector<T> normed, queries, attended, activations;
  std::vector<float> projected;

  void resize(const Decoder& decoder, const Cache& cache, int64_t num_tokens) {
    normed_width = padded(decoder.hidden_size);
    attention_width = padded(decoder.num_heads * cache.head_dim);
    projected_width = padded((decoder.num_heads + 2 * cache.num_kv_heads) * cache.head_dim);
    activation_width = padded(decoder.intermediate_size);
    normed.resize(num_tokens * normed_width);
    queries.resize(num_tokens * attention_width);
    attended.resize(num_tokens * attention_width);
    activations.resize(num_tokens * activation_width);
    projected.resize(num_tokens * projected_width);
  }
};

template <typename T>
Buffers<T>& buffers() {
  static thread_local Buffers<T> own;  // of the thread that calls, reused from step to step
  return own;
}

template <typename T>
void run_layers(Team& team, const Decoder& decoder, const Step& step) {
  Buffers<T>& mine = buffers<T>();
  mine.resize(decoder, step.cache, step.num_tokens);
  const std::vector<AttentionTask> tasks = attention_tasks(step.sequences, step.cache.num_kv_heads);
  const int64_t width = padded(decoder.hidden_size), count = step.num_tokens;
  team.run([&] {
    for (int64_t number = 0; number < decoder.num_layers; ++number) {
      const Layer& layer = decoder.layers[number];
      const Rotation rotation = {step.cosines, step.sines, layer.query_norm, layer.key_norm, decoder.epsilon};
      const AttentionSettings settings = {decoder.num_heads, number, layer.window, decoder.scaling, decoder.softcap};
      const Output<T> to_x = {step.x, nullptr, width};
      normalise_rows(team, step.x, width, count, layer.attention_norm, decoder.hidden_size, decoder.epsilon,
                     mine.normed.data(), mine.normed_width);
      multiply<T, After::STORE>(team, mine.normed.data(), mine.normed_width, count, layer.projection,
                                {mine.projected.data(), nullptr, mine.projected_width});
      rotate_and_write(team, mine.projected.data(), mine.projected_width, count, decoder.num_heads, rotation,
                       step.cache, number, step.slots, mine.queries.data(), mine.attention_width);
      attend(team, tasks, step.cache, step.sequences, settings, mine.queries.data(), mine.attention_width,
             mine.attended.data(), mine.attention_width);
      multiply<T, After::ADD>(team, mine.attended.data(), mine.attention_width, count, layer.output, to_x);
      normalise_rows(team, step.x, width, count, layer.mlp_norm, decoder.hidden_size, decoder.epsilon,
                     mine.normed.data(), mine.normed_width);
      multiply<T, After::SILU_MUL>(team, mine.normed.data(), mine.normed_width, count, layer.gate_up,
                                   {nullptr, mine.activations.data(), mine.activation_width});
      multiply<T, After::ADD>(team, mine.activations.data(), mine.activation_width, count, layer.down, to_x);
    }
  });
}

template <typename T>
void run_head(Team& team, const Decoder& decoder, const float* x, const int64_t* rows, int64_t num_rows,
              float* logits, int64_t stride) {
  const int64_t width = padded(decoder.hidden_size);
  std::vector<T> normed(num_rows * width);
  team.run([&] {
    team.share(num_rows, [&](int64_t row) {
      normalise(x + rows[row] * width, decoder.final_norm, decoder.hidden_size, decoder.epsilon, &normed[row * width]);
    });
    multiply<T, After::STORE>(team, normed.data(), width, num_rows, decoder.head, {logits, nullptr, stride});
  });
}

}  // namespace

extern "C" {

Team* kvferry_team(int num_threads) { return new Team(num_threads); }

void kvferry_end_team(Team* team) { delete team; }

void kvferry_layers(Team* team, const Decoder* decoder, const Step* step) {
  decoder->is_bfloat16 ? run_layers<Bf16>(*team, *decoder, *step) : run_layers<float>(*team, *decoder, *step);
}

// `rows` of x → `logits` [num_rows, stride], stride = padded(vocabulary).
void kvferry_head(Team* team, const Decoder* decoder, const float* x, const int64_t* rows, int64_t num_rows,
                  float* logits, int64_t stride) {
  decoder->is_bfloat16 ? run_head<Bf16>(*team, *decoder, x, rows, num_rows, logits, stride)
                       : run_head<float>(*team, *decoder, x, rows, num_rows, logits, stride);
}

// query, output: [tokens, num_heads, head_dim].
void kvferry_attention(Team* team, int is_bfloat16, const Cache* cache, const Sequences* of,
                       const AttentionSettings* settings, const void* query, void* output) {
  const std::vector<AttentionTask> tasks = attention_tasks(*of, cache->num_kv_heads);
  const int64_t stride = settings->num_heads * cache->head_dim;
  team->run([&] {
    if (is_bfloat16)
      attend(*team, tasks, *cache, *of, *settings, static_cast<const Bf16*>(query), stride,
             static_cast<Bf16*>(output), stride);
    else
      attend(*team, tasks, *cache, *of, *settings, static_cast<const float*>(query), stride,
             static_cast<float*>(output), stride);
  });
}

// input: [num_rows, stride] → output: [num_rows, padded(num_outputs)].
void kvferry_linear(Team* team, int is_bfloat16, const void* input, int64_t stride, int64_t num_rows,
                    const Linear* linear, float* output) {
  const int64_t width = padded(linear->num_outputs);
  team->run([&] {
    if (is_bfloat16)
      multiply<Bf16, After::STORE>(*team, static_cast<const Bf16*>(input), stride, num_rows, *linear,
                                   {output, nullptr, width});
    else
      multiply<float, After::STORE>(*team, static_cast<const float*>(input), stride, num_rows, *linear,
                                    {output, nullptr, width});
  });
}
}
