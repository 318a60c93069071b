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
  // Projection `which` of layer `index`, 0 qkv … 3 down, with what the adapters add to it.
  const auto project = [&](int64_t index, int which, const TwkLinearCall& own) {
    const TwkAdapters* const adapters = call.adapters;
    if (adapters == nullptr) return linear(context, own);
    const int64_t first = adapters->first_targets[which];
    const TwkAdapterPart* parts = adapters->parts + index * adapters->first_targets[4] + first;
    adapt(context, {&own, &adapters->batch, adapters->targets + first,
                    adapters->first_targets[which + 1] - first, parts, adapters->part_stride,
                    own.x, own.x_stride, own.packed->k, own.y, own.y_stride});
  };
  const float* added = nullptr;
  for (int64_t index = 0; index < model.layer_count; ++index) {
    const TwkLayer& layer = model.layers[index];
    const TwkCache cache{layer.keys,       layer.values,   model.kv_kind,
                         model.block_size, model.kv_heads, model.head_dim};
    norm(added, layer.input_norm);
    project(index, 0, {&layer.qkv, layer.qkv_bias, normed, width, tokens, qkv, qkv_width});
    rope_write(context,
               {qkv, qkv_width, model.q_heads, model.rotary_dim, model.cosines, model.sines,
                layer.q_norm, layer.k_norm, model.epsilon, &cache, call.batch});
    attention(context, {qkv, qkv_width, attended, q_width, model.q_heads, layer.window,
                        model.scale, &cache, call.batch});
    project(index, 1,
            {&layer.output, layer.output_bias, attended, q_width, tokens, projected, width});
    norm(projected, layer.post_norm);
    project(index, 2,
            {&layer.gate_up, layer.gate_up_bias, normed, width, tokens, gate_up, 2 * inner});
    silu_multiply(context, {gate_up, tokens, inner, active});
    project(index, 3, {&layer.down, layer.down_bias, active, inner, tokens, projected, width});
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
