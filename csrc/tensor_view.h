// A tensor as Python describes it to a native module: an address, a type, a shape and strides.
#pragma once

#include <pybind11/pybind11.h>

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

// Keys and values [num_blocks, num_kv_heads, block_size, elements of each] of one pool.
struct PagesView {
  TensorView keys;
  TensorView values;
};

inline PagesParams pages_of(const PagesView& pages, const ScalesView& scales) {
  const TensorView &keys = pages.keys, &values = pages.values;
  const int64_t between = static_cast<int64_t>(values.address - keys.address);
  return {keys.data(),
          keys.dtype,
          keys.shape[0],
          keys.shape[1],
          keys.shape[2],
          keys.shape[3],
          values.shape[3],
          keys.strides[0],
          between / dtype_bytes(keys.dtype),
          keys.strides[1],
          keys.strides[2],
          values.strides[1],
          values.strides[2],
          pointer<const float>(scales.key),
          pointer<const float>(scales.value),
          scales.key_stride,
          scales.value_stride};
}

// `value`: null where values are the first elements of their keys.
inline void set_value(const TensorView* value, ReshapeAndCacheParams* p) {
  if (value == nullptr) return;
  p->value = value->data();
  p->value_dtype = value->dtype;
  p->value_token_stride = value->strides[0];
  p->value_head_stride = value->strides[1];
}

// The types that both modules have; local to the module, so that their names do not meet.
inline void bind_types(pybind11::module_& m) {
  namespace py = pybind11;
  using py::arg;
  py::enum_<Dtype>(m, "Dtype", py::module_local())
      .value("FLOAT32", Dtype::kFloat32)
      .value("FLOAT16", Dtype::kFloat16)
      .value("BFLOAT16", Dtype::kBFloat16)
      .value("FLOAT8_E4M3", Dtype::kFloat8E4M3)
      .value("FLOAT8_E5M2", Dtype::kFloat8E5M2);
  py::class_<TensorView>(m, "TensorView", py::module_local())
      .def(py::init<uintptr_t, Dtype, std::vector<int64_t>, std::vector<int64_t>>(), arg("address"),
           arg("dtype"), arg("shape"), arg("strides"));
  py::class_<PagesView>(m, "PagesView", py::module_local())
      .def(py::init<TensorView, TensorView>(), arg("keys"), arg("values"));
  py::class_<ScalesView>(m, "ScalesView", py::module_local())
      .def(py::init<uintptr_t, uintptr_t, int64_t, int64_t>(), arg("key"), arg("value"),
           arg("key_stride"), arg("value_stride"));
  py::class_<AttentionOptions>(m, "AttentionOptions", py::module_local())
      .def(py::init([](float scale, int64_t sliding_window_tokens, uintptr_t alibi_slopes,
                       float logit_soft_cap, uintptr_t sinks, uintptr_t seen_blocks,
                       int64_t seen_stride, int64_t num_seen_blocks, int64_t block_tokens,
                       int64_t local_blocks) {
             const BlockMask blocks = {pointer<const uint8_t>(seen_blocks), seen_stride,
                                       num_seen_blocks, block_tokens, local_blocks};
             return AttentionOptions{
                 scale,          sliding_window_tokens,       pointer<const float>(alibi_slopes),
                 logit_soft_cap, pointer<const float>(sinks), blocks};
           }),
           py::kw_only(), arg("scale"), arg("sliding_window_tokens"), arg("alibi_slopes"),
           arg("logit_soft_cap"), arg("sinks"), arg("seen_blocks") = 0, arg("seen_stride") = 0,
           arg("num_seen_blocks") = 1, arg("block_tokens") = 1, arg("local_blocks") = 1);
}

}  // namespace kvplane
