#include "core/sessions.h"

#include <algorithm>
#include <stdexcept>
#include <string>

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
  uint32_t index;
  if (free_.empty()) {
    index = sequences_.add();
  } else {
    index = free_.back();
    free_.pop_back();
  }
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
  free_.push_back(index);
}

void SequenceStore::check(const Session& session, int64_t block_size) const {
  int64_t num_tokens = 0;
  for (const Sequence* sequence : of(session)) {
    const std::string name = "sequence " + std::to_string(sequence->id);
    auto require = [&](bool ok, const char* what) {
      if (!ok) throw std::logic_error(name + ": " + what);
    };
    require(sequence->live && sequence->handle == session.handle, "is not live");
    const int64_t num_slots = sequence->table.size * block_size;
    require(0 <= sequence->num_cached && sequence->num_cached <= sequence->num_scheduled &&
                0 <= sequence->num_written && sequence->num_written <= sequence->num_scheduled &&
                sequence->num_scheduled <= num_slots,
            "positions are out of order");
    require(
        sequence->num_published * block_size <= sequence->num_written || !sequence->pending.empty(),
        "more is published than is written");
    num_tokens += sequence->tokens.size;
  }
  if (num_tokens != session.num_tokens) throw std::logic_error("tokens are miscounted");
}

}  // namespace kvplane::blocks
