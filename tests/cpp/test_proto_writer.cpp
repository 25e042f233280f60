// AddressSanitizer sees that sizes are those of what is written. The messages go to standard
// output, each after its length in four bytes: tests/unit/blocks/test_native_programs.py reads them
// with protobuf.

#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "sessions/proto_writer.h"

namespace kvplane::blocks {
namespace {

enum class Tier : int32_t { kDevice = 1 };

void print(const std::string& message) {
  const uint32_t num_bytes = static_cast<uint32_t>(message.size());
  std::fwrite(&num_bytes, sizeof(num_bytes), 1, stdout);
  std::fwrite(message.data(), 1, message.size(), stdout);
}

// One message of every kind of field, with `value` as far as it fits.
template <typename Fields>
void write(Fields& fields, uint64_t value, const std::string& text) {
  const std::vector<int32_t> column(text.size(), static_cast<int32_t>(value));
  const auto narrow = static_cast<int32_t>(value);
  ProtoSize nested;
  nested.varint(2000, narrow);

  fields.varint(1, narrow);
  fields.varint(2, static_cast<int64_t>(value));
  fields.varint(3, value);
  fields.varint(15, value % 2 == 1);
  fields.varint(16, value % 2 == 1 ? Tier::kDevice : Tier{});
  fields.bytes(18, text);
  fields.column(19, column.data(), column.size());
  fields.message(20, nested.num_bytes());
  fields.varint(2000, narrow);
}

void write(uint64_t value, const std::string& text) {
  ProtoSize size;
  write(size, value, text);
  std::string out(size.num_bytes(), '\0');
  ProtoWriter writer(out.data());
  write(writer, value, text);
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
