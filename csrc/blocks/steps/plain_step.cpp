#include "steps/plain_step.h"

#include <algorithm>
#include <cstring>

namespace kvplane::blocks {
namespace {

constexpr std::string_view kReceiptType = "kvplane.v1.Receipt";

// The fields of a message, in ascending order; `failed` once there is something else.
class FieldReader {
 public:
  explicit FieldReader(std::string_view data) : data_(data) {}

  bool failed() const { return failed_; }
  bool at_end() const { return failed_ || at_ == data_.size(); }

  // Whether the next field has this number and wire type; then it is begun.
  bool begins(uint32_t field, uint32_t wire_type) {
    const uint8_t tag = static_cast<uint8_t>(field << 3 | wire_type);  // of fields up to 15
    if (at_end() || static_cast<uint8_t>(data_[at_]) != tag) return false;
    ++at_;
    return true;
  }

  // A positive number, in as few bytes as it needs.
  int64_t positive() {
    uint64_t value = 0;
    for (int shift = 0; shift < 63 && at_ < data_.size(); shift += 7) {
      const auto byte = static_cast<uint8_t>(data_[at_++]);
      value |= uint64_t{byte & 0x7Fu} << shift;
      if (byte & 0x80) continue;
      if (!byte) break;  // 0, or longer than it need be
      return static_cast<int64_t>(value);
    }
    failed_ = true;
    return 0;
  }

