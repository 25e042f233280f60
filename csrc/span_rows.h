// Prepares a plan's spans for the kernels of a layer group, and counts the slots that they wrote:
// each in one pass, because for a decode step's few numbers numpy needs a call per operation.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace kvplane {

using Ints = pybind11::array_t<int64_t, pybind11::array::c_style>;
using SmallInts = pybind11::array_t<int32_t, pybind11::array::c_style>;

// The block ids of each span's table: int32 arrays that belong to the caller.
class SpanTables {
 public:
  explicit SpanTables(const pybind11::list& tables) {
    views_.reserve(tables.size());
    for (const pybind11::handle& table : tables) {
      Py_buffer view;
      if (PyObject_GetBuffer(table.ptr(), &view, PyBUF_SIMPLE) != 0) {
        release();
        throw pybind11::error_already_set();
      }
      views_.push_back(view);
      if (view.itemsize != sizeof(int32_t)) {
        release();
        throw pybind11::type_error("tables must be of int32");
      }
    }
  }
  ~SpanTables() { release(); }
  SpanTables(const SpanTables&) = delete;
  SpanTables& operator=(const SpanTables&) = delete;

  size_t size() const { return views_.size(); }
  const int32_t* blocks(int64_t span) const {
    return static_cast<const int32_t*>(views_[span].buf);
  }
  int64_t length(int64_t span) const {
    return views_[span].len / static_cast<int64_t>(sizeof(int32_t));
  }

 private:
  void release() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
    views_.clear();
  }

  std::vector<Py_buffer> views_;
};

// Totals and maxima over all spans.
struct SpanSizes {
  int64_t num_tokens = 0;
  int64_t max_tokens = 0;
  int64_t max_blocks = 0;
  int64_t num_written = 0;  // blocks
  int64_t max_window_tokens = std::numeric_limits<int64_t>::max();
};

inline int64_t blocks_of(int64_t num_tokens, int64_t block_size) {
  return (num_tokens + block_size - 1) / block_size;
}

// Returns whether each span has slots in its table, behind the trimmed ones, and all spans together
// have at most `most_tokens` tokens and `most_entries` padded entries.
inline bool measure_spans(const int64_t* first, const int64_t* counts, const int64_t* num_trimmed,
                          const SpanTables& tables, int64_t block_size, int64_t most_tokens,
                          int64_t most_entries, SpanSizes* sizes) {
  const int64_t num_spans = static_cast<int64_t>(tables.size());
  for (int64_t i = 0; i < num_spans; ++i) {
    const int64_t num_gone = num_trimmed[i] * block_size;
    const int64_t num_slots = tables.length(i) * block_size;
    if (first[i] < num_gone || first[i] >= num_slots) return false;
    if (counts[i] < 1 || counts[i] > num_slots - first[i]) return false;
    const int64_t max_blocks = blocks_of(first[i] + counts[i], block_size);
    sizes->num_tokens += counts[i];
    sizes->max_tokens = std::max(sizes->max_tokens, counts[i]);
    sizes->max_blocks = std::max(sizes->max_blocks, max_blocks);
    sizes->num_written += max_blocks - first[i] / block_size;
    if (num_gone > 0) {
      sizes->max_window_tokens = std::min(sizes->max_window_tokens, first[i] + 1 - num_gone);
    }
    if (sizes->num_tokens > most_tokens) return false;
  }
  return num_spans * sizes->max_blocks <= most_entries;
}

