// The row operations for the instructions that every machine of the architecture has.

#define KVPLANE_VECTOR_BYTES 16
#include "row_ops_vector.h"

namespace kvplane {
namespace {

void stream(char* destination, const char* source, int64_t num_bytes) {
  std::memcpy(destination, source, static_cast<size_t>(num_bytes));
}

}  // namespace

RowOps row_ops_baseline();

RowOps row_ops_baseline() {
  return {"baseline", load, store, load_tile, nullptr, attend, nullptr, nullptr,
          nullptr,    0,    merge, finish,    nullptr, 0,      stream};
}

}  // namespace kvplane
