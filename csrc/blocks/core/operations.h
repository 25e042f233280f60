// Arguments and results of operations.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "core/types.h"

namespace kvplane::blocks {

// Why an item was refused; see kvplane_blocks/_native.pyi for what a, b and c say.
enum class Code : int32_t {
  kOk = 1,
  kLater = 2,
  kNever = 3,
  kLaterHeadroom = 4,
  kLaterQuota = 5,
  kNeverQuota = 6,
  kNotFound = 10,
  kExists = 11,
  kBadId = 12,
  kBusy = 13,
  kSwapped = 14,
  kPosition = 15,
  kNegative = 16,
  kTooManySequences = 17,
  kNotKnown = 18,
  kOtherAdmission = 19,
  kTooLong = 20,
  kTrimmed = 21,
  kOtherTokens = 22,
  kBeyondSlots = 23,
  kTooManyEntries = 24,
  kTooManyPinned = 25,
  kCheckpoint = 26,
};

// The most positions of a sequence: columns of positions have 32 bits.
constexpr int64_t kMaxPositions = INT32_MAX;

inline bool is_later(Code code) {
  return code == Code::kLater || code == Code::kLaterHeadroom || code == Code::kLaterQuota;
}

struct Failure {
  int64_t item = 0;
  Code code = Code::kLater;
  int64_t a = 0, b = 0, c = 0;
};

// What became of a family of sequences; see kvplane_blocks/_native.pyi.
enum class FamilyChange : int32_t {
  kStarted = 1,
  kLeftDevice = 2,
  kEnded = 3,
  kEndedOnHost = 4,
};

struct FamilyEvent {
  FamilyChange change;
  int64_t family;
};

// Columns that cannot be read.
struct ColumnError : std::exception {
  ColumnError(std::string column, int64_t index, std::string what)
      : column(std::move(column)), index(index), text(std::move(what)) {}
  const char* what() const noexcept override { return text.c_str(); }
  std::string column;
  int64_t index;
  std::string text;
};

inline bool any_negative(const int32_t* values, int64_t num) {
  int32_t all = 0;
  for (int64_t i = 0; i < num; ++i) all |= values[i];
  return all < 0;
}

// The result of an operation on several sequences: a value for each item, and the items refused.
struct ItemResults {
  std::vector<int32_t> values;
  std::vector<Failure> failures;
};

struct Admission {
  int64_t sequence_id = 0;
  Span<int32_t> tokens;
  Span<int64_t> fork_ids;
  int64_t num_compute = -1;  // of the uncached tokens; -1: all
  int64_t max_total_tokens = 0;
  bool skip_lookup = false;
  int64_t headroom = 0;
  int64_t checkpoint = 0;  // after how many tokens one is kept, if they are computed now; 0: none
};

struct Admitted {
  int64_t num_cached_tokens = 0;
  int64_t num_blocks = 0;
  int64_t num_scheduled_tokens = 0;
};

// A prompt for each pin.
struct PinColumns {
  Span<int64_t> pin_ids;
  Span<int32_t> num_tokens;
  Span<int32_t> token_ids;
  int64_t headroom = 0;
  double expires_at_s = 0;
};

// For each pin, how many leading blocks it holds; and these blocks, pin after pin and in each of
// them group after group.
struct Pinned {
  ItemResults items;
  std::vector<uint8_t> groups;
  std::vector<uint8_t> tiers;
  std::vector<int32_t> indices;  // -1 where no block is needed
  std::vector<int64_t> generations;
};

struct AppendColumns {
  Span<int64_t> sequence_ids;
  Span<int32_t> first_positions;
  Span<int32_t> num_slots;
  Span<int32_t> num_tokens;
  Span<int32_t> token_ids;
  Span<int32_t> num_lookahead;  // empty: none
  Span<int32_t> checkpoints;    // positions, as of an admission; empty: none
};

struct DeferredColumns {
  Span<int64_t> sequence_ids;
  Span<int64_t> admitted_by;
  Span<int32_t> first_positions;
  Span<int32_t> num_tokens;
  Span<int32_t> token_ids;
};

struct Retained {
  int64_t num_blocks = 0;
  int64_t num_new = 0;  // that did not count for the owner
};

struct Forgotten {
  int64_t num_blocks = 0;
  int64_t num_in_use = 0;
  bool is_large = false;  // there are more blocks
};

}  // namespace kvplane::blocks