// Returns None where `measure_spans` is false. Else a tuple, for S spans of T tokens and W blocks:
// starts int64 [S + 1], context_lens int64 [S], block_tables int32 [S, max_blocks], slots int64
// [T], written_blocks, num_written and written_by int64 [W], max_tokens, and max_window_tokens or
// None.
inline pybind11::object span_rows(const Ints& first_positions, const Ints& num_tokens,
                                  const Ints& num_trimmed, const pybind11::list& tables_of_spans,
                                  int64_t block_size, int64_t most_tokens, int64_t most_entries) {
  namespace py = pybind11;
  const SpanTables tables(tables_of_spans);
  const int64_t num_spans = static_cast<int64_t>(tables.size());
  for (const Ints* column : {&first_positions, &num_tokens, &num_trimmed}) {
    if (column->size() != num_spans) throw py::value_error("columns of unequal length");
  }
  const int64_t *first = first_positions.data(), *counts = num_tokens.data();
  SpanSizes sizes;
  if (!measure_spans(first, counts, num_trimmed.data(), tables, block_size, most_tokens,
                     most_entries, &sizes)) {
    return py::none();
  }
  Ints starts(num_spans + 1), context_lens(num_spans), slots(sizes.num_tokens);
  Ints written(sizes.num_written), num_written(sizes.num_written), written_by(sizes.num_written);
  SmallInts block_tables({num_spans, sizes.max_blocks});
  int64_t *start = starts.mutable_data(), *context_len = context_lens.mutable_data();
  int64_t *slot = slots.mutable_data(), *block = written.mutable_data();
  int64_t *num_slots = num_written.mutable_data(), *span = written_by.mutable_data();
  int32_t* row = block_tables.mutable_data();
  *start = 0;
  for (int64_t i = 0; i < num_spans; ++i, row += sizes.max_blocks) {
    const int32_t* table = tables.blocks(i);
    const int64_t end = first[i] + counts[i], num_blocks = blocks_of(end, block_size);
    start[i + 1] = start[i] + counts[i];
    context_len[i] = end;
    std::copy_n(table, num_blocks, row);
    std::fill_n(row + num_blocks, sizes.max_blocks - num_blocks, 0);
    for (int64_t entry = first[i] / block_size; entry < num_blocks; ++entry) {
      const int64_t begin = entry * block_size;
      *block++ = table[entry];
      *num_slots++ = std::min(block_size, end - begin);
      *span++ = i;
      for (int64_t p = std::max(first[i], begin); p < std::min(end, begin + block_size); ++p) {
        *slot++ = table[entry] * block_size + p - begin;
      }
    }
  }
  py::object window = py::none();
  if (sizes.max_window_tokens < std::numeric_limits<int64_t>::max()) {
    window = py::int_(sizes.max_window_tokens);
  }
  return py::make_tuple(starts, context_lens, block_tables, slots, written, num_written, written_by,
                        sizes.max_tokens, window);
}

// Raises the counts in `num_written` after a plan that wrote `num_slots` leading slots of `blocks`,
// except for blocks whose generation is no longer the `planned` one.
inline void note_written(SmallInts& num_written, const Ints& generations, const Ints& blocks,
                         const Ints& num_slots, const Ints& planned) {
  const int64_t num_blocks = blocks.size(), most = std::min(num_written.size(), generations.size());
  if (num_slots.size() != num_blocks || planned.size() != num_blocks) {
    throw pybind11::value_error("columns of unequal length");
  }
  int32_t* counts = num_written.mutable_data();
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int64_t block = blocks.data()[i];
    if (block < 0 || block >= most) throw pybind11::index_error("no such block");
    if (generations.data()[block] != planned.data()[i]) continue;
    counts[block] = std::max(counts[block], static_cast<int32_t>(num_slots.data()[i]));
  }
}

inline void bind_span_rows(pybind11::module_& m) {
  using pybind11::arg;
  m.def("span_rows", &span_rows, arg("first_positions").noconvert(), arg("num_tokens").noconvert(),
        arg("num_trimmed").noconvert(), arg("tables"), arg("block_size"), arg("most_tokens"),
        arg("most_entries"));
  m.def("note_written", &note_written, arg("num_written").noconvert(),
        arg("generations").noconvert(), arg("blocks").noconvert(), arg("num_slots").noconvert(),
        arg("planned").noconvert());
}

}  // namespace kvplane
