#include "core/grouped_pool.h"

#include <algorithm>

namespace kvplane::blocks {

namespace {

// More than any pool has, and few enough to be multiplied by the blocks of any.
constexpr int64_t kMany = int64_t{1} << 32;

}  // namespace

Proportion::Proportion(Groups groups, Tier tier) : tier_(tier), smallest_(kMany) {
  for (int64_t g = 0; g < groups.size; ++g)
    smallest_ = std::min<int64_t>(smallest_, groups[g]->store(tier).num_blocks);
}

int64_t Proportion::up(const Pool& group, int64_t num) const {
  const int64_t size = group.store(tier_).num_blocks;
  return size == smallest_ || num <= 0 ? num : div_ceil(std::min(num, kMany) * smallest_, size);
}

int64_t Proportion::down(const Pool& group, int64_t num) const {
  const int64_t size = group.store(tier_).num_blocks;
  return size == smallest_ || num <= 0 ? num : std::min(num, kMany) * smallest_ / size;
}

int64_t Proportion::of_group(const Pool& group, int64_t num) const {
  const int64_t size = group.store(tier_).num_blocks;
  if (size == smallest_ || num <= 0) return num;
  return smallest_ ? div_ceil(std::min(num, kMany) * size, smallest_) : size;
}

Slot GroupedPool::open_session(std::string_view root, uint32_t owner) {
  Slot slot = kNoSlot;
  for (Pool* pool : pools_) slot = pool->open_session(root, owner);  // the same in each
  return slot;
}

void GroupedPool::end_session(Slot slot) {
  for (Pool* pool : pools_) pool->end_session(slot);
}

bool GroupedPool::end_some(Slot slot, int64_t max_blocks) {
  bool some_left = false;
  for (Pool* pool : pools_) some_left = pool->end_some(slot, max_blocks) || some_left;
  return some_left;
}

bool GroupedPool::is_ending(Slot slot) const {
  return std::any_of(pools_.begin(), pools_.end(),
                     [&](const Pool* pool) { return pool->is_ending(slot); });
}

void GroupedPool::session_fenced(Slot slot) {
  for (Pool* pool : pools_) pool->session_fenced(slot);
}

void GroupedPool::begin(Slot slot, int64_t number) {
  for (Pool* pool : pools_) pool->begin(slot, number);
}

std::vector<int32_t> GroupedPool::growth(Slot slot, const AppendColumns& columns) const {
  const Proportion proportion(groups(), kDevice);
  std::vector<int32_t> needed(static_cast<size_t>(columns.sequence_ids.size));
  for (const Pool* pool : pools_) {
    const std::vector<int32_t> here = pool->growth(slot, columns);
    for (size_t i = 0; i < needed.size(); ++i)
      needed[i] = std::max(needed[i], static_cast<int32_t>(proportion.up(*pool, here[i])));
  }
  return needed;
}

int64_t GroupedPool::cut(Slot slot, int64_t sequence_id) {
  int64_t num = 0;
  for (Pool* pool : pools_) num += pool->cut(slot, sequence_id);
  return num;
}

std::vector<Failure> GroupedPool::deferred_tokens(Slot slot, const DeferredColumns& columns) {
  for (Pool* pool : pools_) {
    const std::vector<Failure> failures = pool->deferred_tokens(slot, columns);
    if (!failures.empty()) return failures;  // by the first group, or by none
  }
  return {};
}

bool GroupedPool::receipted(Slot slot, int64_t plan, int64_t max_blocks) {
  bool is_left = false;
  for (Pool* pool : pools_) is_left = pool->receipted(slot, plan, max_blocks) || is_left;
  return is_left;
}

int64_t GroupedPool::release_retained(Slot slot, Span<int32_t> tokens) {
  int64_t num = 0;
  for (Pool* pool : pools_) num = std::max(num, pool->release_retained(slot, tokens));
  return num;
}

std::vector<EntryId> GroupedPool::match(std::string_view root, Span<int32_t> tokens) const {
  int64_t most = tokens.size;
  for (size_t num_agreed = 0; num_agreed < pools_.size();) {
    num_agreed = 0;
    for (const Pool* pool : pools_) {
      const auto num = static_cast<int64_t>(pool->match(root, tokens, most).size());
      num_agreed += num == most;
      most = num;
    }
  }
  return first().match(root, tokens, most);
}

int64_t GroupedPool::num_obtainable(Slot slot, Tier tier) const {
  const Proportion proportion(groups(), tier);
  int64_t num = proportion.smallest();
  for (const Pool* pool : pools_)
    num = std::min(num, proportion.down(*pool, pool->store(tier).num_obtainable(slot)));
  return num;
}

int64_t GroupedPool::num_coming(Slot slot, Tier tier) const {
  const Proportion proportion(groups(), tier);
  int64_t num = proportion.smallest();
  for (const Pool* pool : pools_) {
    const BlockStore& blocks = pool->store(tier);
    num = std::min(num,
                   proportion.down(*pool, blocks.num_obtainable(slot) + blocks.num_coming(slot)));
  }
  return num - num_obtainable(slot, tier);
}

int64_t GroupedPool::num_own_retired(Slot slot, Tier tier) const {
  const Proportion proportion(groups(), tier);
  int64_t num = 0;
  for (const Pool* pool : pools_)
    num = std::max(num, proportion.up(*pool, pool->store(tier).num_own_retired(slot)));
  return num;
}

int64_t GroupedPool::num_in(Tier tier, State state) const {
  const Proportion proportion(groups(), tier);
  const bool is_idle = state == State::kFree || state == State::kCached;
  int64_t num = is_idle ? proportion.smallest() : 0;
  for (const Pool* pool : pools_) {
    const int64_t here = pool->store(tier).num_in(state);
    num = is_idle ? std::min(num, proportion.down(*pool, here))
                  : std::max(num, proportion.up(*pool, here));
  }
  return num;
}

int64_t GroupedPool::num_held(Slot slot, int64_t sequence_id) const {
  const Proportion proportion(groups(), kDevice);
  int64_t num = 0;
  for (const Pool* pool : pools_)
    num = std::max(num, proportion.up(*pool, pool->held_by(*pool->find(slot, sequence_id))));
  return num;
}

int64_t GroupedPool::num_blocks_held(Slot slot) const {
  const Proportion proportion(groups(), kDevice);
  int64_t num = 0;
  for (const Pool* pool : pools_)
    num = std::max(num, proportion.up(*pool, pool->num_blocks_held(slot)));
  return num;
}

}  // namespace kvplane::blocks
