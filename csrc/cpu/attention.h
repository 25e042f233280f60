// Computes one item, or some items' rows in one split: see paged_attention.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "attention_items.h"
#include "kvplane/params.h"
#include "row_ops.h"
#include "scales.h"
#include "scratch.h"

namespace kvplane {
namespace {

constexpr int64_t kLineBytes = 64;

alignas(kLineBytes) const char kZeros[kMaxRowSize * sizeof(float)] = {};

// The states of an item's rows.
struct States {
  RowState* state;  // [rows]; null for no states
  float* out;       // [rows, value_size]
};

// One of the items that are computed together: they have equal blocks in their split.
struct Member {
  const Item* item;
  States states;    // of all its rows
  int64_t queries;  // row r of the item has its query at row queries + r of the workspace
};

// One thread's work on one split: the same KV heads of all members.
struct Part {
  int64_t split;
  std::vector<Member> members;
  Range kv_heads;
  Range seen;  // positions whose slots may be read
};

// A tile, by its first position, at one KV head.
struct TileOfHead {
  int64_t tile;
  int64_t kv_head;
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

// The buffers of one thread. They start at cache lines: a register that is loaded across two lines
// takes twice the time.
class alignas(2 * kLineBytes) Workspace {
 public:
  Workspace(const Layout& layout, int64_t num_rows, Scratch& scratch)
      : rows(scratch.take<Row>(num_rows)),
        // The padding of a row stays zero.
        query(scratch.take_zeros<char>(num_rows * layout.row_bytes())),
        key(scratch.take_zeros<char>(layout.in_place ? 0 : kTileTokens * layout.row_bytes())),
        value(scratch.take_zeros<char>(layout.in_place ? 0 : kTileTokens * layout.value_bytes())),
        split(take_states(layout, num_rows, scratch)),
        total(take_states(layout, num_rows, scratch)) {}

  Row* const rows;
  char* const query;
  char *const key, *const value;  // converted rows of a tile that cannot be used in place
  const States split, total;      // of one split, and of all splits so far
  Tile tiles[2] = {};             // the current one, and the next one, which is prefetched

 private:
  static States take_states(const Layout& layout, int64_t num_rows, Scratch& scratch) {
    return {scratch.take<RowState>(num_rows), scratch.take<float>(num_rows * layout.value_size)};
  }
};

class Attention {
 public:
  Attention(const PagedAttentionParams& params, int num_workers, int64_t item_rows,
            Scratch& scratch)
      : p_(params),
        ops_(row_ops()),
        layout_(params, ops_),
        group_(params.num_heads / params.pages.num_kv_heads) {
    workspaces_.reserve(static_cast<size_t>(num_workers));
    for (int i = 0; i < num_workers; ++i) workspaces_.emplace_back(layout_, item_rows, scratch);
  }

  int64_t num_rows(const Item& item) const { return rows_of_kv_head(item) * item.num_kv_heads; }
  int64_t value_size() const { return layout_.value_size; }
  // Bytes of one row's state.
  int64_t state_bytes() const {
    return static_cast<int64_t>(sizeof(RowState) + sizeof(float) * value_size());
  }

  Range splits_of(const Item& item) const {
    const Range all = positions_of(p_, item);
    return {all.begin / kSplitTokens, (all.end + kSplitTokens - 1) / kSplitTokens};
  }

  // One split of one item.
  Part part_of(const Item& item, int64_t split, const States& states) const {
    return {split,
            {{&item, states, 0}},
            {item.first_kv_head, item.first_kv_head + item.num_kv_heads},
            positions_of(p_, item)};
  }

  // Computes a whole item, except splits whose states are in `computed`: by the item's splits.
  void run(int worker, const Item& item, const std::vector<States>& computed) {
    Workspace& w = workspaces_[static_cast<size_t>(worker)];
    const Range splits = splits_of(item);
    Part part = part_of(item, splits.begin, w.split);
    bool loaded = false;
    clear(item, w.total);
    for (; part.split < splits.end; ++part.split) {
      const size_t index = static_cast<size_t>(part.split - splits.begin);
      if (!computed.empty() && computed[index].state != nullptr) {
        merge(item, computed[index], w.total);
        continue;
      }
      if (!loaded) load_queries(part, w);
      loaded = true;
      attend_split(part, w);
      merge(item, w.split, w.total);
    }
    store_rows(item, w.total);
  }

