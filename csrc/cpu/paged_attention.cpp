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
// keys and values it attends to, but not on its item, the batch, or the threads. A call may
// therefore compute the states of some splits first, and merge them in a second pass: of all splits
// when it has few items, so that the splits of an item go to different threads; and of splits that
// several sequences share, for all their rows at once (shared_splits.h). Such a call is divided by
// query tokens if their states would exceed max_state_bytes. Slots past the item's last position
// are not read, nor are table entries that no query token needs.

#include <algorithm>
#include <utility>
#include <vector>

#include "attention.h"
#include "attention_items.h"
#include "kvplane/params.h"
#include "scales.h"
#include "scratch.h"
#include "shared_splits.h"
#include "thread_pool.h"

namespace kvplane {
namespace {

constexpr int64_t kLastParts = 8;                  // for each thread, of the last items
constexpr int64_t kThreadWork = int64_t{1} << 19;  // products that pay for waking a thread

// The number of threads that the work is worth: waking one takes as long as some hundred thousand
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

// The states of splits that are computed in the first pass, by item and split of the item.
class ComputedSplits {
 public:
  ComputedSplits(const std::vector<Item>& items, const Attention& attention)
      : items_(items), attention_(attention), states_(items.size()), first_rows_(items.size()) {}

  // Returns whether the split was new.
  bool add(size_t item, int64_t split) {
    const Range splits = attention_.splits_of(items_[item]);
    std::vector<int64_t>& rows = first_rows_[item];
    rows.resize(static_cast<size_t>(splits.end - splits.begin), -1);
    int64_t& first = rows[static_cast<size_t>(split - splits.begin)];
    if (first >= 0) return false;
    first = num_rows_;
    num_rows_ += attention_.num_rows(items_[item]);
    return true;
  }

  // Allocates the states, after the last `add`.
  void allocate(Scratch& scratch) {
    RowState* const state = scratch.take<RowState>(num_rows_);
    float* const out = scratch.take<float>(num_rows_ * attention_.value_size());
    for (size_t i = 0; i < items_.size(); ++i) {
      for (const int64_t first : first_rows_[i]) {
        states_[i].push_back(first < 0
                                 ? States{nullptr, nullptr}
                                 : States{state + first, out + first * attention_.value_size()});
      }
    }
  }

  // The states of an item, by its splits; empty where none was added.
  const std::vector<States>& of(size_t item) const { return states_[item]; }

  const States& at(size_t item, int64_t split) const {
    return states_[item][static_cast<size_t>(split - attention_.splits_of(items_[item]).begin)];
  }

