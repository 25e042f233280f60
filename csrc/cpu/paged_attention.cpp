// Attention of ragged query rows over paged keys and values: decode, prefill and append alike.
//
//   item  = up to kItemRows query rows: some tokens of one sequence, all query heads of one KV head
//   tile  = kTileTokens KV tokens, cut at multiples of kTileTokens of the sequence's positions
//
// An item converts each tile to fp32 once, and every row of it takes the tile into its own online
// softmax. What a row computes depends on its position, its query and the keys and values it sees:
// not on the item it is in, the batch, or the threads. Slots past the item's last position are
// not read, and table entries that no row needs are not looked at.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kvplane/checks.h"
#include "kvplane/params.h"
#include "parallel.h"
#include "row_ops.h"

namespace kvplane {
namespace {

constexpr int64_t kItemRows = 64;
constexpr int64_t kThreadWork = int64_t{1} << 20;  // products that are worth a thread of their own

struct Item {
  int64_t sequence;
  int64_t first_token;  // row of the query tensor
  int64_t num_tokens;
  int64_t first_position;  // of first_token in its sequence
  int64_t kv_head;
};

// Half-open range of the positions that a row sees.
struct Span {
  int64_t begin;
  int64_t end;
};

struct Workspace {
  std::vector<float> key, value;  // [kTileTokens, row_size]
  std::vector<float> query, out;  // [rows, row_size]
  std::vector<RowState> state;    // [rows]
};

int64_t block_at(const PagedAttentionParams& p, int64_t sequence, int64_t index) {
  const int64_t i = sequence * p.max_blocks + index;
  return p.wide_block_tables ? static_cast<const int64_t*>(p.block_tables)[i]
                             : static_cast<const int32_t*>(p.block_tables)[i];
}

Span visible(const PagedAttentionParams& p, int64_t position) {
  const int64_t window = p.sliding_window_tokens;
  return {window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0, position + 1};
}

int64_t first_position(const PagedAttentionParams& p, int64_t sequence) {
  const int64_t query_len = p.query_starts[sequence + 1] - p.query_starts[sequence];
  return p.context_lens[sequence] - query_len;
}

// Rows add up, contexts cover their rows, and every table entry that some row needs names a block.
void check_batch(const PagedAttentionParams& p) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const int64_t* starts = p.query_starts;
  require_in_range(starts[0], 0, 1, [] { return at("query_starts", 0); });
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    require_in_range(starts[s + 1], starts[s], p.num_tokens + 1,
                     [&] { return at("query_starts", s + 1); });
    const int64_t query_len = starts[s + 1] - starts[s];
    const int64_t room = p.max_blocks * p.pages.block_size;
    require_in_range(p.context_lens[s], query_len, query_len == 0 ? kMax : room + 1,
                     [&] { return at("context_lens", s); });
    if (query_len == 0) continue;
    const int64_t begin = visible(p, first_position(p, s)).begin / p.pages.block_size;
    const int64_t last = (p.context_lens[s] - 1) / p.pages.block_size;
    for (int64_t b = begin; b <= last; ++b) {
      require_in_range(block_at(p, s, b), 0, p.pages.num_blocks,
                       [&] { return at("block_tables", s, b); });
    }
  }
  require_in_range(starts[p.num_sequences], p.num_tokens, p.num_tokens + 1,
                   [&] { return at("query_starts", p.num_sequences); });
}

std::vector<Item> cut_items(const PagedAttentionParams& p, int64_t item_tokens) {
  std::vector<Item> items;
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    const int64_t begin = p.query_starts[s], end = p.query_starts[s + 1];
    for (int64_t token = begin; token < end; token += item_tokens) {
      const int64_t num_tokens = std::min(item_tokens, end - token);
      const int64_t position = first_position(p, s) + token - begin;
      for (int64_t h = 0; h < p.pages.num_kv_heads; ++h) {
        items.push_back({s, token, num_tokens, position, h});
      }
    }
  }
  return items;
}

class Attention {
 public:
  Attention(const PagedAttentionParams& params, int num_workers, int64_t item_tokens)
      : p_(params),
        ops_(row_ops()),
        row_size_((params.pages.head_size + kLanes - 1) / kLanes * kLanes),
        group_(params.num_heads / params.pages.num_kv_heads),
        workspaces_(static_cast<size_t>(num_workers)) {
    const size_t rows = static_cast<size_t>(item_tokens * group_);
    const size_t row_size = static_cast<size_t>(row_size_);
    for (Workspace& w : workspaces_) {  // Zeros: the padding of a row stays zero.
      w.key.resize(kTileTokens * row_size);
      w.value.resize(kTileTokens * row_size);
      w.query.resize(rows * row_size);
      w.out.resize(rows * row_size);
      w.state.resize(rows);
    }
  }

  void run(int worker, const Item& item) {
    Workspace& w = workspaces_[static_cast<size_t>(worker)];
    load_queries(item, w);
    const Span all = {visible(p_, item.first_position).begin,
                      item.first_position + item.num_tokens};
    for (int64_t tile = all.begin / kTileTokens * kTileTokens; tile < all.end;
         tile += kTileTokens) {
      load_tile(item, {std::max(tile, all.begin), std::min(tile + kTileTokens, all.end)}, tile, w);
      attend_tile(item, tile, w);
    }
    store_rows(item, w);
  }

