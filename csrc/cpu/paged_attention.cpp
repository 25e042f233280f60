// Attention of ragged query tokens over paged keys and values: decode, prefill and append alike.
//
// - row: one query token at one query head.
// - item: up to kAttendRows rows: some query tokens of one sequence, at all query heads of some KV
//   heads, or at some query heads of one. Rows are ordered by KV head, then query token, then query
//   head.
// - split: kSplitTokens positions of the sequence, from a multiple of kSplitTokens on.
// - tile: kTileTokens positions, from a multiple of kTileTokens on.
//
//   positions   |tile|tile|...|tile|tile|tile|...|tile|tile|...
//               |----- split ------|----- split ------|--...     state of a row: merged in order
//
// Every row of an item adds each tile to the online softmax of its split, and then the split's
// state to that of the splits before. So a row's result depends on its position, its query and the
// keys and values it attends to, but not on its item, the batch, or the threads. A call with few
// items may therefore give the splits of an item to different threads, and merge their states in a
// second pass. Slots past the item's last position are not read, nor are table entries that no
// query token needs.

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "attention_items.h"
#include "kvplane/params.h"
#include "row_ops.h"
#include "scales.h"
#include "thread_pool.h"

namespace kvplane {
namespace {

constexpr int64_t kThreadWork = int64_t{1} << 19;  // products that pay for waking a thread
constexpr int64_t kLineBytes = 64;

alignas(kLineBytes) const char kZeros[kMaxRowSize * sizeof(float)] = {};

// The states of an item's rows.
struct States {
  RowState* state;  // [rows]
  float* out;       // [rows, value_size]
};

// The format of rows during the computation.
struct Layout {
  Dtype dtype;         // of queries, keys and values
  int64_t row_size;    // of queries and keys
  int64_t value_size;  // of values and outputs
  bool in_place;       // keys and values are read directly from the pages
  bool stored;         // ... by attend_stored

  Layout(const PagedAttentionParams& p, const RowOps& ops) {
    // Every 8-bit number is exact in bf16.
    const bool bf16 = ops.attend_bf16 != nullptr && p.query_dtype == Dtype::kBFloat16 &&
                      (p.pages.dtype == Dtype::kBFloat16 || is_8_bit(p.pages.dtype));
    const int64_t unit = bf16 ? 2 * kLanes : kLanes;
    dtype = bf16 ? Dtype::kBFloat16 : Dtype::kFloat32;
    row_size = padded(p.pages.head_size, unit);
    value_size = padded(p.pages.value_head_size, unit);
    stored = !bf16 && ops.attend_stored != nullptr && p.pages.dtype != Dtype::kFloat32 &&
             in_units(p.pages, ops.stored_unit);
    const int64_t whole = p.pages.dtype == dtype ? unit : 4 * kLanes;
    in_place = stored || ((p.pages.dtype == dtype || bf16) && in_units(p.pages, whole));
  }

  int64_t row_bytes() const { return row_size * dtype_bytes(dtype); }
  int64_t value_bytes() const { return value_size * dtype_bytes(dtype); }

 private:
  static bool in_units(const PagesParams& pages, int64_t unit) {
    return pages.head_size % unit == 0 && pages.value_head_size % unit == 0;
  }

  static int64_t padded(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }
};

// The buffers of one thread.
class Workspace {
 public:
  Workspace(const Layout& layout, int64_t num_rows)
      : rows(static_cast<size_t>(num_rows)),
        query_(static_cast<size_t>(num_rows * layout.row_bytes() + kLineBytes)),
        key_(static_cast<size_t>(layout.in_place ? 0 : kTileTokens * layout.row_bytes())),
        value_(static_cast<size_t>(layout.in_place ? 0 : kTileTokens * layout.value_bytes())),
        state_(static_cast<size_t>(2 * num_rows)),
        out_(static_cast<size_t>(2 * num_rows * layout.value_size)) {}

  char* query() { return query_.data(); }
  // Converted rows of a tile that cannot be used in place.
  char* key() { return key_.data(); }
  char* value() { return value_.data(); }
  // The states of one split, and of all splits so far.
  States split() { return {state_.data(), out_.data()}; }
  States total() { return {state_.data() + state_.size() / 2, out_.data() + out_.size() / 2}; }

  std::vector<Row> rows;
  Tile tiles[2];  // the current one, and the next one, which is prefetched

