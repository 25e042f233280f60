// Writes messages in protobuf's wire format (protobuf.dev/programming-guides/encoding).
//
// As proto3 asks, a field with its default value is left out; the header of a nested message is
// always written, because an empty message is not an absent one. A nested message's length must be
// known before it: its writer runs first with a ProtoSize, which counts the bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

namespace kvplane::blocks {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "columns are written as they lie");

// The fields of a message; `Sink::put(data, num_bytes)` gets what is written.
template <typename Sink>
class ProtoFields : public Sink {
 public:
  using Sink::Sink;

  // Any of int32, int64, uint32, uint64, bool and enum. Negative values take 10 bytes.
  template <typename T>
  void varint(uint32_t field, T value) {
    static_assert(std::is_integral_v<T> || std::is_enum_v<T>);
    if (value == T{}) return;
    tag(field, kVarint);
    raw_varint(static_cast<uint64_t>(value));
  }

  void bytes(uint32_t field, std::string_view value) {
    if (value.empty()) return;
    message(field, value.size());
    Sink::put(value.data(), value.size());
  }

  // The integers as they lie, in a field of type bytes.
  template <typename T>
  void column(uint32_t field, const T* values, size_t num_values) {
    static_assert(std::is_integral_v<T>);
    bytes(field, {reinterpret_cast<const char*>(values), num_values * sizeof(T)});
  }

  // Fields that are encoded already.
  void encoded(std::string_view fields) { Sink::put(fields.data(), fields.size()); }

  // The header of a nested message whose fields, num_bytes of them in all, are written next.
  void message(uint32_t field, size_t num_bytes) {
    tag(field, kLengthDelimited);
    raw_varint(num_bytes);
  }

 private:
  enum WireType : uint32_t { kVarint = 0, kLengthDelimited = 2 };

  void tag(uint32_t field, WireType type) { raw_varint(uint64_t{field} << 3 | type); }

  void raw_varint(uint64_t value) {
    uint8_t bytes[10];
    size_t num = 0;
    for (; value >= 0x80; value >>= 7) bytes[num++] = static_cast<uint8_t>(value | 0x80);
    bytes[num++] = static_cast<uint8_t>(value);
    Sink::put(bytes, num);
  }
};

class CountingSink {
 public:
  void put(const void*, size_t num_bytes) { num_bytes_ += num_bytes; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  size_t num_bytes_ = 0;
};

// There must be room at `out` for all that is written.
class MemorySink {
 public:
  explicit MemorySink(char* out) : out_(out) {}
  void put(const void* data, size_t num_bytes) {
    std::memcpy(out_, data, num_bytes);
    out_ += num_bytes;
  }

 private:
  char* out_;
};

using ProtoSize = ProtoFields<CountingSink>;
using ProtoWriter = ProtoFields<MemorySink>;

}  // namespace kvplane::blocks
