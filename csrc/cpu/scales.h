// The scales of 8-bit pages.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>

#include "kvplane/params.h"

namespace kvplane {

inline float key_scale(const PagesParams& pages, int64_t kv_head) {
  return pages.key_scales == nullptr ? 1.0f : pages.key_scales[kv_head * pages.key_scale_stride];
}

inline float value_scale(const PagesParams& pages, int64_t kv_head) {
  if (pages.value_scales == nullptr) return 1.0f;
  return pages.value_scales[kv_head * pages.value_scale_stride];
}

// Throws std::out_of_range with "<name> must ..." for a scale that is not finite and above 0.
inline void check_scales(const PagesParams& pages) {
  for (int64_t h = 0; h < pages.num_kv_heads; ++h) {
    const float key = key_scale(pages, h), value = value_scale(pages, h);
    if (!(key > 0.0f && std::isfinite(key))) {
      throw std::out_of_range("key_scales must be finite and above 0");
    }
    if (!(value > 0.0f && std::isfinite(value))) {
      throw std::out_of_range("value_scales must be finite and above 0");
    }
  }
}

}  // namespace kvplane
