// A tensor as Python describes it to a native module: an address, a type, a shape and strides.
#pragma once

#include <cstdint>
#include <vector>

#include "kvplane/params.h"

namespace kvplane {

// Strides count elements.
struct TensorView {
  uintptr_t address;
  Dtype dtype;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;

  void* data() const { return reinterpret_cast<void*>(address); }
};

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The scales of 8-bit pages: addresses of fp32, or 0 for none. A stride of 0 means one scale for
// all heads.
struct ScalesView {
  uintptr_t key;
  uintptr_t value;
  int64_t key_stride;
  int64_t value_stride;
};

inline PagesParams pages_of(const TensorView& t, const ScalesView& scales) {
  return {t.data(),
          t.dtype,
          t.shape[0],
          t.shape[2],
          t.shape[3],
          t.shape[4],
          t.strides[0],
          t.strides[1],
          t.strides[2],
          t.strides[3],
          pointer<const float>(scales.key),
          pointer<const float>(scales.value),
          scales.key_stride,
          scales.value_stride};
}

}  // namespace kvplane
