// The operations as Python functions of plain addresses, shapes and strides.
//
// kvplane_kernels._native knows no tensor library: a caller describes each tensor by a TensorView.
// data_plane/kernels/arguments.py has checked shapes and types; the operations check the values of
// ids and lengths.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "bound_layers.h"
#include "kvplane/isa.h"
#include "kvplane/params.h"
#include "local/ends.h"
#include "span_rows.h"
#include "tensor_view.h"

namespace py = pybind11;

namespace kvplane {
namespace {

void bind_reshape_and_cache(const TensorView& key, const TensorView* value, const PagesView& pages,
                            const ScalesView& scales, uintptr_t slots, int num_threads) {
  ReshapeAndCacheParams p = {};
  p.key = key.data();
  p.slots = pointer<const int64_t>(slots);
  p.pages = pages_of(pages, scales);
  p.key_dtype = key.dtype;
  p.num_tokens = key.shape[0];
  p.key_token_stride = key.strides[0];
  p.key_head_stride = key.strides[1];
  set_value(value, &p);
  p.num_threads = num_threads;
  reshape_and_cache(p);
}

void bind_paged_attention(const TensorView& query, uintptr_t out, uintptr_t lse,
                          const PagesView& pages, const ScalesView& scales, uintptr_t block_tables,
                          bool wide_block_tables, int64_t max_blocks, uintptr_t query_starts,
                          uintptr_t context_lens, int64_t num_sequences,
                          const AttentionOptions& options, bool share_reads, int num_threads) {
  PagedAttentionParams p = {};
  static_cast<AttentionOptions&>(p) = options;
  p.query = query.data();
  p.out = pointer<void>(out);
  p.lse = pointer<float>(lse);
  p.block_tables = pointer<const void>(block_tables);
  p.query_starts = pointer<const int64_t>(query_starts);
  p.context_lens = pointer<const int64_t>(context_lens);
  p.pages = pages_of(pages, scales);
  p.query_dtype = query.dtype;
  p.wide_block_tables = wide_block_tables;
  p.share_reads = share_reads;
  p.num_tokens = query.shape[0];
  p.num_heads = query.shape[1];
  p.num_sequences = num_sequences;
  p.max_blocks = max_blocks;
  p.query_token_stride = query.strides[0];
  p.query_head_stride = query.strides[1];
  p.num_threads = num_threads;
  paged_attention(p);
}

void bind_copy_blocks(uintptr_t source, uintptr_t destination, uintptr_t pairs, int64_t num_pairs,
                      int64_t source_num_blocks, int64_t destination_num_blocks,
                      int64_t source_block_bytes, int64_t destination_block_bytes,
                      int64_t copy_bytes, int num_threads) {
  copy_blocks({pointer<const char>(source), pointer<char>(destination),
               pointer<const int64_t>(pairs), num_pairs, source_num_blocks, destination_num_blocks,
               source_block_bytes, destination_block_bytes, copy_bytes, num_threads});
}

void bind_gather_blocks(uintptr_t pool, uintptr_t blocks, uintptr_t block_ids,
                        int64_t num_block_ids, int64_t num_blocks, int64_t num_layers,
                        int64_t block_bytes, int64_t page_bytes) {
  gather_blocks({pointer<char>(pool), pointer<char>(blocks), pointer<const int64_t>(block_ids),
                 num_block_ids, num_blocks, num_layers, block_bytes, page_bytes});
}

void bind_scatter_blocks(uintptr_t pool, uintptr_t blocks, uintptr_t block_ids,
                         int64_t num_block_ids, int64_t num_blocks, int64_t num_layers,
                         int64_t block_bytes, int64_t page_bytes) {
  scatter_blocks({pointer<char>(pool), pointer<char>(blocks), pointer<const int64_t>(block_ids),
                  num_block_ids, num_blocks, num_layers, block_bytes, page_bytes});
}

uint64_t bind_read_runs(uintptr_t memory, uintptr_t offsets, int64_t num_runs, int64_t run_bytes,
                        int64_t runs_of_item, int num_threads) {
  return read_runs({pointer<const char>(memory), pointer<const int64_t>(offsets), num_runs,
                    run_bytes, runs_of_item, num_threads});
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  using py::arg;

  bind_types(m);
  bind_bound_layers(m);
  bind_layer_server(m);
  bind_layer_calls(m);
  bind_span_rows(m);

  m.def("cpu_isa", &cpu_isa);
  m.def("cpu_isas", &cpu_isas);
  m.def("use_cpu_isa", &use_cpu_isa, arg("isa"));
  m.def("reshape_and_cache", &bind_reshape_and_cache, release_gil(), py::kw_only(), arg("key"),
        arg("value"), arg("pages"), arg("scales"), arg("slots"), arg("num_threads"));
  m.def("paged_attention", &bind_paged_attention, release_gil(), py::kw_only(), arg("query"),
        arg("out"), arg("lse"), arg("pages"), arg("scales"), arg("block_tables"),
        arg("wide_block_tables"), arg("max_blocks"), arg("query_starts"), arg("context_lens"),
        arg("num_sequences"), arg("options"), arg("share_reads"), arg("num_threads"));
  // Between two pools or inside one: on the CPU it is the same function.
  for (const char* name : {"copy_blocks", "swap_blocks"}) {
    m.def(name, &bind_copy_blocks, release_gil(), py::kw_only(), arg("source"), arg("destination"),
          arg("pairs"), arg("num_pairs"), arg("source_num_blocks"), arg("destination_num_blocks"),
          arg("source_block_bytes"), arg("destination_block_bytes"), arg("copy_bytes"),
          arg("num_threads"));
  }
  m.def("read_runs", &bind_read_runs, release_gil(), py::kw_only(), arg("memory"), arg("offsets"),
        arg("num_runs"), arg("run_bytes"), arg("runs_of_item"), arg("num_threads"));
  m.def("fused_products", &fused_products, release_gil(), py::kw_only(), arg("num_rounds"),
        arg("num_threads"));
  m.def("gather_blocks", &bind_gather_blocks, release_gil(), py::kw_only(), arg("pool"),
        arg("blocks"), arg("block_ids"), arg("num_block_ids"), arg("num_blocks"), arg("num_layers"),
        arg("block_bytes"), arg("page_bytes"));
  m.def("scatter_blocks", &bind_scatter_blocks, release_gil(), py::kw_only(), arg("pool"),
        arg("blocks"), arg("block_ids"), arg("num_block_ids"), arg("num_blocks"), arg("num_layers"),
        arg("block_bytes"), arg("page_bytes"));
}

}  // namespace kvplane
