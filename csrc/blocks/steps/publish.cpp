#include "steps/publish.h"

#include <algorithm>
#include <cassert>

#include "core/require.h"

namespace kvplane::blocks {

namespace {

constexpr int64_t kAhead = 8;  // how far blocks are fetched from memory

}  // namespace

bool Publisher::receipted(SessionHandle handle, int64_t plan, int64_t max_blocks) {
  Session& session = sessions_[handle];
  if (!plans_.begin_receipted(session, plan)) return false;
  auto& [begun, plans, next_plan, next_touched] = session.receipting;
  // A sequence counts as a block, and so does each block that it publishes, releases or copied.
  int64_t num = 0;
  for (; next_plan < plans.size(); ++next_plan, next_touched = 0)
    for (const auto& touched = plans[next_plan].touched; next_touched < touched.size(); ++num) {
      if (num >= max_blocks) return true;
      const auto& [index, uid] = touched[next_touched++];
      const int64_t published_before = shared_.counters.num_publications;
      if (sequences_[index].uid == uid) advance(session, index, session.done);
      num += shared_.counters.num_publications - published_before;
    }
  return plans_.end_receipted(session, max_blocks - num);
}

// Publishes blocks of the sequence that plans up to `done`, which have run, wrote.
void Publisher::advance(Session& session, uint32_t index, int64_t done) {
  Sequence& sequence = sequences_[index];
  size_t num = 0;
  for (; num < sequence.pending.size() && sequence.pending[num].first <= done; ++num)
    sequence.num_written = std::max(sequence.num_written, sequence.pending[num].second);
  if (num) {
    sequence.pending.erase(sequence.pending.begin(),
                           sequence.pending.begin() + static_cast<int64_t>(num));
    sequence.progress_s = shared_.now_s;
  }
  if (sequence.num_written / block_size_ > sequence.num_published) publish(session, index);
  if (!sequence.live && sequence.pending.empty()) sequences_.forget(index);
}

void Publisher::publish(Session& session, uint32_t index) {
  Sequence& sequence = sequences_[index];
  int64_t complete = std::min(std::min(sequence.num_written, sequence.tokens.size) / block_size_,
                              sequence.private_from);
  if (shared_.config.holds_states)
    complete = sequence.live ? tables_.num_to(sequence, complete * block_size_)
                             : std::min(complete, sequence.first_ghost +
                                                      static_cast<int64_t>(sequence.ghosts.size()));
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
      const bool is_lost =
          b == kNoBlock ? !shared_.config.holds_states : device_.generation(b) != generation;
      if (is_lost) complete = i;
    }
    while (complete > sequence.num_published &&
           sequence.ghosts[static_cast<size_t>(complete - 1 - first)].first == kNoBlock)
      --complete;
    if (complete <= sequence.num_published) return;
  }
  if (!find_chain(session, sequence)) return;
  assert(complete * block_size_ <= std::min(sequence.num_written, sequence.tokens.size));
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
      if (const Block b = entered_[k + kAhead]; b != kNoBlock) device_.prefetch(b);
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
bool Publisher::find_chain(Session& session, Sequence& sequence) {
  if (index_.alive(sequence.chain, sequence.chain_uid)) return true;
  const int64_t num_published = sequence.num_published;
  restart(session, sequence);
  const int64_t num_gone = sequence.live ? sequence.num_trimmed : num_published;
  for (; sequence.num_published < num_gone; ++sequence.num_published) {
    const int32_t* const tokens =
        &sequence.tokens.at(token_store_, sequence.num_published * block_size_);
    // The entries before a checkpoint are made for it alone.
    const EntryId e = shared_.config.holds_states ? index_.find_or_add(sequence.chain, tokens)
                                                  : index_.find(sequence.chain, tokens);
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
EntryId Publisher::entry_for(const Sequence& sequence, uint32_t index) {
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
void Publisher::enter(Session& session, Sequence& sequence, uint32_t index, Block b) {
  assert(index_.alive(sequence.chain, sequence.chain_uid) && sequence.tier == kDevice);
  const EntryId e = entry_for(sequence, index);
  Entry& entry = index_[e];
  sequence.chain = e;
  sequence.chain_uid = entry.uid;
  if (b != kNoBlock && index_.entry_of(kDevice, b) == kNoEntry && index_.set_block(e, kDevice, b)) {
    entry.published_s = static_cast<float>(shared_.now_s);
    entry.used_s = entry.published_s;
    ++shared_.counters.num_publications;
    const bool has_below = announcements_.add(session.root, e);
    if (!has_below && device_.state(b) == State::kHeld) {
      fresh_.push_back(b);
    } else {
      publish_fresh();
      device_.published(b);
    }
  } else {
    publish_fresh();
  }
  index_.clear_producer(e, index, sequence.uid);
}

// Publishes the blocks that were entered last, each after the one before it.
void Publisher::publish_fresh() {
  if (!fresh_.empty()) device_.published(fresh_);
  fresh_.clear();
}

void Publisher::clear_producers(Sequence& sequence, uint32_t index, int64_t from) {
  auto& produced = sequence.produced;
  while (!produced.empty() &&
         sequence.first_produced + static_cast<int64_t>(produced.size()) > from) {
    index_.clear_producer(produced.back(), index, sequence.uid);  // tails first: each prunes itself
    produced.pop_back();
  }
}

std::vector<Failure> Publisher::deferred_tokens(SessionHandle handle,
                                                const DeferredColumns& columns) {
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

Failure Publisher::check_deferred(Session& session, const DeferredColumns& columns, int64_t item,
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

void Publisher::check(const Session& session) const {
  const Require require("published sequence");
  for (const Sequence* sequence : sequences_.of(session)) {
    const int64_t id = sequence->id;
    require(sequence->num_published * block_size_ <= sequence->num_written ||
                !sequence->pending.empty(),
            "more is published than is written", id);
    const bool has_all = session.open && !session.receipting.begun;  // receipts that came
    std::pair<int64_t, int64_t> last{has_all ? session.done + 1 : 0, 0};
    for (const auto& [plan, end] : sequence->pending) {
      require(plan >= last.first && end >= last.second && end <= sequence->num_scheduled,
              "plans that write it are out of order", id);
      last = {plan, end};
    }
    if (sequence->tier != kDevice) continue;
    for (int64_t i = sequence->num_trimmed; i < sequence->table.size; ++i) {
      // A published block holds the tokens of the sequence, as far as it has them.
      const Block b = sequence->table.at(table_store_, i);
      const EntryId e = b == kNoBlock ? kNoEntry : index_.entry_of(kDevice, b);
      if (e == kNoEntry) continue;
      const int64_t begin = i * block_size_;
      const int64_t end =
          std::min({begin + block_size_, sequence->tokens.size, sequence->num_scheduled});
      require(end <= begin ||
                  sequence->tokens.equals(token_store_, begin, index_.tokens(e), end - begin),
              "a published block holds other tokens", id);
    }
  }
}

}  // namespace kvplane::blocks