  uint64_t fixed64() {
    uint64_t value = 0;
    if (data_.size() - at_ < sizeof(value)) {
      failed_ = true;
      return 0;
    }
    std::memcpy(&value, data_.data() + at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }

  // Bytes that are not empty.
  std::string_view bytes() {
    const auto size = static_cast<uint64_t>(positive());
    if (failed_ || size > data_.size() - at_) {
      failed_ = true;
      return {};
    }
    const std::string_view value = data_.substr(at_, size);
    at_ += size;
    return value;
  }

  // The field if it is next; else empty.
  std::string_view bytes_of(uint32_t field) {
    return begins(field, kDelimited) ? bytes() : std::string_view();
  }

  static constexpr uint32_t kVarint = 0, kFixed64 = 1, kDelimited = 2;

 private:
  std::string_view data_;
  size_t at_ = 0;
  bool failed_ = false;
};

// Whether all of the message was read.
bool is_whole(const FieldReader& fields) { return !fields.failed() && fields.at_end(); }

bool read_session(std::string_view data, PlainStep& step) {
  FieldReader fields(data);
  if (!fields.begins(1, FieldReader::kFixed64)) return false;
  step.incarnation = fields.fixed64();
  if (!fields.begins(2, FieldReader::kVarint)) return false;
  step.session_id = fields.positive();
  return is_whole(fields) && step.incarnation;
}

// The column if it has `num` elements, or any number of them where that is negative.
template <typename T>
bool read_column(std::string_view bytes, int64_t num, Column<T>& column) {
  column.size = static_cast<int64_t>(bytes.size() / sizeof(T));
  if (bytes.size() % sizeof(T) || (num >= 0 && column.size != num)) return false;
  column.values.reset(new T[bytes.size() / sizeof(T)]);
  if (!bytes.empty()) std::memcpy(column.values.get(), bytes.data(), bytes.size());
  return true;
}

bool read_admission(std::string_view data, PlainStep& step) {
  constexpr int64_t kMostTokens = int64_t{1} << 40;
  FieldReader fields(data);
  if (!fields.begins(1, FieldReader::kVarint)) return false;
  step.sequence_id = fields.positive();
  if (!read_column(fields.bytes_of(2), -1, step.token_ids)) return false;
  if (fields.begins(4, FieldReader::kVarint)) step.max_total_tokens = fields.positive();
  return is_whole(fields) && step.token_ids.size && step.max_total_tokens <= kMostTokens;
}

bool read_append(std::string_view data, PlainStep& step) {
  FieldReader fields(data);
  if (!read_column(fields.bytes_of(1), -1, step.sequence_ids)) return false;
  const int64_t num = step.sequence_ids.size;
  if (!num || !read_column(fields.bytes_of(2), num, step.first_positions) ||
      !read_column(fields.bytes_of(3), num, step.num_slots) ||
      !read_column(fields.bytes_of(4), num, step.num_tokens) ||
      !read_column(fields.bytes_of(5), -1, step.token_ids) || !is_whole(fields))
    return false;
  int64_t num_tokens = 0;
  for (int64_t i = 0; i < num; ++i) {
    const int32_t each = step.num_tokens.values[static_cast<size_t>(i)];
    if (each < 0) return false;
    num_tokens += each;
  }
  return num_tokens == step.token_ids.size;
}

bool read_operation(std::string_view data, PlainStep& step) {
  FieldReader fields(data);
  const std::string_view admit = fields.bytes_of(1), append = fields.bytes_of(2);
  if (!is_whole(fields) || admit.empty() == append.empty()) return false;
  step.kind = append.empty() ? PlainKind::kAdmit : PlainKind::kAppend;
  return append.empty() ? read_admission(admit, step) : read_append(append, step);
}

// Reads the plan that a receipt names. The caller compares all of it with the expected receipt, so
// nothing else is checked here.
bool read_receipt(std::string_view data, SignedReceipt& receipt) {
  FieldReader fields(data);
  if (fields.begins(1, FieldReader::kVarint)) fields.positive();
  fields.bytes_of(2);
  fields.bytes_of(3);
  if (fields.begins(4, FieldReader::kVarint)) receipt.shard_index = fields.positive();
  if (fields.begins(5, FieldReader::kFixed64)) fields.fixed64();
  if (fields.begins(6, FieldReader::kVarint)) receipt.plan_number = fields.positive();
  return !fields.failed();
}

bool read_signed(std::string_view data, SignedReceipt& receipt) {
  FieldReader fields(data);
  const bool is_receipt = fields.bytes_of(1) == kReceiptType;
  receipt.payload = fields.bytes_of(2);
  receipt.signature = fields.bytes_of(3);
  return is_receipt && is_whole(fields) && read_receipt(receipt.payload, receipt);
}

}  // namespace

Admission PlainStep::admission(int64_t headroom) const {
  Admission admission;
  admission.sequence_id = sequence_id;
  admission.tokens = token_ids.span();
  admission.max_total_tokens = max_total_tokens;
  admission.headroom = headroom;
  return admission;
}

AppendColumns PlainStep::columns() const {
  return {sequence_ids.span(), first_positions.span(), num_slots.span(),
          num_tokens.span(),   token_ids.span(),       Span<int32_t>{}};
}

int64_t PlainStep::most_growth(int64_t block_size) const {
  int64_t num = 0;
  for (int64_t i = 0; i < num_slots.size; ++i) num += std::max(num_slots.span()[i], 0);
  return 2 * sequence_ids.size + num / block_size;
}

std::optional<PlainStep> read_plain_step(std::string_view data) {
  PlainStep step;
  FieldReader fields(data);
  if (!read_session(fields.bytes_of(1), step)) return std::nullopt;
  if (!fields.begins(2, FieldReader::kVarint)) return std::nullopt;
  step.number = fields.positive();
  step.operation = fields.bytes_of(3);
  if (!step.operation.empty() && !read_operation(step.operation, step)) return std::nullopt;
  while (fields.begins(4, FieldReader::kDelimited)) {
    SignedReceipt receipt;
    if (step.receipts.size() == kMaxPlainReceipts || !read_signed(fields.bytes(), receipt))
      return std::nullopt;
    step.receipts.push_back(receipt);
  }
  if (!is_whole(fields)) return std::nullopt;
  return std::optional<PlainStep>(std::move(step));
}

}  // namespace kvplane::blocks
