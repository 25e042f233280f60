#include "recovery/rebuild.h"

#include <algorithm>
#include <chrono>

#include "eviction/factory.h"

namespace kvplane::blocks {

namespace {

constexpr uint32_t kNoRow = 0xFFFFFFFF;  // 0 - 1
// How far ahead blocks are fetched from memory.
constexpr uint32_t kAhead = 16;
constexpr int64_t kMaxGeneration = int64_t{1} << 62;
// Blocks that count as one of states, which may be at the end of a long prompt.
constexpr int64_t kStateBlocks = 256;

void check_indices(Span<int32_t> indices, int32_t lowest, uint32_t num_blocks, const char* name) {
  for (int64_t i = 0; i < indices.size; ++i)
    if (indices[i] < lowest || indices[i] >= static_cast<int64_t>(num_blocks))
      throw ColumnError(name, i,
                        "must be from " + std::to_string(lowest) + " to " +
                            std::to_string(int64_t{num_blocks} - 1) + ", the tier's blocks");
}

}  // namespace

Rebuild::Rebuild(uint32_t block_size_tokens, uint32_t num_shards, const Rebuild* whole)
    : block_size_(block_size_tokens), whole_(whole), shards_(num_shards) {}

void Rebuild::start_shard(uint32_t shard, uint32_t num_device_blocks, uint32_t num_host_blocks) {
  Shard& it = shards_[shard] = Shard{};
  it.started = true;
  it.num_blocks[0] = num_device_blocks;
  it.num_blocks[1] = num_host_blocks;
  for (int t = 0; t < 2; ++t) it.generations[t] = Zeros<int64_t>(it.num_blocks[t]);
  it.row_after = Zeros<uint32_t>(num_device_blocks);
  it.tokens = Slab<int32_t, 0>(block_size_);
}

void Rebuild::add_blocks(uint32_t shard, Tier tier, Span<int32_t> indices,
                         Span<int64_t> generations) {
  Shard& it = shards_[shard];
  check_indices(indices, 0, it.num_blocks[tier - 1], "indices");
  for (int64_t i = 0; i < generations.size; ++i)
    if (generations[i] < 1 || generations[i] > kMaxGeneration)
      throw ColumnError("generations", i, "must be from 1 to 2^62");
  for (int64_t i = 0; i < indices.size; ++i)
    it.generations[tier - 1][static_cast<size_t>(indices[i])] = generations[i];
}

void Rebuild::add_publications(uint32_t shard, std::string_view root,
                               const PublicationColumns& columns) {
  Shard& it = shards_[shard];
  check_indices(columns.indices, 0, it.num_blocks[0], "indices");
  const uint32_t num_parents = (whole_ ? whole_->shards_[shard] : it).num_blocks[0];
  check_indices(columns.parent_indices, -1, num_parents, "parent_indices");
  for (int64_t i = 0; i < columns.token_ids.size; ++i)
    if (columns.token_ids[i] < 0) throw ColumnError("token_ids", i, "must not be negative");
  if (roots_.size() >= prune_at_) prune_roots();
  const auto [name, is_new] =
      root_ids_.try_emplace(std::string(root), static_cast<uint32_t>(roots_.size()));
  if (is_new) roots_.push_back({&name->first, kNoEntry});
  for (int64_t i = 0; i < columns.indices.size; ++i) {
    const auto b = static_cast<size_t>(columns.indices[i]);
    if (it.row_of(b) == kNoRow) {
      it.row_after[b] = it.rows.add() + 1;
      it.tokens.add();
    }
    const uint32_t r = it.row_of(b);
    Row& row = it.rows[r];
    row.block = static_cast<uint32_t>(columns.indices[i]);
    row.root = name->second;
    row.generation = columns.generations[i];
    row.parent = static_cast<Block>(columns.parent_indices[i]);
    row.parent_generation = columns.parent_generations[i];
    std::copy_n(columns.hashes.data + i * 16, 16, row.hash.begin());
    std::copy_n(columns.token_ids.data + i * block_size_, block_size_, it.tokens.row(r));
  }
}

// Shards that report again and again must not keep the roots of all former namespaces.
void Rebuild::prune_roots() {
  std::vector<uint8_t> is_named(roots_.size());
  for (Shard& it : shards_)
    for (uint32_t r = 0; r < it.rows.size(); ++r) is_named[it.rows[r].root] = 1;
  std::vector<uint32_t> now(roots_.size(), 0);
  std::vector<Root> kept;
  for (size_t i = 0; i < roots_.size(); ++i) {
    const auto found = root_ids_.find(*roots_[i].name);
    if (!is_named[i]) {
      root_ids_.erase(found);
      continue;
    }
    now[i] = found->second = static_cast<uint32_t>(kept.size());
    kept.push_back(roots_[i]);
  }
  for (Shard& it : shards_)
    for (uint32_t r = 0; r < it.rows.size(); ++r) it.rows[r].root = now[it.rows[r].root];
  roots_ = std::move(kept);
  prune_at_ = std::max(kFewRoots, 2 * roots_.size());
}

bool Rebuild::has_all_shards() const {
  return std::all_of(shards_.begin(), shards_.end(), [](const Shard& it) { return it.started; });
}

void Rebuild::begin(PoolConfig config, double now_s) {
  make_policy(config.eviction_policy, 1);  // throws if there is none of this name
  config_ = std::move(config);
  now_s_ = now_s;
  for (int t = 0; t < 2; ++t) {
    config_.num_blocks[t] = kNoBlock;
    size_t& most = num_known_[t] = config_.generations[t].size();
    for (const Shard& shard : shards_) {
      config_.num_blocks[t] = std::min(config_.num_blocks[t], shard.num_blocks[t]);
      most = std::max<size_t>(most, shard.num_blocks[t]);
    }
    // Blocks that the smallest shard lacks count too: it may be replaced by a larger one.
    config_.generations[t].reserve(most);
  }
  next(Phase::kLearn);
}

int64_t Rebuild::size_of_phase() const {
  switch (phase_) {
    case Phase::kLearn:
      return static_cast<int64_t>(std::max(num_known_[0], num_known_[1]));
    case Phase::kAgree:
    case Phase::kLink:
      return shards_[0].rows.size();
    case Phase::kIdle:
      return num_restored();
    case Phase::kRest:
      return group_->stores[kDevice].num_blocks;
    case Phase::kClose:
      return static_cast<int64_t>(roots_.size());
    default:
      return 0;
  }
}

bool Rebuild::step(int64_t max_blocks) {
  while (max_blocks > 0 && phase_ != Phase::kDone && phase_ != Phase::kCollect) {
    if (phase_ == Phase::kEnter) {
      for (; max_blocks > 0 && !stack_.empty(); --max_blocks) enter_next();
      if (stack_.empty()) next(Phase::kIdle);
      continue;
    }
    if (phase_ == Phase::kMake) {
      if (!make_group()) return false;
      next(Phase::kAgree);
      continue;
    }
    if (whole_ && phase_ == Phase::kLink && !whole_->is_done()) return false;
    const int64_t weight = whole_ && phase_ == Phase::kLink ? kStateBlocks : 1;
    const int64_t end = std::min(size_of_phase(), at_ + div_ceil(max_blocks, weight));
    max_blocks -= std::max<int64_t>(1, weight * (end - at_));
    for (; at_ < end; ++at_) do_one(at_);
    if (at_ == size_of_phase()) next(static_cast<Phase>(static_cast<int>(phase_) + 1));
  }
  return phase_ == Phase::kDone;
}

void Rebuild::do_one(int64_t i) {
  const auto row = static_cast<uint32_t>(i);
  switch (phase_) {
    case Phase::kLearn:
      return learn(i);
    case Phase::kAgree:
      if (row + kAhead < shards_[0].rows.size()) prefetch(shards_[0].rows[row + kAhead].block);
      agreed_.push_back(is_agreed(row));
      first_child_.push_back(kNoRow);
      last_child_.push_back(kNoRow);
      next_.push_back(kNoRow);
      entries_.push_back(kNoEntry);
      return;
    case Phase::kLink:
      return link(row);
    case Phase::kIdle:  // children are evicted first
      if (row + kAhead < restored_.size()) prefetch(restored_[restored_.size() - 1 - row - kAhead]);
      return group_->stores[kDevice].restored_idle(restored_[restored_.size() - 1 - row]);
    case Phase::kRest:
      return rest(group_->stores[kDevice].num_blocks - 1 - row);
    case Phase::kClose:
      if (roots_[row].entry != kNoEntry) group_->index.close_root(roots_[row].entry);
      return;
    default:
      return;
  }
}

void Rebuild::prefetch(uint32_t block) const {
  if (block < group_->stores[kDevice].num_blocks) group_->stores[kDevice].prefetch(block);
}

void Rebuild::learn(int64_t i) {
  const auto b = static_cast<size_t>(i);
  for (int t = 0; t < 2; ++t) {
    std::vector<int64_t>& known = config_.generations[t];
    if (b < num_known_[t] && b == known.size()) known.push_back(0);
    for (const Shard& shard : shards_)
      if (b < shard.generations[t].size()) known[b] = std::max(known[b], shard.generations[t][b]);
  }
}

bool Rebuild::make_group() {
  if (!making_.valid())
    making_ = std::async(std::launch::async, [config = std::move(config_)]() mutable {
      return std::make_unique<LayerGroup>(std::move(config));
    });
  if (making_.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) return false;
  group_ = making_.get();
  group_->set_time(now_s_);
  group_->stores[kDevice].start_restoring();
  const size_t num = shards_[0].rows.size();
  agreed_.reserve(num);
  for (auto* column : {&first_child_, &last_child_, &next_, &entries_, &restored_})
    column->reserve(num);
  return true;
}

// Whether the block's final generation is published, and all shards say the same of it.
bool Rebuild::is_agreed(uint32_t r) const {
  const Shard& first = shards_[0];
  const Row& row = first.rows[r];
  const BlockStore& device = group_->stores[kDevice];
  if (row.block >= device.num_blocks || row.generation != device.generation(row.block) ||
      row.generation != first.generations[0][row.block])
    return false;
  for (size_t s = 1; s < shards_.size(); ++s) {
    const Shard& other = shards_[s];
    const uint32_t o = other.row_of(row.block);
    if (o == kNoRow) return false;
    const Row& that = other.rows[o];
    if (that.root != row.root || that.generation != row.generation || that.parent != row.parent ||
        that.parent_generation != row.parent_generation || that.hash != row.hash ||
        !std::equal(first.tokens.row(r), first.tokens.row(r) + block_size_, other.tokens.row(o)))
      return false;
  }
  return true;
}

void Rebuild::link(uint32_t r) {
  if (!agreed_[r]) return;
  if (whole_) return enter_state(r);
  const Shard& first = shards_[0];
  const Row& row = first.rows[r];
  if (row.parent == kNoBlock) {
    stack_.push_back(r);
    return;
  }
  const uint32_t p = first.row_of(row.parent);
  if (p == kNoRow || !agreed_[p]) return;
  const Row& parent = first.rows[p];
  if (parent.generation != row.parent_generation || parent.root != row.root) return;
  (first_child_[p] == kNoRow ? first_child_[p] : next_[last_child_[p]]) = r;
  last_child_[p] = r;
}

void Rebuild::enter_next() {
  const uint32_t r = stack_.back();
  stack_.pop_back();
  const Shard& first = shards_[0];
  const Row& row = first.rows[r];
  const EntryId parent = row.parent == kNoBlock ? root_of(row) : entries_[first.row_of(row.parent)];
  entries_[r] = group_->restore(parent, first.tokens.row(r), row.hash, row.block);
  if (entries_[r] == kNoEntry) return;
  restored_.push_back(row.block);
  for (uint32_t child = first_child_[r]; child != kNoRow; child = next_[child])
    stack_.push_back(child);
}

// What was not restored is withdrawn: the next control plane must not learn it either.
void Rebuild::rest(Block b) {
  BlockStore& device = group_->stores[kDevice];
  device.restored_rest(b);
  const bool is_reported = std::any_of(shards_.begin(), shards_.end(),
                                       [b](const Shard& it) { return it.row_of(b) != kNoRow; });
  if (is_reported && !group_->index.is_published(kDevice, b))
    group_->forgetter.withdrawn().emplace_back(b, device.generation(b));
}

EntryId Rebuild::root_of(const Row& row) {
  Root& root = roots_[row.root];
  if (root.entry == kNoEntry) root.entry = group_->index.open_root(*root.name);
  return root.entry;
}

// Enters a checkpoint below entries that are made for it alone.
void Rebuild::enter_state(uint32_t r) {
  const Row& row = shards_[0].rows[r];
  const LayerGroup& whole = *whole_->group_;
  const int32_t* const tokens = shards_[0].tokens.row(r);
  if (row.parent >= whole.stores[kDevice].num_blocks) return;
  EntryId named = whole.index.entry_of(kDevice, row.parent);
  if (named == kNoEntry || whole.stores[kDevice].generation(row.parent) != row.parent_generation ||
      whole.index.root_name(whole.index.root_of(named)) != *roots_[row.root].name ||
      !std::equal(tokens, tokens + block_size_, whole.index.tokens(named)))
    return;
  std::vector<EntryId> way;
  while (!whole.index.is_root(named = whole.index[named].parent)) way.push_back(named);
  EntryId parent = root_of(row);
  for (; !way.empty(); way.pop_back())
    parent = group_->index.find_or_add(parent, whole.index.tokens(way.back()));
  entries_[r] = group_->restore(parent, tokens, row.hash, row.block);
  if (entries_[r] == kNoEntry) return group_->index.prune(parent);
  group_->index.add_key(entries_[r]);
  restored_.push_back(row.block);
}

std::unique_ptr<LayerGroup> Rebuild::take() {
  std::unique_ptr<LayerGroup> group = std::move(group_);
  *this = Rebuild(block_size_, num_shards(), whole_);
  return group;
}

}  // namespace kvplane::blocks
