// Where the sessions and the sequences of a layer group are kept.
#pragma once

#include <cassert>
#include <deque>
#include <vector>

#include "containers/slab.h"
#include "sessions/session.h"

namespace kvplane::blocks {

// Owns the records of sessions and their handles; the other classes change the fields that
// session.h names as theirs. Invariant: a handle is open, ended and not fenced, or free. The layer
// group alone opens and closes sessions.
class Sessions {
 public:
  explicit Sessions(uint64_t seed) : seed_(seed) {}

  Session& operator[](SessionHandle handle) {
    assert(handle < sessions_.size());
    return sessions_[handle];
  }
  const Session& operator[](SessionHandle handle) const {
    return const_cast<Sessions&>(*this)[handle];
  }
  auto begin() { return sessions_.begin(); }
  auto end() { return sessions_.end(); }
  auto begin() const { return sessions_.begin(); }
  auto end() const { return sessions_.end(); }
  bool is_open(SessionHandle handle) const {
    return handle < sessions_.size() && sessions_[handle].open;
  }
  bool is_unfenced(SessionHandle handle) const {
    return handle < sessions_.size() && sessions_[handle].ended;
  }

  Session& open(uint32_t owner) {
    if (free_handles_.empty()) {
      free_handles_.push_back(static_cast<SessionHandle>(sessions_.size()));
      sessions_.emplace_back();
    }
    const SessionHandle handle = free_handles_.back();
    free_handles_.pop_back();
    Session& session = sessions_[handle] = Session{};
    session.handle = handle;
    session.open = true;
    session.sequences = IdMap(seed_);
    session.owner = owner;
    return session;
  }
  // The session has ended and is fenced.
  void close(Session& session) {
    assert(session.ended && session.releases.empty());
    session.ended = false;
    free_handles_.push_back(session.handle);
  }

  // Throws std::logic_error saying what is wrong.
  void check() const;

 private:
  uint64_t seed_;
  std::deque<Session> sessions_;
  std::vector<SessionHandle> free_handles_;
};

// Owns the records of sequences and the chunks of their tokens. Invariant: a record is live, freed
// with receipts missing, or free; its uid counts the sequences that were kept in it, so that who
// names a sequence by index and uid finds no later one.
class SequenceStore {
 public:
  Sequence& operator[](uint32_t index) { return sequences_[index]; }
  const Sequence& operator[](uint32_t index) const { return sequences_[index]; }
  uint32_t size() const { return sequences_.size(); }
  TokenStore& tokens() { return tokens_; }
  const TokenStore& tokens() const { return tokens_; }

  const Sequence* find(const Session& session, int64_t id) const {
    const uint32_t* index = session.sequences.find(id);
    return index ? &sequences_[*index] : nullptr;
  }
  // Of the session, ids ascending.
  std::vector<uint32_t> indices_of(const Session& session) const;
  std::vector<const Sequence*> of(const Session& session) const;

  uint32_t add(Session& session, int64_t id, int64_t admitted_by, double now_s);
  // The sequence is freed, and no receipt that is still to come concerns it.
  void forget(uint32_t index);

  // Throws std::logic_error saying what is wrong with the sequences of these sessions, which are
  // all, besides their tables.
  void check(const Sessions& sessions) const;

 private:
  Slab<Sequence> sequences_;
  TokenStore tokens_;
};

}  // namespace kvplane::blocks
