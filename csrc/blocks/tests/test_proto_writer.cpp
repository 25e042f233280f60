// Sizes are those of what is written. The messages go to standard output, each after its length in
// four bytes: tests/unit/blocks/test_native_programs.py reads them with protobuf.

#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "steps/proto_writer.h"
#include "tests/check.h"

namespace kvplane::blocks {
namespace {

enum class Tier : int32_t { kDevice = 1 };

void print(const std::string& message) {
  const uint32_t num_bytes = static_cast<uint32_t>(message.size());
  std::fwrite(&num_bytes, sizeof(num_bytes), 1, stdout);
  std::fwrite(message.data(), 1, message.size(), stdout);
}

// One message of every kind of field, with `value` as far as it fits.
void write(uint64_t value, const std::string& text) {
  const std::vector<int32_t> column(text.size(), static_cast<int32_t>(value));
  const auto narrow = static_cast<int32_t>(value);
  const auto wide = static_cast<int64_t>(value);
  const size_t nested_size = ProtoWriter::varint_size(2000, narrow);

  std::string out;
  ProtoWriter writer(out);
  writer.varint(1, narrow);
  writer.varint(2, wide);
  writer.varint(3, value);
  writer.varint(15, value % 2 == 1);
  writer.varint(16, value % 2 == 1 ? Tier::kDevice : Tier{});
  writer.fixed64(17, value);
  writer.bytes(18, text);
  writer.column(19, column.data(), column.size());
  writer.message(20, nested_size);
  writer.varint(2000, narrow);

  const size_t size =
      ProtoWriter::varint_size(1, narrow) + ProtoWriter::varint_size(2, wide) +
      ProtoWriter::varint_size(3, value) + ProtoWriter::varint_size(15, value % 2 == 1) +
      ProtoWriter::varint_size(16, value % 2 == 1 ? Tier::kDevice : Tier{}) +
      ProtoWriter::fixed64_size(17, value) + ProtoWriter::bytes_size(18, text.size()) +
      ProtoWriter::bytes_size(19, 4 * column.size()) + ProtoWriter::message_size(20, nested_size);
  CHECK(out.size() == size);
  print(out);
}

}  // namespace
}  // namespace kvplane::blocks

int main() {
  using kvplane::blocks::write;
  write(0, "");
  for (int bit = 0; bit < 64; ++bit) {
    write(uint64_t{1} << bit, std::string(bit, 'a'));
    write((uint64_t{1} << bit) - 1, std::string(5 * bit, '\0'));
  }
  write(std::numeric_limits<uint64_t>::max(), std::string(70000, 'z'));
}