  // Leaves the states of a part's rows in those of its members.
  void run_part(int worker, const Part& part) {
    Workspace& w = workspaces_[static_cast<size_t>(worker)];
    load_queries(part, w);
    attend_split(part, w);
  }

 private:
  // The KV head, query token and query head of row r of an item.
  int64_t kv_head_of(const Item& item, int64_t r) const {
    return item.first_kv_head + r / rows_of_kv_head(item);
  }
  int64_t token_of(const Item& item, int64_t r) const {
    return item.first_token + r / item.num_heads % item.num_tokens;
  }
  int64_t head_of(const Item& item, int64_t r) const {
    return kv_head_of(item, r) * group_ + item.first_head + r % item.num_heads;
  }

  // The position of row r of an item's KV head.
  static int64_t position_of(const Item& item, int64_t r) {
    return item.first_position + r / item.num_heads;
  }

  // The rows of a member that are in the part.
  Range rows_of(const Part& part, const Item& item) const {
    const int64_t of_head = rows_of_kv_head(item);
    return {(part.kv_heads.begin - item.first_kv_head) * of_head,
            (part.kv_heads.end - item.first_kv_head) * of_head};
  }

  void load_queries(const Part& part, Workspace& w) const {
    for (const Member& member : part.members) {
      const Range rows = rows_of(part, *member.item);
      for (int64_t r = rows.begin; r < rows.end; ++r) load_query(member, r, w);
    }
  }

