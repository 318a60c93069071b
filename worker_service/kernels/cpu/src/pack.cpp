// Packing weights into panels, and reading single rows of them back (an embedding).
#include "kernels.h"
#include "panels.h"

namespace TWK_NAMESPACE {
namespace {

void pack_panel(const Panels& panels, int64_t index, const float* weight, int64_t stride) {
  float* out = reinterpret_cast<float*>(const_cast<char*>(panels.panel(index)));
  const int64_t lanes = panels.lanes(index);
  for (int64_t lane = 0; lane < kPanelWidth; ++lane) {
    const float* row = weight + (index * kPanelWidth + lane) * stride;
    for (int64_t column = 0; column < panels.k; ++column) {
      out[column * kPanelWidth + lane] = lane < lanes ? row[column] : 0.0f;
    }
  }
}

// Symmetric: the largest magnitude of a group becomes 127. Ties round to even.
void quantize_group(const float* row, int64_t length, int64_t lane, int8_t* out, float* scale) {
  float magnitude = 0.0f, poisoned = 0.0f;
  for (int64_t column = 0; column < length; ++column) {
    const float value = __builtin_fabsf(row[column]);
    magnitude = value > magnitude ? value : magnitude;
    poisoned += row[column] * 0.0f;
  }
  // An infinity or NaN makes the group's scale NaN: a broken weight must not pass for a zero.
  *scale = magnitude / 127.0f + poisoned;
  const float inverse = magnitude > 0.0f ? 127.0f / magnitude : 0.0f;
  for (int64_t column = 0; column < length; ++column) {
    const float value = __builtin_rintf(row[column] * inverse);
    out[Panels::value_at(column, lane)] =
        static_cast<int8_t>(value >= 127.0f ? 127.0f : value >= -127.0f ? value : -127.0f);
  }
}

void pack_quantized(const Panels& panels, int64_t index, const float* weight, int64_t stride) {
  const int64_t lanes = panels.lanes(index);
  for (int64_t which = 0; which < panels.groups; ++which) {
    float* scales = reinterpret_cast<float*>(const_cast<char*>(panels.scales(index, which)));
    int8_t* values = reinterpret_cast<int8_t*>(scales + kPanelWidth);
    const int64_t length = panels.group_length(which);
    memset(scales, 0, kPanelWidth * sizeof(float));
    memset(values, 0, static_cast<size_t>(Panels::kept(length) * kPanelWidth));
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const float* row = weight + (index * kPanelWidth + lane) * stride + which * panels.group;
      quantize_group(row, length, lane, values, scales + lane);
    }
  }
}

void gather_row(const Panels& panels, int64_t id, float* out) {
  const int64_t index = id / kPanelWidth, lane = id % kPanelWidth;
  if (!panels.quantized) {
    const float* values = reinterpret_cast<const float*>(panels.panel(index)) + lane;
    for (int64_t column = 0; column < panels.k; ++column) {
      out[column] = values[column * kPanelWidth];
    }
    return;
  }
  for (int64_t which = 0; which < panels.groups; ++which) {
    const float* scales = reinterpret_cast<const float*>(panels.scales(index, which));
    const int8_t* values = reinterpret_cast<const int8_t*>(scales + kPanelWidth);
    for (int64_t column = 0; column < panels.group_length(which); ++column) {
      *out++ = static_cast<float>(values[Panels::value_at(column, lane)]) * scales[lane];
    }
  }
}

}  // namespace

int64_t packed_bytes(const TwkPacked& packed) {
  const Panels panels(packed);
  return panels.count * panels.bytes;
}

void pack(TwkContext* context, const TwkPackCall& call) {
  const Panels panels(*call.packed);
  parallel(context, panels.count, [&](int64_t index, int) {
    if (panels.quantized) {
      pack_quantized(panels, index, call.weight, call.weight_stride);
    } else {
      pack_panel(panels, index, call.weight, call.weight_stride);
    }
  });
}

void gather(TwkContext* context, const TwkGatherCall& call) {
  const Panels panels(*call.packed);
  parallel_rows(context, call.count, panels.k, [&](int64_t row) {
    gather_row(panels, call.ids[row], call.out + row * panels.k);
  });
}

}  // namespace TWK_NAMESPACE
