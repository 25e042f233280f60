// The CUDA operations as Python functions: the module `_cuda`, or the emulator's. As in
// bindings.cpp, data_plane/kernels/arguments.py has checked shapes and types.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>

#include "cuda/operations.h"
#include "cuda/probe/probe.h"
#include "local/device_memory.h"
#include "tensor_view.h"

#if defined(KVPLANE_EMULATED)
#include "cuda/device/batch_copies.h"
#include "cuda/device/launch.h"
#include "emulator.h"
#include "gpu_memory.h"
#define KVPLANE_MODULE kvplane_emulated
#else
#define KVPLANE_MODULE _cuda
#endif

namespace py = pybind11;

namespace kvplane::cuda {
namespace {

Context context_of(uintptr_t stream, uintptr_t faults) {
  return {stream, pointer<int32_t>(faults)};
}

void bind_reshape_and_cache(const TensorView& key, const TensorView& value, const PagesView& pages,
                            const ScalesView& scales, uintptr_t slots, uintptr_t faults,
                            uintptr_t stream) {
  ReshapeAndCacheParams p = {};
  p.key = key.data();
  p.value = value.data();
  p.slots = pointer<const int64_t>(slots);
  p.pages = pages_of(pages, scales);
  p.key_dtype = key.dtype;
  p.value_dtype = value.dtype;
  p.num_tokens = key.shape[0];
  p.key_token_stride = key.strides[0];
  p.key_head_stride = key.strides[1];
  p.value_token_stride = value.strides[0];
  p.value_head_stride = value.strides[1];
  reshape_and_cache(p, context_of(stream, faults));
}

PagedAttentionParams sizes_of(const TensorView& query, const PagesView& pages,
                              const ScalesView& scales, int64_t max_blocks, int64_t num_sequences,
                              const kvplane::AttentionOptions& options) {
  PagedAttentionParams p = {};
  static_cast<kvplane::AttentionOptions&>(p) = options;
  p.query = query.data();
  p.pages = pages_of(pages, scales);
  p.query_dtype = query.dtype;
  p.num_tokens = query.shape[0];
  p.num_heads = query.shape[1];
  p.num_sequences = num_sequences;
  p.max_blocks = max_blocks;
  p.query_token_stride = query.strides[0];
  p.query_head_stride = query.strides[1];
  return p;
}

// Writes the partial results that each sequence of a batch needs, from lengths on the host.
void bind_count_partials(const TensorView& query, const PagesView& pages,
                         const kvplane::AttentionOptions& options, int64_t split_tokens,
                         uintptr_t query_starts, uintptr_t context_lens, int64_t num_sequences,
                         uintptr_t counts) {
  count_partials(sizes_of(query, pages, {}, 0, num_sequences, options), split_tokens,
                 pointer<const int64_t>(query_starts), pointer<const int64_t>(context_lens),
                 pointer<int64_t>(counts));
}

int64_t bind_max_partials(const TensorView& query, const PagesView& pages, int64_t max_blocks,
                          int64_t num_sequences, const kvplane::AttentionOptions& options,
                          int64_t split_tokens, int64_t max_query_len) {
  return max_partials(sizes_of(query, pages, {}, max_blocks, num_sequences, options), split_tokens,
                      max_query_len);
}

int64_t bind_workspace_bytes(const TensorView& query, const PagesView& pages, int64_t num_sequences,
                             int64_t num_partials) {
  return attention_workspace_bytes(sizes_of(query, pages, {}, 0, num_sequences, {}), num_partials);
}

// A batch's lengths and tables, on the device.
struct BatchView {
  uintptr_t block_tables;
  bool wide_block_tables;
  int64_t max_blocks;
  uintptr_t query_starts;
  uintptr_t context_lens;
  int64_t num_sequences;
  bool share_reads;
  bool is_padded;
};

PagedAttentionParams params_of(const TensorView& query, const PagesView& pages,
                               const ScalesView& scales, const BatchView& batch,
                               const kvplane::AttentionOptions& options) {
  PagedAttentionParams p =
      sizes_of(query, pages, scales, batch.max_blocks, batch.num_sequences, options);
  p.block_tables = pointer<const void>(batch.block_tables);
  p.query_starts = pointer<const int64_t>(batch.query_starts);
  p.context_lens = pointer<const int64_t>(batch.context_lens);
  p.wide_block_tables = batch.wide_block_tables;
  p.share_reads = batch.share_reads;
  p.is_padded = batch.is_padded;
  return p;
}

AttentionPlan bind_plan_attention(const TensorView& query, const PagesView& pages,
                                  uintptr_t block_tables, bool wide_block_tables,
                                  int64_t max_blocks, uintptr_t query_starts,
                                  uintptr_t context_lens, int64_t num_sequences, bool share_reads,
                                  bool is_padded, const kvplane::AttentionOptions& options,
                                  int64_t max_query_len, int64_t max_short_query_len,
                                  int64_t split_tokens, int64_t num_partials, uintptr_t memory,
                                  uintptr_t faults, uintptr_t stream) {
  const BatchView batch = {block_tables, wide_block_tables, max_blocks,  query_starts,
                           context_lens, num_sequences,     share_reads, is_padded};
  return plan_attention(params_of(query, pages, {}, batch, options),
                        {max_query_len, max_short_query_len, split_tokens, nullptr, 0},
                        num_partials, pointer<void>(memory), context_of(stream, faults));
}

void bind_paged_attention(const TensorView& query, uintptr_t out, uintptr_t lse,
                          const PagesView& pages, const ScalesView& scales, uintptr_t block_tables,
                          bool wide_block_tables, int64_t max_blocks, uintptr_t query_starts,
                          uintptr_t context_lens, int64_t num_sequences, bool share_reads,
                          bool is_padded, const kvplane::AttentionOptions& options,
                          int64_t max_query_len, int64_t max_short_query_len, int64_t split_tokens,
                          uintptr_t workspace, int64_t workspace_bytes, const AttentionPlan* plan,
                          uintptr_t faults, uintptr_t stream) {
  const BatchView batch = {block_tables, wide_block_tables, max_blocks,  query_starts,
                           context_lens, num_sequences,     share_reads, is_padded};
  PagedAttentionParams p = params_of(query, pages, scales, batch, options);
  p.out = pointer<void>(out);
  p.lse = pointer<float>(lse);
  paged_attention(p,
                  {max_query_len, max_short_query_len, split_tokens, pointer<void>(workspace),
                   workspace_bytes, plan},
                  context_of(stream, faults));
}

template <void (*kCopy)(const CopyBlocksParams&, const Context&)>
void bind_copy(uintptr_t source, uintptr_t destination, uintptr_t pairs, int64_t num_pairs,
               int64_t source_num_blocks, int64_t destination_num_blocks,
               int64_t source_block_bytes, int64_t destination_block_bytes, int64_t copy_bytes,
               uintptr_t stream) {
  kCopy({pointer<const char>(source), pointer<char>(destination), pointer<const int64_t>(pairs),
         num_pairs, source_num_blocks, destination_num_blocks, source_block_bytes,
         destination_block_bytes, copy_bytes},
        context_of(stream, 0));
}

template <void (*kPack)(const PackBlocksParams&, const Context&)>
void bind_pack(uintptr_t pool, uintptr_t blocks, uintptr_t block_ids, int64_t num_block_ids,
               int64_t num_blocks, int64_t num_layers, int64_t block_bytes, int64_t page_bytes,
               uintptr_t stream) {
  kPack({pointer<char>(pool), pointer<char>(blocks), pointer<const int64_t>(block_ids),
         num_block_ids, num_blocks, num_layers, block_bytes, page_bytes},
        context_of(stream, 0));
}

void bind_probe(const std::string& name, uintptr_t inputs, uintptr_t outputs, int64_t count,
                uintptr_t stream) {
  probe(name.c_str(), pointer<const void>(inputs), pointer<void>(outputs), count, stream);
}

}  // namespace

PYBIND11_MODULE(KVPLANE_MODULE, m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  using py::arg;

  bind_types(m);
  m.attr("BAD_BLOCK_TABLES") = kBadBlockTables;
  m.attr("BAD_QUERY_STARTS") = kBadQueryStarts;
  m.attr("BAD_CONTEXT_LENS") = kBadContextLens;
  m.attr("BAD_SLOTS") = kBadSlots;
  m.attr("BAD_KEY_SCALES") = kBadKeyScales;
  m.attr("BAD_VALUE_SCALES") = kBadValueScales;
  m.attr("BAD_WORKSPACE") = kBadWorkspace;

  m.def("device_count", &device_count);
  bind_device_memory(m);
#if defined(KVPLANE_EMULATED)
  m.def("set_seed", &emulator::set_seed, arg("seed"));
  m.def("num_launches", [] { return num_launches; });
  m.def("num_copied_bytes", [] { return emulator::num_copied_bytes; });
  m.def("num_batch_copies", [] { return num_batch_copies; });
  m.def(
      "set_host_memory_is_mapped", [](bool mapped) { host_memory_is_mapped = mapped; },
      arg("mapped"));
  m.def(
      "set_shared_bytes_of_block", [](int64_t bytes) { shared_bytes_of_block = bytes; },
      arg("bytes"));
  m.def("num_early_frees", [] { return emulator::num_early_frees.load(); });
  m.def("set_gpu_bytes", [](int64_t bytes) { emulator::gpu_bytes = bytes; }, arg("bytes"));
  m.def("set_driver_version", [](int version) { driver_version = version; }, arg("version"));
#endif
  m.def("reshape_and_cache", &bind_reshape_and_cache, release_gil(), py::kw_only(), arg("key"),
        arg("value"), arg("pages"), arg("scales"), arg("slots"), arg("faults"), arg("stream"));
  m.def("count_partials", &bind_count_partials, py::kw_only(), arg("query"), arg("pages"),
        arg("options"), arg("split_tokens"), arg("query_starts"), arg("context_lens"),
        arg("num_sequences"), arg("counts"));
  m.def("max_partials", &bind_max_partials, py::kw_only(), arg("query"), arg("pages"),
        arg("max_blocks"), arg("num_sequences"), arg("options"), arg("split_tokens"),
        arg("max_query_len"));
  m.def("attention_workspace_bytes", &bind_workspace_bytes, py::kw_only(), arg("query"),
        arg("pages"), arg("num_sequences"), arg("num_partials"));
  py::class_<AttentionPlan>(m, "AttentionPlan", py::module_local());
  m.def("attention_plan_bytes", &attention_plan_bytes, py::kw_only(), arg("num_sequences"));
  m.def("plan_attention", &bind_plan_attention, release_gil(), py::kw_only(), arg("query"),
        arg("pages"), arg("block_tables"), arg("wide_block_tables"), arg("max_blocks"),
        arg("query_starts"), arg("context_lens"), arg("num_sequences"), arg("share_reads"),
        arg("is_padded"), arg("options"), arg("max_query_len"), arg("max_short_query_len"),
        arg("split_tokens"), arg("num_partials"), arg("memory"), arg("faults"), arg("stream"));
  m.def("paged_attention", &bind_paged_attention, release_gil(), py::kw_only(), arg("query"),
        arg("out"), arg("lse"), arg("pages"), arg("scales"), arg("block_tables"),
        arg("wide_block_tables"), arg("max_blocks"), arg("query_starts"), arg("context_lens"),
        arg("num_sequences"), arg("share_reads"), arg("is_padded"), arg("options"),
        arg("max_query_len"), arg("max_short_query_len"), arg("split_tokens"), arg("workspace"),
        arg("workspace_bytes"), arg("plan").none(true), arg("faults"), arg("stream"));
  const auto def_copy = [&](const char* name, auto function) {
    m.def(name, function, release_gil(), py::kw_only(), arg("source"), arg("destination"),
          arg("pairs"), arg("num_pairs"), arg("source_num_blocks"), arg("destination_num_blocks"),
          arg("source_block_bytes"), arg("destination_block_bytes"), arg("copy_bytes"),
          arg("stream"));
  };
  def_copy("copy_blocks", &bind_copy<&copy_blocks>);
  def_copy("swap_blocks", &bind_copy<&swap_blocks>);
  const auto def_pack = [&](const char* name, auto function) {
    m.def(name, function, release_gil(), py::kw_only(), arg("pool"), arg("blocks"),
          arg("block_ids"), arg("num_block_ids"), arg("num_blocks"), arg("num_layers"),
          arg("block_bytes"), arg("page_bytes"), arg("stream"));
  };
  def_pack("gather_blocks", &bind_pack<&gather_blocks>);
  def_pack("scatter_blocks", &bind_pack<&scatter_blocks>);
  // For tests of the emulator against the hardware.
  m.def("probe", &bind_probe, release_gil(), py::kw_only(), arg("name"), arg("inputs"),
        arg("outputs"), arg("count"), arg("stream"));
}

}  // namespace kvplane::cuda