  void load_query(const Member& member, int64_t r, Workspace& w) const {
    const Item& item = *member.item;
    const int64_t at =
        token_of(item, r) * p_.query_token_stride + head_of(item, r) * p_.query_head_stride;
    const char* from = static_cast<const char*>(p_.query) + at * dtype_bytes(p_.query_dtype);
    const int64_t head_size = p_.pages.head_size;
    char* row = w.query + (member.queries + r) * layout_.row_bytes();
    copy_row(from, p_.query_dtype, head_size, row);
    if (layout_.stored) {
      ops_.reorder(reinterpret_cast<float*>(row), head_size, p_.pages.dtype, false);
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

  void clear(const Item& item, const States& states) const { clear(states, {0, num_rows(item)}); }

  void clear(const States& states, Range rows) const {
    std::fill(states.out + rows.begin * value_size(), states.out + rows.end * value_size(), 0.0f);
    std::fill(states.state + rows.begin, states.state + rows.end,
              RowState{-std::numeric_limits<float>::infinity(), {}});
  }

  void attend_split(const Part& part, Workspace& w) const {
    for (const Member& member : part.members) clear(member.states, rows_of(part, *member.item));
    const int64_t split = part.split * kSplitTokens;
    const int64_t first = std::max(part.seen.begin / kTileTokens * kTileTokens, split);
    const int64_t end = std::min(part.seen.end, split + kSplitTokens);
    Tile *next = &w.tiles[0], *later = &w.tiles[1];
    TileOfHead at = first_seen(part, {first, part.kv_heads.begin}, end);
    find_tile(part, at.kv_head, at.tile, later);
    while (at.tile < end) {
      std::swap(next, later);
      const TileOfHead ahead = first_seen(part, after(part, at), end);
      find_tile(part, ahead.kv_head, ahead.tile, later);
      if (layout_.in_place) {
        attend_tile(part, at.kv_head, at.tile, *next, *later, page_row_bytes(), w);
      } else {
        attend_tile(part, at.kv_head, at.tile, load_tile(*next, *later, w), *later, 0, w);
      }
      at = ahead;
    }
  }

  static TileOfHead after(const Part& part, TileOfHead at) {
    if (at.kv_head + 1 < part.kv_heads.end) return {at.tile, at.kv_head + 1};
    return {at.tile + kTileTokens, part.kv_heads.begin};
  }

  // The first tile of a head, from `at` on, of which some row sees a token; one from `end` on where
  // there is none. Tiles that a mask of blocks hides are not read.
  TileOfHead first_seen(const Part& part, TileOfHead at, int64_t end) const {
    if (p_.blocks.seen == nullptr) return at;
    while (at.tile < end && !is_seen(part, at)) at = after(part, at);
    return at;
  }

  bool is_seen(const Part& part, TileOfHead at) const {
    for (const Member& member : part.members) {
      const Item& item = *member.item;
      const int64_t of_head = rows_of_kv_head(item);
      const int64_t begin = (at.kv_head - item.first_kv_head) * of_head;
      for (int64_t r = begin; r < begin + of_head; ++r) {
        const int64_t position = position_of(item, r - begin);
        const Range seen = seen_of_tile(p_, item.sequence, head_of(item, r), position, at.tile);
        if (seen.begin < seen.end) return true;
      }
    }
    return false;
  }

  // Points at the rows of the tile's positions that are attended to. Other rows are not read: zeros
  // stand for them.
  void find_tile(const Part& part, int64_t kv_head, int64_t tile, Tile* rows) const {
    const PagesParams& pages = p_.pages;
    const int64_t sequence = part.members.front().item->sequence;
    const char* data = static_cast<const char*>(pages.data);
    const int64_t bytes = dtype_bytes(pages.dtype);
    const int64_t begin = std::max(part.seen.begin, tile);
    const int64_t end = std::max(begin, std::min(part.seen.end, tile + kTileTokens));
    if (end - begin < kTileTokens) {
      std::fill(rows->key, rows->key + kTileTokens, kZeros);
      std::fill(rows->value, rows->value + kTileTokens, kZeros);
    }
    int64_t position = begin;
    while (position < end) {
      const int64_t index = position / pages.block_size;
      const int64_t last = std::min(end, (index + 1) * pages.block_size);
      const int64_t offset = position - index * pages.block_size;
      const int64_t block = block_at(p_, sequence, index);
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
    load({tile.key, next.key, page_row_bytes(), pages.dtype, pages.head_size, w.key, bytes});
    load({tile.value, next.value, pages.value_head_size * element, pages.dtype,
          pages.value_head_size, w.value, value_bytes});
    Tile loaded;
    for (int64_t t = 0; t < kTileTokens; ++t) {
      loaded.key[t] = w.key + t * bytes;
      loaded.value[t] = w.value + t * value_bytes;
    }
    return loaded;
  }

  void attend_tile(const Part& part, int64_t kv_head, int64_t first, const Tile& tile,
                   const Tile& next, int64_t prefetch_bytes, Workspace& w) const {
    int64_t num = 0;
    for (const Member& member : part.members) num = add_rows(member, kv_head, first, num, w);
    if (num == 0) return;
    const float scale = p_.scale * key_scale(p_.pages, kv_head);
    const auto attend = layout_.stored                      ? ops_.attend_stored
                        : layout_.dtype == Dtype::kBFloat16 ? ops_.attend_bf16
                                                            : ops_.attend;
    attend({&tile, &next, w.rows, num, layout_.row_size, value_size(),
            layout_.in_place ? p_.pages.dtype : layout_.dtype, prefetch_bytes, scale,
            p_.logit_soft_cap});
  }

  // Appends a member's rows that attend to the tile to the workspace's `num` rows. Returns the new
  // number of rows.
  int64_t add_rows(const Member& member, int64_t kv_head, int64_t first, int64_t num,
                   Workspace& w) const {
    const Item& item = *member.item;
    const int64_t of_head = rows_of_kv_head(item),
                  begin_row = (kv_head - item.first_kv_head) * of_head;
    for (int64_t r = begin_row; r < begin_row + of_head; ++r) {
      const int64_t position = position_of(item, r - begin_row);
      const auto [begin, end] = seen_of_tile(p_, item.sequence, head_of(item, r), position, first);
      if (begin >= end) continue;
      const float slope = p_.alibi_slopes == nullptr ? 0.0f : p_.alibi_slopes[head_of(item, r)];
      w.rows[num++] = {w.query + (member.queries + r) * layout_.row_bytes(),
                       member.states.state + r,
                       member.states.out + r * value_size(),
                       begin,
                       end,
                       position - first,
                       slope};
    }
    return num;
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

}  // namespace
}  // namespace kvplane
