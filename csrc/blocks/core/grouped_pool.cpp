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

SessionHandle GroupedPool::open_session(std::string_view root, uint32_t owner) {
  SessionHandle handle = kNoSession;
  for (Pool* pool : pools_) handle = pool->open_session(root, owner);  // the same in each
  return handle;
}

void GroupedPool::end_session(SessionHandle handle) {
  for (Pool* pool : pools_) pool->end_session(handle);
}

bool GroupedPool::end_some(SessionHandle handle, int64_t max_blocks) {
  bool some_left = false;
  for (Pool* pool : pools_) some_left = pool->end_some(handle, max_blocks) || some_left;
  return some_left;
}

bool GroupedPool::is_ending(SessionHandle handle) const {
  return std::any_of(pools_.begin(), pools_.end(),
                     [&](const Pool* pool) { return pool->is_ending(handle); });
}

void GroupedPool::session_fenced(SessionHandle handle) {
  for (Pool* pool : pools_) pool->session_fenced(handle);
}

void GroupedPool::begin(SessionHandle handle, int64_t number) {
  for (Pool* pool : pools_) pool->begin(handle, number);
}

std::vector<int32_t> GroupedPool::growth(SessionHandle handle, const AppendColumns& columns) const {
  const Proportion proportion(groups(), kDevice);
  std::vector<int32_t> needed(static_cast<size_t>(columns.sequence_ids.size));
  for (const Pool* pool : pools_) {
    const std::vector<int32_t> here = pool->growth(handle, columns);
    for (size_t i = 0; i < needed.size(); ++i)
      needed[i] = std::max(needed[i], static_cast<int32_t>(proportion.up(*pool, here[i])));
  }
  return needed;
}

int64_t GroupedPool::cut(SessionHandle handle, int64_t sequence_id) {
  int64_t num = 0;
  for (Pool* pool : pools_) num += pool->cut(handle, sequence_id);
  return num;
}

std::vector<Failure> GroupedPool::deferred_tokens(SessionHandle handle,
                                                  const DeferredColumns& columns) {
  for (Pool* pool : pools_) {
    const std::vector<Failure> failures = pool->deferred_tokens(handle, columns);
    if (!failures.empty()) return failures;  // by the first group, or by none
  }
  return {};
}

bool GroupedPool::receipted(SessionHandle handle, int64_t plan, int64_t max_blocks) {
  bool is_left = false;
  for (Pool* pool : pools_) is_left = pool->receipted(handle, plan, max_blocks) || is_left;
  return is_left;
}

int64_t GroupedPool::release_retained(std::string_view root, uint32_t owner, Span<int32_t> tokens) {
  int64_t num = 0;
  for (Pool* pool : pools_) num = std::max(num, pool->release_retained(root, owner, tokens));
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

int64_t GroupedPool::num_obtainable(SessionHandle handle, Tier tier) const {
  const Proportion proportion(groups(), tier);
  int64_t num = proportion.smallest();
  for (const Pool* pool : pools_)
    num = std::min(num, proportion.down(*pool, pool->store(tier).num_obtainable(handle)));
  return num;
}

int64_t GroupedPool::num_coming(SessionHandle handle, Tier tier) const {
  const Proportion proportion(groups(), tier);
  int64_t num = proportion.smallest();
  for (const Pool* pool : pools_) {
    const BlockStore& blocks = pool->store(tier);
    num = std::min(
        num, proportion.down(*pool, blocks.num_obtainable(handle) + blocks.num_coming(handle)));
  }
  return num - num_obtainable(handle, tier);
}

int64_t GroupedPool::num_own_retired(SessionHandle handle, Tier tier) const {
  const Proportion proportion(groups(), tier);
  int64_t num = 0;
  for (const Pool* pool : pools_)
    num = std::max(num, proportion.up(*pool, pool->store(tier).num_own_retired(handle)));
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

int64_t GroupedPool::num_held(SessionHandle handle, int64_t sequence_id) const {
  const Proportion proportion(groups(), kDevice);
  int64_t num = 0;
  for (const Pool* pool : pools_)
    num = std::max(num, proportion.up(*pool, pool->held_by(*pool->find(handle, sequence_id))));
  return num;
}

int64_t GroupedPool::num_blocks_held(SessionHandle handle) const {
  const Proportion proportion(groups(), kDevice);
  int64_t num = 0;
  for (const Pool* pool : pools_)
    num = std::max(num, proportion.up(*pool, pool->num_blocks_held(handle)));
  return num;
}

}  // namespace kvplane::blocks