 private:
  const std::vector<Item>& items_;
  const Attention& attention_;
  std::vector<std::vector<States>> states_;
  std::vector<std::vector<int64_t>> first_rows_;
  int64_t num_rows_ = 0;
};

// The parts of a shared split, each of as many KV heads as its rows leave room for.
void add_shared_parts(const SharedSplit& shared, const std::vector<Item>& items,
                      const ComputedSplits& computed, std::vector<Part>* parts) {
  int64_t of_head = 0;
  for (const size_t i : shared.items) of_head += rows_of_kv_head(items[i]);
  const Item& first = items[shared.items.front()];
  const int64_t end = first.first_kv_head + first.num_kv_heads;
  const int64_t num_heads = std::max<int64_t>(1, kAttendRows / of_head);
  const Range seen = {shared.split * kSplitTokens, (shared.split + 1) * kSplitTokens};
  for (int64_t head = first.first_kv_head; head < end; head += num_heads) {
    const Range heads = {head, std::min(head + num_heads, end)};
    Part part = {shared.split, {}, heads, seen};
    int64_t num_rows = 0;
    for (const size_t i : shared.items) {
      const int64_t of_member = rows_of_kv_head(items[i]);
      const int64_t begin = (heads.begin - items[i].first_kv_head) * of_member;
      part.members.push_back({&items[i], computed.at(i, shared.split), num_rows - begin});
      num_rows += of_member * (heads.end - heads.begin);
    }
    parts->push_back(std::move(part));
  }
}

// Returns the first of the last items, which are computed by their splits: smaller pieces of work,
// so that the threads end at about the same time.
size_t first_by_splits(const PagedAttentionParams& p, const std::vector<Item>& items, int workers,
                       const Attention& attention) {
  size_t first = items.size();
  if (workers == 1) return first;
  int64_t num_bytes = 0;  // of states
  for (int64_t parts = 0; first > 0 && parts < kLastParts * workers; --first) {
    const Item& item = items[first - 1];
    const Range splits = attention.splits_of(item);
    const int64_t num_splits = splits.end - splits.begin;
    num_bytes += num_splits * attention.num_rows(item) * attention.state_bytes();
    if (num_splits < 2 || num_bytes > p.max_state_bytes) break;
    parts += num_splits;
  }
  return first;
}

// Computes the shared splits and those of items from `first` on, and then the rest.
void run_parts(const std::vector<Item>& items, const std::vector<SharedSplit>& shared, size_t first,
               int workers, Attention* attention, Scratch& scratch) {
  ComputedSplits computed(items, *attention);
  for (const SharedSplit& split : shared) {
    for (const size_t i : split.items) computed.add(i, split.split);
  }
  std::vector<std::pair<size_t, int64_t>> alone;
  for (size_t i = first; i < items.size(); ++i) {
    const Range splits = attention->splits_of(items[i]);
    for (int64_t split = splits.begin; split < splits.end; ++split) {
      if (computed.add(i, split)) alone.emplace_back(i, split);
    }
  }
  computed.allocate(scratch);
  std::vector<Part> parts;
  for (const SharedSplit& split : shared) add_shared_parts(split, items, computed, &parts);
  for (const auto& [i, split] : alone) {
    parts.push_back(attention->part_of(items[i], split, computed.at(i, split)));
  }
  const auto run_item = [&](int worker, size_t item) {
    attention->run(worker, items[item], computed.of(item));
  };
  // Items that need none of the parts do not wait for them.
  const size_t num_before = shared.empty() ? first : 0;
  parallel_for(static_cast<int64_t>(num_before + parts.size()), workers,
               [&](int worker, int64_t i) {
                 const size_t index = static_cast<size_t>(i);
                 if (index < num_before) return run_item(worker, index);
                 attention->run_part(worker, parts[index - num_before]);
               });
  parallel_for(
      static_cast<int64_t>(items.size() - num_before), workers,
      [&](int worker, int64_t i) { run_item(worker, num_before + static_cast<size_t>(i)); });
}

// Attends with the rows of these items. `few`: the splits of an item go to several threads.
void attend(const PagedAttentionParams& p, const std::vector<Item>& items, bool few, int workers) {
  std::vector<SharedSplit> shared;
  if (p.share_reads) shared = find_shared_splits(p, items);
  int64_t most_rows = 0;
  for (const Item& item : items) {
    most_rows = std::max(most_rows, rows_of_kv_head(item) * item.num_kv_heads);
  }
  if (!shared.empty()) most_rows = std::max(most_rows, kAttendRows);
  const Scratch::Lease scratch;
  Attention attention(p, workers, most_rows, *scratch);
  const size_t first = few ? 0 : first_by_splits(p, items, workers, attention);
  run_parts(items, shared, first, workers, &attention, *scratch);
}

// The end of the items from `begin` on whose states may be computed together: all items of some
// query tokens, and at least those of the first ones. `row_bytes`: of a state.
size_t end_of_piece(const PagedAttentionParams& p, const std::vector<Item>& items, size_t begin,
                    int64_t row_bytes) {
  int64_t num_bytes = 0;
  for (size_t i = begin; i < items.size();) {
    const size_t first = i;
    for (; i < items.size() && items[i].first_token == items[first].first_token; ++i) {
      const Range seen = positions_of(p, items[i]);
      const int64_t splits = (seen.end - 1) / kSplitTokens - seen.begin / kSplitTokens + 1;
      num_bytes += splits * rows_of_kv_head(items[i]) * items[i].num_kv_heads * row_bytes;
    }
    if (num_bytes > p.max_state_bytes && first > begin) return first;
  }
  return items.size();
}

}  // namespace

void paged_attention(const PagedAttentionParams& p) {
  check_batch(p);
  check_scales(p.pages);
  const std::vector<Item> items = cut_items(p);
  if (items.empty()) return;
  const int workers = num_workers(p, items);
  const bool few = workers > 1 && static_cast<int64_t>(items.size()) < kItemsOfThread * workers;
  const int64_t values = Layout(p, row_ops()).value_size;
  const int64_t row_bytes = static_cast<int64_t>(sizeof(RowState) + sizeof(float) * values);
  const bool has_states = few || p.share_reads;
  size_t end = has_states ? end_of_piece(p, items, 0, row_bytes) : items.size();
  if (end == items.size()) return attend(p, items, few, workers);
  for (size_t begin = 0; begin < items.size(); begin = end) {
    end = end_of_piece(p, items, begin, row_bytes);
    const auto first = items.begin() + static_cast<std::ptrdiff_t>(begin);
    attend(p, {first, first + static_cast<std::ptrdiff_t>(end - begin)}, few, workers);
  }
}

}  // namespace kvplane
