// All layers of a decoder in one call: a step costs one crossing from Python.
#include "kernels.h"
#include "parallel.h"

namespace TWK_NAMESPACE {
namespace {

float* floats(TwkContext* context, twk::Use use, int64_t count) {
  return static_cast<float*>(twk::scratch(context, use, count * 4));
}

}  // namespace

void decode(TwkContext* context, const TwkDecodeCall& call) {
  const TwkModel& model = *call.model;
  const int64_t tokens = call.batch->tokens, width = model.hidden, inner = model.intermediate;
  const int64_t q_width = int64_t{model.q_heads} * model.head_dim;
  const int64_t qkv_width = q_width + 2 * int64_t{model.kv_heads} * model.head_dim;
  float* const hidden = call.hidden;
  float* normed = floats(context, twk::Use::kNormed, tokens * width);
  float* projected = floats(context, twk::Use::kProjected, tokens * width);
  float* qkv = floats(context, twk::Use::kQuery, tokens * qkv_width);
  float* attended = floats(context, twk::Use::kAttended, tokens * q_width);
  float* gate_up = floats(context, twk::Use::kGateUp, tokens * 2 * inner);
  float* active = floats(context, twk::Use::kActive, tokens * inner);
  const auto norm = [&](const float* added, const float* weight) {
    rms_norm(context, {hidden, added, weight, model.epsilon, tokens, width, normed});
  };
  // What the adapters add to projection `which` of layer `index`: 0 qkv … 3 down.
  const TwkAdapters* const adapters = call.adapters;
  const auto adapt_tokens = [&](int64_t index, int which, const float* x, int64_t k, float* y,
                                int64_t y_width) {
    if (adapters == nullptr) return;
    const int64_t first = adapters->first_targets[which];
    const TwkAdapterPart* parts = adapters->parts + index * adapters->first_targets[4] + first;
    adapt(context, {&adapters->batch, adapters->targets + first,
                    adapters->first_targets[which + 1] - first, parts, adapters->part_stride, x, k,
                    k, y, y_width});
  };
  const float* added = nullptr;
  for (int64_t index = 0; index < model.layer_count; ++index) {
    const TwkLayer& layer = model.layers[index];
    const TwkCache cache{layer.keys,       layer.values,   model.kv_kind,
                         model.block_size, model.kv_heads, model.head_dim};
    norm(added, layer.input_norm);
    linear(context, {&layer.qkv, layer.qkv_bias, normed, width, tokens, qkv, qkv_width});
    adapt_tokens(index, 0, normed, width, qkv, qkv_width);
    rope_write(context,
               {qkv, qkv_width, model.q_heads, model.rotary_dim, model.cosines, model.sines,
                layer.q_norm, layer.k_norm, model.epsilon, &cache, call.batch});
    attention(context, {qkv, qkv_width, attended, q_width, model.q_heads, layer.window,
                        model.scale, &cache, call.batch});
    linear(context,
           {&layer.output, layer.output_bias, attended, q_width, tokens, projected, width});
    adapt_tokens(index, 1, attended, q_width, projected, width);
    norm(projected, layer.post_norm);
    linear(context,
           {&layer.gate_up, layer.gate_up_bias, normed, width, tokens, gate_up, 2 * inner});
    adapt_tokens(index, 2, normed, width, gate_up, 2 * inner);
    silu_multiply(context, {gate_up, tokens, inner, active});
    linear(context, {&layer.down, layer.down_bias, active, inner, tokens, projected, width});
    adapt_tokens(index, 3, active, inner, projected, width);
    added = projected;
  }
  if (call.logit_count == 0) return;
  norm(added, model.final_norm);
  float* last = floats(context, twk::Use::kHidden, call.logit_count * width);
  for (int64_t row = 0; row < call.logit_count; ++row) {
    memcpy(last + row * width, normed + call.logit_indices[row] * width,
           static_cast<size_t>(width) * sizeof(float));
  }
  linear(context, {&model.head, nullptr, last, width, call.logit_count, call.logits,
                   model.head.n});
}

}  // namespace TWK_NAMESPACE
