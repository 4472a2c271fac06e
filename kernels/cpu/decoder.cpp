// A decoder of Llama's family as one call: all layers over a step's rows, and the output layer over some of them.
//
//     x ─► norm ─► queries, keys, values ─► rotation, write ─► attention ─► + x ─► norm ─► gate · up ─► down ─► + x
//
// Gemma's layers have a norm before each + x, too, GELU at the gate, and two kinds of rotation.
//
// x stays in float between layers; what goes into products and into the cache is rounded to the model's type. The C
// interface takes pointers that the caller keeps alive; nothing here allocates what outlives a call but the team.
#include <memory>

#include "attention.h"
#include "check.h"
#include "linear.h"
#include "rows.h"

using namespace kvferry;

extern "C" {

struct Layer {
  Linear projection, output, gate_up, down;
  const float *attention_norm, *mlp_norm, *query_norm, *key_norm;
  const float *attention_post_norm, *mlp_post_norm;  // of what is added to x; or null
  int64_t window, rotation;
};

struct Decoder {
  int64_t is_bfloat16, is_quantised, is_gelu, num_layers, hidden_size, intermediate_size, num_heads;
  float epsilon, scaling, softcap;
  const Layer* layers;
  const float* final_norm;
  Linear head;
};

struct Step {
  int64_t num_tokens;
  const int64_t* slots;  // [num_tokens]
  const float *cosines, *sines;  // [rotations, num_tokens, head_dim]
  float* x;  // [num_tokens, padded(hidden_size)]
  Cache cache;
  Sequences sequences;
};
}

namespace {

// What a linear with weights of W reads where the cache holds T.
template <typename W, typename T>
using Read = std::conditional_t<std::is_same_v<W, Int8>, float, T>;

template <typename W, typename T>
struct Buffers {
  int64_t normed_width, projected_width, attention_width, activation_width;
  std::vector<T> queries, attended;
  std::vector<Read<W, T>> normed, activations;
  std::vector<float> projected, branch;
  Bytes bytes;

  void resize(const Decoder& decoder, const Cache& cache, int64_t num_tokens) {
    normed_width = padded(decoder.hidden_size);
    attention_width = padded(decoder.num_heads * cache.head_dim);
    projected_width = padded((decoder.num_heads + 2 * cache.num_kv_heads) * cache.head_dim);
    activation_width = padded(decoder.intermediate_size);
    const int64_t num_rows = whole_rows(num_tokens);
    normed.resize(num_rows * normed_width);
    queries.resize(num_tokens * attention_width);
    attended.resize(num_rows * attention_width);
    activations.resize(num_rows * activation_width);
    projected.resize(num_tokens * projected_width);
    branch.resize(num_tokens * normed_width);
    if (std::is_same_v<W, Int8>) bytes.resize(num_tokens, std::max({normed_width, attention_width, activation_width}));
  }
};

template <typename W, typename T>
Buffers<W, T>& buffers() {
  static thread_local Buffers<W, T> own;  // of the thread that calls, reused from step to step
  return own;
}

template <typename W, typename T>
void run_layers(Team& team, const Decoder& decoder, const Step& step) {
  Buffers<W, T>& mine = buffers<W, T>();
  mine.resize(decoder, step.cache, step.num_tokens);
  const std::vector<AttentionTask> tasks = attention_tasks(step.sequences, step.cache.num_kv_heads, team.size());
  const int64_t width = padded(decoder.hidden_size), count = step.num_tokens;
  team.run([&] {
    for (int64_t number = 0; number < decoder.num_layers; ++number) {
      const Layer& layer = decoder.layers[number];
      const int64_t turned = layer.rotation * count * step.cache.head_dim;
      const Rotation rotation = {step.cosines + turned, step.sines + turned, layer.query_norm, layer.key_norm, decoder.epsilon};
      const AttentionSettings settings = {decoder.num_heads, number, layer.window, decoder.scaling, decoder.softcap};
      using Taken = Read<W, T>;
      const auto add_to_x = [&](const auto* rows, int64_t stride, const Linear& linear, const float* post_norm) {
        const Rows taken = as_rows<W>(team, rows, stride, count, linear, mine.bytes);
        if (post_norm == nullptr)
          return multiply<W, Taken, After::ADD>(team, taken, count, linear, {step.x, nullptr, width});
        multiply<W, Taken, After::STORE>(team, taken, count, linear, {mine.branch.data(), nullptr, width});
        add_normalised_rows(team, mine.branch.data(), width, count, post_norm, decoder.hidden_size, decoder.epsilon,
                            step.x);
      };
      normalise_rows(team, step.x, width, count, layer.attention_norm, decoder.hidden_size, decoder.epsilon,
                     mine.normed.data(), mine.normed_width);
      multiply<W, Taken, After::STORE>(
          team, as_rows<W>(team, mine.normed.data(), mine.normed_width, count, layer.projection, mine.bytes), count,
          layer.projection, {mine.projected.data(), nullptr, mine.projected_width});
      rotate_and_write(team, mine.projected.data(), mine.projected_width, count, decoder.num_heads, rotation,
                       step.cache, number, step.slots, mine.queries.data(), mine.attention_width);
      attend(team, tasks, step.cache, step.sequences, settings, mine.queries.data(), mine.attention_width,
             mine.attended.data(), mine.attention_width);
      add_to_x(mine.attended.data(), mine.attention_width, layer.output, layer.attention_post_norm);
      normalise_rows(team, step.x, width, count, layer.mlp_norm, decoder.hidden_size, decoder.epsilon,
                     mine.normed.data(), mine.normed_width);
      multiply<W, Taken, After::ACTIVATE_MUL>(
          team, as_rows<W>(team, mine.normed.data(), mine.normed_width, count, layer.gate_up, mine.bytes), count,
          layer.gate_up, {nullptr, mine.activations.data(), mine.activation_width, decoder.is_gelu != 0});
      add_to_x(mine.activations.data(), mine.activation_width, layer.down, layer.mlp_post_norm);
    }
  });
}

template <typename W, typename T>
void run_head(Team& team, const Decoder& decoder, const float* x, const int64_t* rows, int64_t num_rows,
              float* logits, int64_t stride) {
  using Taken = Read<W, T>;
  const int64_t width = padded(decoder.hidden_size);
  std::vector<Taken> normed(whole_rows(num_rows) * width);
  Bytes bytes;
  bytes.resize(num_rows, width);
  team.run([&] {
    team.share(num_rows, [&](int64_t row) {
      normalise(x + rows[row] * width, decoder.final_norm, decoder.hidden_size, decoder.epsilon, &normed[row * width]);
    });
    multiply<W, Taken, After::STORE>(team, as_rows<W>(team, normed.data(), width, num_rows, decoder.head, bytes),
                                     num_rows, decoder.head, {logits, nullptr, stride});
  });
}

// Calls work<W, T>() for the decoder's types.
template <typename Work>
void with_types(const Decoder& decoder, const Work& work) {
  if (decoder.is_quantised)
    decoder.is_bfloat16 ? work.template operator()<Int8, Bf16>() : work.template operator()<Int8, float>();
  else
    decoder.is_bfloat16 ? work.template operator()<Bf16, Bf16>() : work.template operator()<float, float>();
}

}  // namespace

