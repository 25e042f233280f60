// Writes and attends with a layer in one call, with arguments that were bound beforehand.
//
// BoundLayer has the arguments that stay the same from step to step: pages, scales, options, and
// the types and strides of the caller's tensors. BoundBatch has those that all layers of a step
// share. Both hold addresses only: the caller owns the memory.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>

#include "kvplane/params.h"
#include "tensor_view.h"

namespace kvplane {

struct BoundBatch {
  const int64_t* slots;
  const void* block_tables;
  const int64_t* query_starts;
  const int64_t* context_lens;
  int64_t num_tokens;
  int64_t num_sequences;
  int64_t max_blocks;
  int64_t max_window_tokens;  // the widest window that reads no trimmed entry; -1: none is trimmed
  bool wide_block_tables;
};

class BoundLayer {
 public:
  BoundLayer(const TensorView& query, const TensorView& key, const TensorView* value,
             const PagesView& pages, const ScalesView& scales, const AttentionOptions& options) {
    write_.pages = attend_.pages = pages_of(pages, scales);
    write_.key_dtype = key.dtype;
    write_.key_token_stride = key.strides[0];
    write_.key_head_stride = key.strides[1];
    set_value(value, &write_);
    static_cast<AttentionOptions&>(attend_) = options;
    attend_.share_reads = true;
    attend_.query_dtype = query.dtype;
    attend_.num_heads = query.shape[1];
    attend_.query_token_stride = query.strides[0];
    attend_.query_head_stride = query.strides[1];
  }

  // Whether the layer's window reaches no trimmed entry of the batch's tables.
  bool fits(const BoundBatch& batch) const {
    const int64_t window = attend_.sliding_window_tokens;
    return batch.max_window_tokens < 0 || (window > 0 && window <= batch.max_window_tokens);
  }

  // Returns the seconds that the write took.
  double write_and_attend(const BoundBatch& batch, uintptr_t query, uintptr_t key, uintptr_t value,
                          uintptr_t out, int num_threads) const {
    const auto began = std::chrono::steady_clock::now();
    ReshapeAndCacheParams write = write_;
    write.key = pointer<const void>(key);
    write.value = pointer<const void>(value);
    write.slots = batch.slots;
    write.num_tokens = batch.num_tokens;
    write.num_threads = num_threads;
    reshape_and_cache(write);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;

    PagedAttentionParams attend = attend_;
    attend.query = pointer<const void>(query);
    attend.out = pointer<void>(out);
    attend.block_tables = batch.block_tables;
    attend.query_starts = batch.query_starts;
    attend.context_lens = batch.context_lens;
    attend.wide_block_tables = batch.wide_block_tables;
    attend.num_tokens = batch.num_tokens;
    attend.num_sequences = batch.num_sequences;
    attend.max_blocks = batch.max_blocks;
    attend.num_threads = num_threads;
    paged_attention(attend);
    return seconds.count();
  }

 private:
  ReshapeAndCacheParams write_ = {};
  PagedAttentionParams attend_ = {};
};

inline void bind_bound_layers(pybind11::module_& m) {
  namespace py = pybind11;
  using py::arg;
  py::class_<BoundBatch>(m, "BoundBatch", py::module_local())
      .def(py::init([](uintptr_t slots, uintptr_t block_tables, bool wide_block_tables,
                       int64_t max_blocks, uintptr_t query_starts, uintptr_t context_lens,
                       int64_t num_sequences, int64_t num_tokens, int64_t max_window_tokens) {
             return BoundBatch{pointer<const int64_t>(slots),
                               pointer<const void>(block_tables),
                               pointer<const int64_t>(query_starts),
                               pointer<const int64_t>(context_lens),
                               num_tokens,
                               num_sequences,
                               max_blocks,
                               max_window_tokens,
                               wide_block_tables};
           }),
           py::kw_only(), arg("slots"), arg("block_tables"), arg("wide_block_tables"),
           arg("max_blocks"), arg("query_starts"), arg("context_lens"), arg("num_sequences"),
           arg("num_tokens"), arg("max_window_tokens"));
  py::class_<BoundLayer>(m, "BoundLayer", py::module_local())
      .def(py::init<const TensorView&, const TensorView&, const TensorView*, const PagesView&,
                    const ScalesView&, const AttentionOptions&>(),
           py::kw_only(), arg("query"), arg("key"), arg("value"), arg("pages"), arg("scales"),
           arg("options"))
      .def("write_and_attend", &BoundLayer::write_and_attend,
           py::call_guard<py::gil_scoped_release>(), arg("batch"), arg("query"), arg("key"),
           arg("value"), arg("out"), arg("num_threads"));
}

}  // namespace kvplane
