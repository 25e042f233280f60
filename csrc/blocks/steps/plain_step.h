// Requests for a step of the most common shapes, read in place: receipts, and at most one
// operation, which is an append without lookahead or the admission of one sequence. So neither a
// decode step nor a prompt needs a message to be built.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "core/pool.h"

namespace kvplane::blocks {

// A signed receipt, which is not checked yet.
struct SignedReceipt {
  int64_t plan_number = 0;
  int64_t shard_index = 0;
  std::string_view payload;
  std::string_view signature;
};

// A copy, because the request aligns nothing.
template <typename T>
struct Column {
  std::unique_ptr<T[]> values;
  int64_t size = 0;

  Span<T> span() const { return {values.get(), size}; }
};

enum class PlainKind : uint8_t { kNone, kAdmit, kAppend };

struct PlainStep {
  uint64_t incarnation = 0;
  int64_t session_id = 0;
  int64_t number = 0;
  std::string_view operation;  // encoded; empty: there is none
  PlainKind kind = PlainKind::kNone;
  std::vector<SignedReceipt> receipts;
  Column<int32_t> token_ids;
  // Of an admission.
  int64_t sequence_id = 0;
  int64_t max_total_tokens = 0;
  // Of an append: columns that fit together.
  Column<int64_t> sequence_ids;
  Column<int64_t> first_positions;
  Column<int32_t> num_slots;
  Column<int32_t> num_tokens;

  Admission admission(int64_t headroom) const;
  AppendColumns columns() const;
  // No append takes more blocks than this.
  int64_t most_growth(int64_t block_size) const;
};

// Most receipts of a plain step.
constexpr size_t kMaxPlainReceipts = 8;

// Reads an encoded StepRequest. None if it has another shape, has a field that plain steps lack, or
// is not encoded as protobuf's own writers do: fields in order, none with its default value.
std::optional<PlainStep> read_plain_step(std::string_view data);

}  // namespace kvplane::blocks