 private:
  std::vector<char> query_, key_, value_;  // zeros at first: the padding of a row stays zero
  std::vector<RowState> state_;
  std::vector<float> out_;
};

class Attention {
 public:
  Attention(const PagedAttentionParams& params, int num_workers, int64_t item_rows)
      : p_(params),
        ops_(row_ops()),
        layout_(params, ops_),
        group_(params.num_heads / params.pages.num_kv_heads),
        workspaces_(static_cast<size_t>(num_workers), Workspace(layout_, item_rows)) {}

  int64_t rows_of_kv_head(const Item& item) const { return item.num_tokens * item.num_heads; }
  int64_t num_rows(const Item& item) const { return rows_of_kv_head(item) * item.num_kv_heads; }
  int64_t value_size() const { return layout_.value_size; }

  Span splits_of(const Item& item) const {
    const Span all = positions_of(item);
    return {all.begin / kSplitTokens, (all.end + kSplitTokens - 1) / kSplitTokens};
  }

  // Computes a whole item.
  void run(int worker, const Item& item) {
    Workspace& w = workspaces_[static_cast<size_t>(worker)];
    load_queries(item, w);
    const Span splits = splits_of(item);
    clear(item, w.total());
    for (int64_t split = splits.begin; split < splits.end; ++split) {
      attend_split(item, split, w.split(), w);
      merge(item, w.split(), w.total());
    }
    store_rows(item, w.total());
  }

  // Computes one split of an item, and leaves its states in `states`.
  void run_split(int worker, const Item& item, int64_t split, const States& states) {
    Workspace& w = workspaces_[static_cast<size_t>(worker)];
    load_queries(item, w);
    attend_split(item, split, states, w);
  }

  // Merges the splits' states in order, and writes the item's outputs.
  void finish_splits(int worker, const Item& item, const std::vector<States>& splits) {
    const States total = workspaces_[static_cast<size_t>(worker)].total();
    clear(item, total);
    for (const States& states : splits) merge(item, states, total);
    store_rows(item, total);
  }

 private:
  // Of row r of an item.
  int64_t kv_head_of(const Item& item, int64_t r) const {
    return item.first_kv_head + r / rows_of_kv_head(item);
  }
  int64_t token_of(const Item& item, int64_t r) const {
    return item.first_token + r / item.num_heads % item.num_tokens;
  }
  int64_t head_of(const Item& item, int64_t r) const {
    return kv_head_of(item, r) * group_ + item.first_head + r % item.num_heads;
  }

  Span positions_of(const Item& item) const {
    return {visible(p_, item.first_position).begin, item.first_position + item.num_tokens};
  }

  void load_queries(const Item& item, Workspace& w) const {
    const char* query = static_cast<const char*>(p_.query);
    const int64_t head_size = p_.pages.head_size;
    for (int64_t r = 0; r < num_rows(item); ++r) {
      const int64_t at =
          token_of(item, r) * p_.query_token_stride + head_of(item, r) * p_.query_head_stride;
      const char* from = query + at * dtype_bytes(p_.query_dtype);
      char* row = w.query() + r * layout_.row_bytes();
      copy_row(from, p_.query_dtype, head_size, row);
      if (layout_.stored) {
        ops_.reorder(reinterpret_cast<float*>(row), head_size, p_.pages.dtype, false);
      }
    }
  }

  int64_t page_row_bytes() const { return p_.pages.head_size * dtype_bytes(p_.pages.dtype); }

  void copy_row(const char* from, Dtype dtype, int64_t head_size, char* to) const {
    if (dtype == layout_.dtype) {
      std::copy_n(from, head_size * dtype_bytes(dtype), to);
    } else {
      ops_.load(from, dtype, head_size, reinterpret_cast<float*>(to));
    }
  }

  void clear(const Item& item, const States& states) const {
    std::fill_n(states.out, num_rows(item) * value_size(), 0.0f);
    std::fill_n(states.state, num_rows(item),
                RowState{-std::numeric_limits<float>::infinity(), {}});
  }

  void attend_split(const Item& item, int64_t split, const States& states, Workspace& w) const {
    clear(item, states);
    const Span seen = positions_of(item);
    const int64_t first = std::max(seen.begin / kTileTokens * kTileTokens, split * kSplitTokens);
    const int64_t end = std::min(seen.end, (split + 1) * kSplitTokens);
    const int64_t first_head = item.first_kv_head, end_head = first_head + item.num_kv_heads;
    Tile *next = &w.tiles[0], *later = &w.tiles[1];
    find_tile(item, first_head, seen, first, later);
    for (int64_t tile = first; tile < end; tile += kTileTokens) {
      for (int64_t head = first_head; head < end_head; ++head) {
        std::swap(next, later);
        const bool last = head + 1 == end_head;
        find_tile(item, last ? first_head : head + 1, seen, last ? tile + kTileTokens : tile,
                  later);
        if (layout_.in_place) {
          attend_tile(item, head, tile, *next, *later, page_row_bytes(), states, w);
        } else {
          attend_tile(item, head, tile, load_tile(*next, *later, w), *later, 0, states, w);
        }
      }
    }
  }