extern "C" {

// Whether this process may run what this library was built of; to be asked before a team is made.
int kvferry_permitted() { return amx::permitted(); }

// Whether this library computes rightly; of a permitted process.
int kvferry_check() {
  Team team(2);
  return multiplies_well(team, 1, 64, 32) && multiplies_well(team, 19, 98, 70) && multiplies_well(team, 70, 576, 40);
}

Team* kvferry_team(int num_threads) { return new Team(num_threads); }

void kvferry_end_team(Team* team) { delete team; }

void kvferry_layers(Team* team, const Decoder* decoder, const Step* step) {
  with_types(*decoder, [&]<typename W, typename T>() { run_layers<W, T>(*team, *decoder, *step); });
}

// `rows` of x → `logits` [num_rows, stride], stride = padded(vocabulary).
void kvferry_head(Team* team, const Decoder* decoder, const float* x, const int64_t* rows, int64_t num_rows,
                  float* logits, int64_t stride) {
  with_types(*decoder, [&]<typename W, typename T>() {
    run_head<W, T>(*team, *decoder, x, rows, num_rows, logits, stride);
  });
}

// query, output: [tokens, num_heads, head_dim].
void kvferry_attention(Team* team, int is_bfloat16, const Cache* cache, const Sequences* of,
                       const AttentionSettings* settings, const void* query, void* output) {
  const std::vector<AttentionTask> tasks = attention_tasks(*of, cache->num_kv_heads, team->size());
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

// input: [num_rows, stride] of float, or of bfloat16 for weights of it → output: [num_rows, padded(num_outputs)].
void kvferry_linear(Team* team, int is_bfloat16, int is_quantised, const void* input, int64_t stride, int64_t num_rows,
                    const Linear* linear, float* output) {
  Bytes bytes;
  bytes.resize(num_rows, linear->num_inputs);
  const auto run = [&]<typename W, typename T>(const T* rows) {
    std::vector<T> whole;
    if (IS_ON_AMX<W> && num_rows < whole_rows(num_rows)) {
      whole.assign(rows, rows + num_rows * stride);
      whole.resize(whole_rows(num_rows) * stride);
      rows = whole.data();
    }
    team->run([&] {
      multiply<W, T, After::STORE>(*team, as_rows<W>(*team, rows, stride, num_rows, *linear, bytes), num_rows, *linear,
                                   {output, nullptr, padded(linear->num_outputs)});
    });
  };
  if (is_quantised) run.template operator()<Int8>(static_cast<const float*>(input));
  else if (is_bfloat16) run.template operator()<Bf16>(static_cast<const Bf16*>(input));
  else run.template operator()<float>(static_cast<const float*>(input));
}
}
