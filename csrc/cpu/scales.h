// The scales of 8-bit pages.
#pragma once

#include "kvplane/params.h"

namespace kvplane {

inline float key_scale(const PagesParams& pages, int64_t kv_head) {
  return pages.key_scales == nullptr ? 1.0f : pages.key_scales[kv_head * pages.key_scale_stride];
}

inline float value_scale(const PagesParams& pages, int64_t kv_head) {
  if (pages.value_scales == nullptr) return 1.0f;
  return pages.value_scales[kv_head * pages.value_scale_stride];
}

}  // namespace kvplane