  // Points at the rows of the tile's positions in `seen`. Other rows are not read: zeros stand for
  // them.
  void find_tile(const Item& item, int64_t kv_head, Span seen, int64_t tile, Tile* rows) const {
    const PagesParams& pages = p_.pages;
    const char* data = static_cast<const char*>(pages.data);
    const int64_t bytes = dtype_bytes(pages.dtype);
    const int64_t begin = std::max(seen.begin, tile);
    const int64_t end = std::max(begin, std::min(seen.end, tile + kTileTokens));
    if (end - begin < kTileTokens) {
      std::fill(rows->key, rows->key + kTileTokens, kZeros);
      std::fill(rows->value, rows->value + kTileTokens, kZeros);
    }
    int64_t position = begin;
    while (position < end) {
      const int64_t index = position / pages.block_size;
      const int64_t last = std::min(end, (index + 1) * pages.block_size);
      const int64_t offset = position - index * pages.block_size;
      const int64_t block = block_at(p_, item.sequence, index);
      const char* key = data + bytes * (block * pages.block_stride + kv_head * pages.head_stride +
                                        offset * pages.token_stride);
      const char* value =
          data + bytes * (block * pages.block_stride + pages.kv_stride +
                          kv_head * pages.value_head_stride + offset * pages.value_token_stride);
      for (; position < last; ++position) {
        rows->key[position - tile] = key;
        rows->value[position - tile] = value;
        key += bytes * pages.token_stride;
        value += bytes * pages.value_token_stride;
      }
    }
  }

  // Converts the tile's rows to the type of the computation.
  Tile load_tile(const Tile& tile, const Tile& next, Workspace& w) const {
    const PagesParams& pages = p_.pages;
    const auto load = layout_.dtype == Dtype::kBFloat16 ? ops_.load_tile_bf16 : ops_.load_tile;
    const int64_t bytes = layout_.row_bytes(), value_bytes = layout_.value_bytes();
    const int64_t element = dtype_bytes(pages.dtype);
    load({tile.key, next.key, page_row_bytes(), pages.dtype, pages.head_size, w.key(), bytes});
    load({tile.value, next.value, pages.value_head_size * element, pages.dtype,
          pages.value_head_size, w.value(), value_bytes});
    Tile loaded;
    for (int64_t t = 0; t < kTileTokens; ++t) {
      loaded.key[t] = w.key() + t * bytes;
      loaded.value[t] = w.value() + t * value_bytes;
    }
    return loaded;
  }

  void attend_tile(const Item& item, int64_t kv_head, int64_t first, const Tile& tile,
                   const Tile& next, int64_t prefetch_bytes, const States& states,
                   Workspace& w) const {
    int64_t num = 0;
    const int64_t of_head = rows_of_kv_head(item),
                  begin_row = (kv_head - item.first_kv_head) * of_head;
    for (int64_t r = begin_row; r < begin_row + of_head; ++r) {
      const int64_t position = item.first_position + (r - begin_row) / item.num_heads;
      const Span seen = visible(p_, position);
      const int64_t begin = std::max<int64_t>(0, seen.begin - first);
      const int64_t end = std::min(kTileTokens, seen.end - first);
      if (begin >= end) continue;
      const float slope = p_.alibi_slopes == nullptr ? 0.0f : p_.alibi_slopes[head_of(item, r)];
      w.rows[static_cast<size_t>(num++)] = {w.query() + r * layout_.row_bytes(),
                                            states.state + r,
                                            states.out + r * value_size(),
                                            begin,
                                            end,
                                            position - first,
                                            slope};
    }
    const float scale = p_.scale * key_scale(p_.pages, kv_head);
    const auto attend = layout_.stored                      ? ops_.attend_stored
                        : layout_.dtype == Dtype::kBFloat16 ? ops_.attend_bf16
                                                            : ops_.attend;
    if (num == 0) return;
    attend({&tile, &next, w.rows.data(), num, layout_.row_size, value_size(),
            layout_.in_place ? p_.pages.dtype : layout_.dtype, prefetch_bytes, scale,
            p_.logit_soft_cap});
  }

