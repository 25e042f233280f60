#include "sessions/sessions.h"

#include <algorithm>

#include "core/require.h"

namespace kvplane::blocks {

std::vector<uint32_t> SequenceStore::indices_of(const Session& session) const {
  // Sorted before a sequence is looked at: those of many are not in the cache.
  std::vector<std::pair<int64_t, uint32_t>> ids;
  ids.reserve(session.sequences.size());
  session.sequences.for_each([&](int64_t id, uint32_t index) { ids.emplace_back(id, index); });
  std::sort(ids.begin(), ids.end());
  std::vector<uint32_t> found;
  found.reserve(ids.size());
  for (const auto& [id, index] : ids) found.push_back(index);
  return found;
}

std::vector<const Sequence*> SequenceStore::of(const Session& session) const {
  std::vector<const Sequence*> found;
  for (const uint32_t index : indices_of(session)) found.push_back(&sequences_[index]);
  return found;
}

uint32_t SequenceStore::add(Session& session, int64_t id, int64_t admitted_by, double now_s) {
  const uint32_t index = sequences_.take();
  Sequence& sequence = sequences_[index];
  assert(!sequence.live);
  const uint32_t uid = sequence.uid;
  sequence = Sequence{};
  sequence.uid = uid;
  sequence.id = id;
  sequence.handle = session.handle;
  sequence.admitted_by = admitted_by;
  sequence.progress_s = now_s;
  sequence.live = true;
  session.sequences.insert(id, index);
  return index;
}

void SequenceStore::forget(uint32_t index) {
  Sequence& sequence = sequences_[index];
  assert(!sequence.live && sequence.table.size == 0);
  sequence.tokens.cut(tokens_, 0);
  sequence.ghosts = {};
  sequence.pending = {};
  ++sequence.uid;
  sequences_.give_back(index);
}

void Sessions::check() const {
  size_t num = free_handles_.size();
  for (const Session& session : sessions_) num += session.open + session.ended;
  Require("sessions")(num == sessions_.size(), "a handle is in two states, or in none");
}

void SequenceStore::check(const Sessions& sessions) const {
  const Require require("sequence");
  size_t num_live = 0, num_waiting = 0;
  for (const Session& session : sessions) {
    int64_t num_tokens = 0;
    for (const Sequence* sequence : of(session)) {
      const int64_t id = sequence->id, num_scheduled = sequence->num_scheduled;
      require(sequence->live && sequence->handle == session.handle, "is not live", id);
      require(0 <= sequence->num_cached && sequence->num_cached <= num_scheduled &&
                  0 <= sequence->num_written && sequence->num_written <= num_scheduled,
              "positions are out of order", id);
      num_tokens += sequence->tokens.size;
    }
    require(num_tokens == session.num_tokens, "tokens are miscounted");
    num_live += session.sequences.size();
  }
  for (uint32_t i = 0; i < sequences_.size(); ++i)
    num_waiting += !sequences_[i].live && !sequences_[i].pending.empty();
  require(num_live + num_waiting == sequences_.num_taken(), "records are lost");
}

}  // namespace kvplane::blocks