 private:
  int64_t num_rows(const Item& item) const { return item.num_tokens * group_; }

  // Row r of an item: token r / group, query head kv_head * group + r % group.
  int64_t token_of(const Item& item, int64_t r) const { return item.first_token + r / group_; }
  int64_t head_of(const Item& item, int64_t r) const { return item.kv_head * group_ + r % group_; }

  void load_queries(const Item& item, Workspace& w) const {
    const char* query = static_cast<const char*>(p_.query);
    for (int64_t r = 0; r < num_rows(item); ++r) {
      const int64_t at =
          token_of(item, r) * p_.query_token_stride + head_of(item, r) * p_.query_head_stride;
      ops_.load(query + at * dtype_bytes(p_.query_dtype), p_.query_dtype, p_.pages.head_size,
                &w.query[static_cast<size_t>(r * row_size_)]);
      std::fill_n(&w.out[static_cast<size_t>(r * row_size_)], row_size_, 0.0f);
      w.state[static_cast<size_t>(r)] = {-std::numeric_limits<float>::infinity(), {}};
    }
  }

  void load_tile(const Item& item, Span positions, int64_t tile, Workspace& w) const {
    const PagesParams& pages = p_.pages;
    const char* data = static_cast<const char*>(pages.data);
    const int64_t bytes = dtype_bytes(pages.dtype);
    for (int64_t i = positions.begin; i < positions.end; ++i) {
      const int64_t block = block_at(p_, item.sequence, i / pages.block_size);
      const int64_t from = block * pages.block_stride + item.kv_head * pages.head_stride +
                           i % pages.block_size * pages.token_stride;
      const size_t to = static_cast<size_t>((i - tile) * row_size_);
      ops_.load(data + from * bytes, pages.dtype, pages.head_size, &w.key[to]);
      ops_.load(data + (from + pages.kv_stride) * bytes, pages.dtype, pages.head_size,
                &w.value[to]);
    }
  }

  void attend_tile(const Item& item, int64_t tile, Workspace& w) const {
    for (int64_t r = 0; r < num_rows(item); ++r) {
      const int64_t position = item.first_position + r / group_;
      const Span seen = visible(p_, position);
      const int64_t begin = std::max<int64_t>(0, seen.begin - tile);
      const int64_t end = std::min(kTileTokens, seen.end - tile);
      if (begin >= end) continue;
      const TileView view = {w.key.data(), w.value.data(), row_size_, begin, end};
      const float slope = p_.alibi_slopes == nullptr ? 0.0f : p_.alibi_slopes[head_of(item, r)];
      const size_t row = static_cast<size_t>(r * row_size_);
      ops_.attend(&w.query[row], view, {p_.scale, slope, position - tile},
                  &w.state[static_cast<size_t>(r)], &w.out[row]);
    }
  }

  void store_rows(const Item& item, Workspace& w) const {
    const PagesParams& pages = p_.pages;
    char* out = static_cast<char*>(p_.out);
    for (int64_t r = 0; r < num_rows(item); ++r) {
      const RowState& state = w.state[static_cast<size_t>(r)];
      float* row = &w.out[static_cast<size_t>(r * row_size_)];
      const float sum = ops_.finish(state, row_size_, row);
      const int64_t at = token_of(item, r) * p_.num_heads + head_of(item, r);
      ops_.store(row, pages.head_size, p_.query_dtype,
                 out + at * pages.head_size * dtype_bytes(p_.query_dtype));
      if (p_.lse != nullptr) {
        p_.lse[at] = static_cast<float>(state.max + std::log(static_cast<double>(sum)));
      }
    }
  }

  const PagedAttentionParams& p_;
  const RowOps& ops_;
  const int64_t row_size_;  // head size, padded to whole lanes
  const int64_t group_;     // query heads of one KV head
  std::vector<Workspace> workspaces_;
};

// Threads for this much work: starting one takes as long as some thousand products.
int num_workers(const PagedAttentionParams& p, int64_t num_items) {
  int64_t work = 0;
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    const int64_t rows = (p.query_starts[s + 1] - p.query_starts[s]) * p.num_heads;
    const int64_t seen = p.sliding_window_tokens > 0
                             ? std::min(p.context_lens[s], p.sliding_window_tokens)
                             : p.context_lens[s];
    work += rows * seen * p.pages.head_size / kThreadWork;
  }
  return static_cast<int>(std::min({int64_t{p.num_threads}, num_items, 1 + work}));
}

}  // namespace

void paged_attention(const PagedAttentionParams& p) {
  check_batch(p);
  const int64_t group = p.num_heads / p.pages.num_kv_heads;
  const int64_t item_tokens = std::max<int64_t>(1, kItemRows / group);
  const std::vector<Item> items = cut_items(p, item_tokens);
  if (items.empty()) return;
  const int workers = num_workers(p, static_cast<int64_t>(items.size()));
  Attention attention(p, workers, item_tokens);
  parallel_for(static_cast<int64_t>(items.size()), workers, [&](int worker, int64_t i) {
    attention.run(worker, items[static_cast<size_t>(i)]);
  });
}

}  // namespace kvplane
