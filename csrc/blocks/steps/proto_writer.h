// Writes messages in protobuf's wire format (protobuf.dev/programming-guides/encoding).
//
// As proto3 asks, a field with its default value is left out; the header of a nested message is
// always written, because an empty message is not an absent one. A nested message's length must be
// known before it: the functions *_size give the bytes that their counterparts write.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace kvplane::blocks {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "columns are written as they lie");

class ProtoWriter {
 public:
  // Appends to `out`, which must outlive the writer.
  explicit ProtoWriter(std::string& out) : out_(out) {}

  // Any of int32, int64, uint32, uint64, bool and enum. Negative values take 10 bytes.
  template <typename T>
  void varint(uint32_t field, T value) {
    static_assert(std::is_integral_v<T> || std::is_enum_v<T>);
    if (value == T{}) return;
    tag(field, kVarint);
    raw_varint(static_cast<uint64_t>(value));
  }

  void fixed64(uint32_t field, uint64_t value) {
    if (value == 0) return;
    tag(field, kFixed64);
    out_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  void bytes(uint32_t field, std::string_view value) {
    if (value.empty()) return;
    message(field, value.size());
    out_.append(value);
  }

  // The integers as they lie, in a field of type bytes.
  template <typename T>
  void column(uint32_t field, const T* values, size_t num_values) {
    static_assert(std::is_integral_v<T>);
    bytes(field, {reinterpret_cast<const char*>(values), num_values * sizeof(T)});
  }

  // The header of a nested message whose fields, num_bytes of them in all, are written next.
  void message(uint32_t field, size_t num_bytes) {
    tag(field, kLengthDelimited);
    raw_varint(num_bytes);
  }

  template <typename T>
  static size_t varint_size(uint32_t field, T value) {
    return value == T{} ? 0 : tag_size(field) + raw_varint_size(static_cast<uint64_t>(value));
  }

  static size_t fixed64_size(uint32_t field, uint64_t value) {
    return value == 0 ? 0 : tag_size(field) + sizeof(value);
  }

  static size_t bytes_size(uint32_t field, size_t num_bytes) {
    return num_bytes == 0 ? 0 : message_size(field, num_bytes);
  }

  // Of the header and the fields.
  static size_t message_size(uint32_t field, size_t num_bytes) {
    return tag_size(field) + raw_varint_size(num_bytes) + num_bytes;
  }

 private:
  enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2 };

  static size_t tag_size(uint32_t field) { return raw_varint_size(uint64_t{field} << 3); }

  static size_t raw_varint_size(uint64_t value) {
    size_t num_bytes = 1;
    for (; value >= 0x80; value >>= 7) ++num_bytes;
    return num_bytes;
  }

  void tag(uint32_t field, WireType type) { raw_varint(uint64_t{field} << 3 | type); }

  void raw_varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) out_.push_back(static_cast<char>(value | 0x80));
    out_.push_back(static_cast<char>(value));
  }

  std::string& out_;
};

}  // namespace kvplane::blocks
