// Publish after write: a block enters the prefix index when it is full, its tokens are known, and
// receipts say that every slot of it was written. Where the prefix has a block already, the new one
// is its spare.
#include <algorithm>

#include "core/pool.h"
#include "index/findable.h"

namespace kvplane::blocks {

namespace {

constexpr int64_t kAhead = 8;  // how far blocks are fetched from memory

// Returns whether the entry's block may be announced to data planes: they know that of its parent.
// Nothing when another call has to find out.
std::optional<bool> may_announce(const PrefixIndex& index, EntryId e, Findable& findable) {
  if (index[e].block(kDevice) == kNoBlock || !index.follows_device(e)) return false;
  return findable(e);
}

}  // namespace

bool Pool::receipted(SessionHandle handle, int64_t plan, int64_t max_blocks) {
  Session& session = sessions_[handle];
  auto& [begun, plans, next_plan, next_touched] = session.receipting;
  if (plan > session.done) {
    session.done = plan;
    begun = true;
    while (!session.plans.empty() && session.plans.front().number <= plan) {
      plans.push_back(std::move(session.plans.front()));
      session.plans.pop_front();
    }
  } else if (!begun) {
    return false;
  }
  // A sequence counts as a block, and so does each block that it publishes, releases or copied.
  int64_t num = 0;
  for (; next_plan < plans.size(); ++next_plan, next_touched = 0)
    for (const auto& touched = plans[next_plan].touched; next_touched < touched.size(); ++num) {
      if (num >= max_blocks) return true;
      const auto& [index, uid] = touched[next_touched++];
      const int64_t published_before = counters_.num_publications;
      if (sequences_[index].uid == uid) advance(session, index, session.done);
      num += counters_.num_publications - published_before;
    }
  return end_receipted(session, max_blocks - num);
}

// Ends a receipt after all sequences of its plans were advanced. Returns whether some work is left.
bool Pool::end_receipted(Session& session, int64_t left) {
  for (; !session.releases.empty() && session.releases.front().plan <= session.done;
       session.releases.pop_front())
    for (const Tier tier : {kDevice, kHost}) {
      std::vector<Block>& blocks = session.releases.front().blocks[tier - 1];
      const int64_t num = std::clamp<int64_t>(left, 0, static_cast<int64_t>(blocks.size()));
      stores_[tier].finished(blocks.data(), static_cast<size_t>(num));
      blocks.erase(blocks.begin(), blocks.begin() + num);
      left -= num;
      if (!blocks.empty()) return true;
    }
  for (PlanRecord& record : session.receipting.plans) {
    for (; !record.transfers.empty(); record.transfers.pop_back(), --left) {
      if (left <= 0) return true;
      const Transfer& transfer = record.transfers.back();
      if (transfer.pins) stores_[transfer.source.tier].unpin(transfer.source.block);
    }
    end_demotions(session, std::exchange(record, {}), true, session.done);
  }
  session.receipting = Receipting{};
  return false;
}

// Publishes blocks of the sequence that plans up to `done`, which have run, wrote.
void Pool::advance(Session& session, uint32_t index, int64_t done) {
  Sequence& sequence = sequences_[index];
  size_t num = 0;
  for (; num < sequence.pending.size() && sequence.pending[num].first <= done; ++num)
    sequence.num_written = std::max(sequence.num_written, sequence.pending[num].second);
  if (num) {
    sequence.pending.erase(sequence.pending.begin(),
                           sequence.pending.begin() + static_cast<int64_t>(num));
    sequence.progress_s = now_s_;
  }
  if (sequence.num_written / block_size_ > sequence.num_published) publish(session, index);
  if (!sequence.live && sequence.pending.empty()) forget_sequence(index);
}

void Pool::publish(Session& session, uint32_t index) {
  Sequence& sequence = sequences_[index];
  int64_t complete = std::min(std::min(sequence.num_written, sequence.tokens.size) / block_size_,
                              sequence.private_from);
  // An entry is not made for a trimmed block alone.
  const int64_t num_gone = sequence.live ? sequence.num_trimmed : 0;
  if (complete <= std::max(sequence.num_published, num_gone) || sequence.tier != kDevice ||
      sequence.moved_by > session.done)
    return;
  if (!sequence.live) {
    // A block that was allocated again since is lost, and so are all after it.
    const int64_t first = sequence.first_ghost;
    for (int64_t i = sequence.num_published; i < complete; ++i) {
      const auto& [b, generation] = sequence.ghosts[static_cast<size_t>(i - first)];
      if (b == kNoBlock || stores_[kDevice].generation(b) != generation) complete = i;
    }
    if (complete <= sequence.num_published) return;
  }
  if (!set_chain(session, sequence)) return;
  entered_.clear();
  if (sequence.live)
    sequence.table.runs(table_store_, sequence.num_published, complete,
                        [&](const Block* items, int64_t num) {
                          entered_.insert(entered_.end(), items, items + num);
                        });
  else
    for (int64_t i = sequence.num_published; i < complete; ++i)
      entered_.push_back(sequence.ghosts[static_cast<size_t>(i - sequence.first_ghost)].first);
  for (size_t k = 0; k < entered_.size(); ++k, ++sequence.num_published) {
    if (k + kAhead < entered_.size()) {
      const auto produced =
          static_cast<size_t>(sequence.num_published + kAhead - sequence.first_produced);
      if (produced < sequence.produced.size()) index_.prefetch(sequence.produced[produced]);
      if (const Block b = entered_[k + kAhead]; b != kNoBlock) stores_[kDevice].prefetch(b);
    }
    enter(session, sequence, index, entered_[k]);
  }
  publish_fresh();
  // The last entry has no block if that was published with other tokens, which a fork was given.
  index_.prune(sequence.chain);
}

// Makes sure that the chain is the entry of the last published block: if that was removed,
// publishing begins again. False when it cannot, because the sequence no longer has blocks on the
// way: complete blocks are not published now, and later blocks are tried again.
bool Pool::set_chain(Session& session, Sequence& sequence) {
  if (index_.alive(sequence.chain, sequence.chain_uid)) return true;
  const int64_t num_published = sequence.num_published;
  sequence.num_published = 0;
  sequence.chain = session.root;
  sequence.chain_uid = index_[session.root].uid;
  const int64_t num_gone = sequence.live ? sequence.num_trimmed : num_published;
  for (; sequence.num_published < num_gone; ++sequence.num_published) {
    const EntryId e = index_.find(
        sequence.chain, &sequence.tokens.at(token_store_, sequence.num_published * block_size_));
    if (e == kNoEntry) {
      sequence.num_published = std::max(num_published, num_gone);
      sequence.chain = kNoEntry;
      return false;
    }
    sequence.chain = e;
    sequence.chain_uid = index_[e].uid;
  }
  return true;
}

// The entry of the first block that is not published.
EntryId Pool::entry_for(const Sequence& sequence, uint32_t index) {
  // Out of range if it is before the first one.
  const auto i = static_cast<size_t>(sequence.num_published - sequence.first_produced);
  if (i < sequence.produced.size()) {
    const EntryId e = sequence.produced[i];
    const Entry& entry = index_[e];
    if (entry.producer == index && entry.producer_uid == sequence.uid &&
        entry.parent == sequence.chain)
      return e;
  }
  return index_.find_or_add(
      sequence.chain, &sequence.tokens.at(token_store_, sequence.num_published * block_size_));
}

// Enters a written block after the sequence's chain.
void Pool::enter(Session& session, Sequence& sequence, uint32_t index, Block b) {
  const EntryId e = entry_for(sequence, index);
  Entry& entry = index_[e];
  sequence.chain = e;
  sequence.chain_uid = entry.uid;
  BlockStore& device = stores_[kDevice];
  if (b != kNoBlock && index_.entry_of(kDevice, b) == kNoEntry && index_.set_block(e, kDevice, b)) {
    entry.published_s = static_cast<float>(now_s_);
    entry.used_s = entry.published_s;
    ++counters_.num_publications;
    const bool has_below = announce(session.root, e);
    if (!has_below && device.state(b) == State::kHeld) {
      fresh_.push_back(b);
    } else {
      publish_fresh();
      device.published(b);
    }
  } else {
    publish_fresh();
  }
  index_.clear_producer(e, index, sequence.uid);
}

// Publishes the blocks that were entered last, each after the one before it.
void Pool::publish_fresh() {
  if (!fresh_.empty()) stores_[kDevice].published(fresh_);
  fresh_.clear();
}

// Announces the entry's block to data planes, and again those below it, which name it. Returns
// whether there are such.
bool Pool::announce(EntryId root, EntryId e) {
  EntryId c = index_[e].child;
  while (c != kNoEntry && index_[c].block(kDevice) == kNoBlock) c = index_[c].next;
  // Written a field at a time: put together first, it would be read before it has been stored.
  Announcement& item = announcements_.emplace_back();
  item.root = root;
  item.entry = e;
  item.uid = index_[e].uid;
  item.below = c != kNoEntry;
  return item.below;
}

std::vector<Pool::Announcement> Pool::take_announcements(size_t max_entries) {
  std::vector<Announcement> taken;
  Findable findable(index_);
  for (size_t num = 0; num < max_entries && has_announcements(); ++num) {
    if (re_announced_.empty()) re_announced_.push_back(announcements_[num_announced_++]);
    const Announcement item = re_announced_.back();
    const bool is_alive = index_.alive(item.entry, item.uid);
    const std::optional<bool> may = is_alive ? may_announce(index_, item.entry, findable) : false;
    if (!may) break;
    re_announced_.pop_back();
    if (*may) taken.push_back(item);
    if (item.below && is_alive)
      for (EntryId c = index_[item.entry].child; c != kNoEntry; c = index_[c].next)
        if (index_[c].block(kDevice) != kNoBlock)
          re_announced_.push_back({item.root, c, index_[c].uid, true});
    if (re_announced_.empty() && num_announced_ == announcements_.size()) {
      announcements_.clear();
      num_announced_ = 0;
    }
  }
  return taken;
}

void Pool::announce_promoted() {
  for (const Block b : stores_[kDevice].take_promoted()) {
    const EntryId e = index_.entry_of(kDevice, b);
    if (e != kNoEntry) announce(index_.root_of(e), e);
  }
}

std::vector<Pool::Announcement> Pool::findable() const {
  std::vector<Announcement> found;
  for (const EntryId root : index_.roots()) {
    std::vector<EntryId> stack{root};
    while (!stack.empty()) {
      const EntryId e = stack.back();
      stack.pop_back();
      if (e != root) found.push_back({root, e, index_[e].uid, false});
      for (EntryId c = index_[e].child; c != kNoEntry; c = index_[c].next)
        if (index_[c].block(kDevice) != kNoBlock) stack.push_back(c);
    }
  }
  return found;
}

// Includes entries whose parents are not on the device. If it takes long, `end` becomes the first
// block that was not scanned.
std::vector<Pool::Announcement> Pool::findable_in(Block begin, Block& end) const {
  std::vector<Announcement> found;
  Findable findable(index_);
  for (Block b = begin; b < end; ++b) {
    if (!index_.is_published(kDevice, b)) continue;
    const EntryId e = index_.entry_of(kDevice, b);
    const std::optional<bool> is_findable = findable(e);
    if (!is_findable) end = b;
    if (is_findable.value_or(false)) found.push_back({index_.root_of(e), e, index_[e].uid, false});
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Announcement& a, const Announcement& b) { return a.root < b.root; });
  return found;
}