  void merge(const Item& item, const States& later, const States& states) const {
    for (int64_t r = 0; r < num_rows(item); ++r) {
      ops_.merge(later.state[r], later.out + r * value_size(), value_size(), &states.state[r],
                 states.out + r * value_size());
    }
  }

  void store_rows(const Item& item, const States& states) const {
    const int64_t head_size = p_.pages.value_head_size;
    char* out = static_cast<char*>(p_.out);
    for (int64_t r = 0; r < num_rows(item); ++r) {
      float* row = states.out + r * value_size();
      const float scale = value_scale(p_.pages, kv_head_of(item, r));
      const float* sink = p_.sinks == nullptr ? nullptr : p_.sinks + head_of(item, r);
      float max;
      const float sum = ops_.finish(states.state[r], value_size(), scale, sink, row, &max);
      const int64_t at = token_of(item, r) * p_.num_heads + head_of(item, r);
      if (layout_.stored) ops_.reorder(row, head_size, p_.pages.dtype, true);
      ops_.store(row, head_size, p_.query_dtype,
                 out + at * head_size * dtype_bytes(p_.query_dtype));
      if (p_.lse != nullptr) {
        p_.lse[at] = static_cast<float>(max + std::log(static_cast<double>(sum)));
      }
    }
  }

  const PagedAttentionParams& p_;
  const RowOps& ops_;
  const Layout layout_;
  const int64_t group_;  // query heads of one KV head
  std::vector<Workspace> workspaces_;
};

// The threads that this much work pays for: waking one takes as long as some hundred thousand
// products.
int num_workers(const PagedAttentionParams& p, const std::vector<Item>& items) {
  int64_t work = 0, most = 0;
  for (const Item& item : items) {
    const int64_t begin = visible(p, item.first_position).begin;
    const int64_t seen = item.first_position + item.num_tokens - begin;
    const int64_t rows = item.num_tokens * item.num_kv_heads * item.num_heads;
    work += rows * seen * p.pages.head_size;
    most += 1 + seen / kSplitTokens;
  }
  return static_cast<int>(std::min({int64_t{p.num_threads}, most, 1 + work / kThreadWork}));
}

// First computes every split of every item, then merges the splits of each item.
void run_splits(const std::vector<Item>& items, int workers, Attention* attention) {
  struct Part {
    size_t item;
    int64_t split;
    int64_t first_row;  // among the rows of all parts
  };
  std::vector<Part> parts;
  int64_t num_rows = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const Span splits = attention->splits_of(items[i]);
    for (int64_t split = splits.begin; split < splits.end; ++split) {
      parts.push_back({i, split, num_rows});
      num_rows += attention->num_rows(items[i]);
    }
  }
  std::vector<RowState> state(static_cast<size_t>(num_rows));
  std::vector<float> out(static_cast<size_t>(num_rows * attention->value_size()));
  std::vector<std::vector<States>> states(items.size());
  for (const Part& part : parts) {
    states[part.item].push_back(
        {state.data() + part.first_row, out.data() + part.first_row * attention->value_size()});
  }
  parallel_for(static_cast<int64_t>(parts.size()), workers, [&](int worker, int64_t i) {
    const Part& part = parts[static_cast<size_t>(i)];
    const Item& item = items[part.item];
    const int64_t index = part.split - attention->splits_of(item).begin;
    attention->run_split(worker, item, part.split, states[part.item][static_cast<size_t>(index)]);
  });
  parallel_for(static_cast<int64_t>(items.size()), workers, [&](int worker, int64_t i) {
    const size_t item = static_cast<size_t>(i);
    attention->finish_splits(worker, items[item], states[item]);
  });
}

}  // namespace

void paged_attention(const PagedAttentionParams& p) {
  check_batch(p);
  check_scales(p.pages);
  const std::vector<Item> items = cut_items(p);
  if (items.empty()) return;
  const int workers = num_workers(p, items);
  int64_t most_rows = 0;
  for (const Item& item : items) {
    most_rows = std::max(most_rows, item.num_tokens * item.num_heads * item.num_kv_heads);
  }
  Attention attention(p, workers, most_rows);
  const int64_t num_items = static_cast<int64_t>(items.size());
  if (workers > 1 && num_items < kItemsOfThread * workers) {
    run_splits(items, workers, &attention);
    return;
  }
  parallel_for(num_items, workers, [&](int worker, int64_t i) {
    attention.run(worker, items[static_cast<size_t>(i)]);
  });
}

}  // namespace kvplane
