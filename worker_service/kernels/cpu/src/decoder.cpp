// All layers of a Llama-style decoder in one call: a step costs one crossing from Python.
#include "kernels.h"
#include "parallel.h"

namespace TWK_NAMESPACE {
namespace {

float* floats(TwkContext* context, twk::Use use, int64_t count) {
  return static_cast<float*>(twk::scratch(context, use, count * 4));
}

}  // namespace

void decode(TwkContext* context, const TwkModel& model, const TwkBatch& batch, float* hidden,
            const int32_t* logit_indices, int64_t logit_count, float* logits) {
  const int64_t tokens = batch.tokens, width = model.hidden, inner = model.intermediate;
  const int64_t q_width = int64_t{model.q_heads} * model.head_dim;
  const int64_t qkv_width = q_width + 2 * int64_t{model.kv_heads} * model.head_dim;
  float* normed = floats(context, twk::Use::kNormed, tokens * width);
  float* projected = floats(context, twk::Use::kProjected, tokens * width);
  float* qkv = floats(context, twk::Use::kQuery, tokens * qkv_width);
  float* attended = floats(context, twk::Use::kAttended, tokens * q_width);
  float* gate_up = floats(context, twk::Use::kGateUp, tokens * 2 * inner);
  float* active = floats(context, twk::Use::kActive, tokens * inner);
  const float* added = nullptr;
  for (int64_t index = 0; index < model.layer_count; ++index) {
    const TwkLayer& layer = model.layers[index];
    const TwkCache cache{layer.keys,       layer.values,   model.kv_kind,
                         model.block_size, model.kv_heads, model.head_dim};
    rms_norm(context, hidden, added, layer.input_norm, model.epsilon, tokens, width, normed);
    linear(context, layer.qkv, layer.qkv_bias, normed, width, tokens, qkv, qkv_width);
    rope_write(context,
               {qkv, qkv_width, model.q_heads, model.rotary_dim, model.cosines, model.sines,
                layer.q_norm, layer.k_norm, model.epsilon},
               cache, batch);
    attention(context,
              {qkv, qkv_width, attended, q_width, nullptr, model.q_heads, layer.window,
               model.scale},
              cache, batch);
    linear(context, layer.output, layer.output_bias, attended, q_width, tokens, projected, width);
    rms_norm(context, hidden, projected, layer.post_norm, model.epsilon, tokens, width, normed);
    linear(context, layer.gate_up, layer.gate_up_bias, normed, width, tokens, gate_up, 2 * inner);
    silu_multiply(context, gate_up, tokens, inner, active);
    linear(context, layer.down, layer.down_bias, active, inner, tokens, projected, width);
    added = projected;
  }
  rms_norm(context, hidden, added, model.final_norm, model.epsilon, tokens, width, normed);
  if (logits == nullptr || logit_count == 0) {
    memcpy(hidden, normed, static_cast<size_t>(tokens * width) * sizeof(float));
    return;
  }
  float* last = floats(context, twk::Use::kHidden, logit_count * width);
  for (int64_t row = 0; row < logit_count; ++row) {
    memcpy(last + row * width, normed + logit_indices[row] * width,
           static_cast<size_t>(width) * sizeof(float));
  }
  linear(context, model.head, nullptr, last, width, logit_count, logits, model.head.n);
}

}  // namespace TWK_NAMESPACE
