#include "feeds/announcements.h"

#include <algorithm>

#include "core/require.h"

namespace kvplane::blocks {

namespace {

// Publications of states in a part: each may be at the end of a long prompt.
constexpr size_t kMaxOfStates = 64;

}  // namespace

// Returns whether the entry's block may be announced to data planes: they know that of its parent.
// Nothing when another call has to find out.
std::optional<bool> Announcements::may_announce(EntryId e, Findable& findable) const {
  if (index_[e].block(kDevice) == kNoBlock) return false;
  const std::optional<bool> is_findable = findable(e);
  return is_findable.value_or(false) ? parent_of(e).has_value() : is_findable;
}

std::optional<std::pair<Block, int64_t>> Announcements::parent_of(EntryId e) const {
  const Announcements& named = whole_ ? *whole_ : *this;
  const EntryId parent = whole_ ? in_whole(e) : index_[e].parent;
  if (!whole_ && index_.is_root(parent)) return std::pair(kNoBlock, int64_t{0});
  if (parent == kNoEntry) return std::nullopt;
  const Block b = named.index_[parent].block(kDevice);
  if (b == kNoBlock) return std::nullopt;
  return std::pair(b, named.device_.generation(b));
}

// The entry of the same prefix in the other group; of an entry that can be found.
EntryId Announcements::in_whole(EntryId e) const {
  const PrefixIndex& whole = whole_->index_;
  const bool knows_last = index_.alive(last_.first, last_.second) &&
                          whole.alive(last_in_whole_.first, last_in_whole_.second);
  std::vector<EntryId> way;
  EntryId at = e;
  for (; !index_.is_root(at) && !(knows_last && at == last_.first); at = index_[at].parent)
    way.push_back(at);
  EntryId found = index_.is_root(at) ? whole.find_root(index_.root_name(at)) : last_in_whole_.first;
  for (; found != kNoEntry && !way.empty(); way.pop_back())
    found = whole.find(found, index_.tokens(way.back()));
  if (found != kNoEntry) {
    last_ = {e, index_[e].uid};
    last_in_whole_ = {found, whole[found].uid};
  }
  return found;
}

bool Announcements::add(EntryId root, EntryId e) {
  EntryId c = index_[e].child;
  while (c != kNoEntry && index_[c].block(kDevice) == kNoBlock) c = index_[c].next;
  // Written a field at a time: put together first, it would be read before it has been stored.
  Announcement& item = queue_.emplace_back();
  item.root = root;
  item.entry = e;
  item.uid = index_[e].uid;
  item.below = c != kNoEntry && !whole_;
  return c != kNoEntry;
}

std::vector<Announcement> Announcements::take(size_t max_entries) {
  std::vector<Announcement> taken;
  Findable findable(index_);
  if (whole_) max_entries = std::min(max_entries, kMaxOfStates);
  for (size_t num = 0; num < max_entries && !empty(); ++num) {
    if (again_.empty()) again_.push_back(queue_[num_taken_++]);
    const Announcement item = again_.back();
    const bool is_alive = index_.alive(item.entry, item.uid);
    if (is_alive && whole_) index_.add_key(item.entry);
    const std::optional<bool> may = is_alive ? may_announce(item.entry, findable) : false;
    if (!may) break;
    again_.pop_back();
    if (*may) taken.push_back(item);
    if (*may && of_states_)
      of_states_->index_.with_hash(index_.hash(item.entry), [&](EntryId e) {
        of_states_->add(of_states_->index_.root_of(e), e);
      });
    if (item.below && is_alive)
      for (EntryId c = index_[item.entry].child; c != kNoEntry; c = index_[c].next)
        if (index_[c].block(kDevice) != kNoBlock)
          again_.push_back({item.root, c, index_[c].uid, true});
    if (again_.empty() && num_taken_ == queue_.size()) {
      queue_.clear();
      num_taken_ = 0;
    }
  }
  return taken;
}

void Announcements::add_promoted() {
  for (const Block b : device_.take_promoted()) {
    const EntryId e = index_.entry_of(kDevice, b);
    if (e != kNoEntry) add(index_.root_of(e), e);
  }
}

std::vector<Announcement> Announcements::all_in(Block begin, Block& end) const {
  std::vector<Announcement> found;
  Findable findable(index_);
  if (whole_) end = std::min<Block>(end, begin + kMaxOfStates);
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

void Announcements::check() const {
  const Require require("announcements");
  require(queue_.empty() ? !num_taken_ && again_.empty()
                         : num_taken_ < queue_.size() || !again_.empty(),
          "what was taken is kept");
  const auto check_item = [&](const Announcement& item) {
    require(item.entry < index_.end() && item.uid <= index_[item.entry].uid, "one is of no entry");
    if (!index_.alive(item.entry, item.uid)) return;
    const EntryId root = index_.root_of(item.entry);
    require(root == item.root || !index_.is_named(root), "one is of another root");
  };
  std::for_each(queue_.begin() + static_cast<int64_t>(num_taken_), queue_.end(), check_item);
  std::for_each(again_.begin(), again_.end(), check_item);
}

}  // namespace kvplane::blocks