// Deferred tokens

// Tokens of [begin, end) that an item of a call gives a sequence, which had none there; `before`:
// the earlier item's entry for the same sequence, or -1.
struct Pool::Given {
  int64_t begin, end;
  const int32_t* tokens;
  int64_t before;
};

std::vector<Failure> Pool::deferred_tokens(SessionHandle handle, const DeferredColumns& columns) {
  Session& session = sessions_[handle];
  const int64_t num = columns.sequence_ids.size;
  for (int64_t item = 0; item < num; ++item)
    if (const uint32_t* index = session.sequences.find(columns.sequence_ids[item])) {
      sequences_[*index].num_checked = sequences_[*index].tokens.size;
      sequences_[*index].last_given = -1;
    }
  std::vector<Given> given;
  const int32_t* tokens = columns.token_ids.data;
  for (int64_t item = 0; item < num; tokens += columns.num_tokens[item], ++item) {
    const Failure failure = check_deferred(session, columns, item, tokens, given);
    if (failure.code != Code::kOk) return {failure};
  }
  tokens = columns.token_ids.data;
  for (int64_t item = 0; item < num; tokens += columns.num_tokens[item], ++item) {
    const uint32_t index = *session.sequences.find(columns.sequence_ids[item]);
    Sequence& sequence = sequences_[index];
    const int64_t num_repeated = sequence.tokens.size - columns.first_positions[item];
    const int64_t num_new = columns.num_tokens[item] - num_repeated;
    if (num_new <= 0) continue;
    sequence.tokens.append(token_store_, tokens + num_repeated, num_new);
    session.num_tokens += num_new;
    publish(session, index);
  }
  return {};
}

Failure Pool::check_deferred(Session& session, const DeferredColumns& columns, int64_t item,
                             const int32_t* tokens, std::vector<Given>& given) {
  const int64_t id = columns.sequence_ids[item], first = columns.first_positions[item];
  const uint32_t* index = session.sequences.find(id);
  if (!index) return {item, Code::kNotFound, id};
  Sequence& sequence = sequences_[*index];
  if (sequence.admitted_by != columns.admitted_by[item])
    return {item, Code::kOtherAdmission, id, sequence.admitted_by, columns.admitted_by[item]};
  if (first < 0 || first > sequence.num_checked)
    return {item, Code::kNotKnown, id, sequence.num_checked, first};
  const int64_t end = first + columns.num_tokens[item];
  if (end > sequence.num_scheduled && end > sequence.num_checked)
    return {item, Code::kBeyondSlots, id, sequence.num_scheduled};
  const int64_t num_known = std::min(sequence.tokens.size, end) - first;
  if (num_known > 0 && !sequence.tokens.equals(token_store_, first, tokens, num_known))
    return {item, Code::kOtherTokens, id, first};
  for (int64_t g = sequence.last_given; g >= 0 && given[static_cast<size_t>(g)].end > first;
       g = given[static_cast<size_t>(g)].before) {
    const int64_t begin = std::max(first, given[static_cast<size_t>(g)].begin),
                  stop = std::min(end, given[static_cast<size_t>(g)].end);
    if (begin < stop && !std::equal(tokens + (begin - first), tokens + (stop - first),
                                    given[static_cast<size_t>(g)].tokens +
                                        (begin - given[static_cast<size_t>(g)].begin)))
      return {item, Code::kOtherTokens, id, first};
  }
  if (end > sequence.num_checked) {
    const int64_t begin = sequence.num_checked;
    given.push_back({begin, end, tokens + (begin - first), sequence.last_given});
    sequence.last_given = static_cast<int64_t>(given.size()) - 1;
    sequence.num_checked = end;
  }
  return {item, Code::kOk};
}

}  // namespace kvplane::blocks
