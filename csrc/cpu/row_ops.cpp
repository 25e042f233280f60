// Picks the instruction set, once.

#include "row_ops.h"

#include <cstdlib>
#include <cstring>

#include "kvplane/isa.h"

namespace kvplane {

RowOps row_ops_baseline();
#ifdef KVPLANE_X86_64
RowOps row_ops_avx2();
RowOps row_ops_avx512();
#endif

namespace {

RowOps pick() {
  const char* wanted = std::getenv("KVPLANE_KERNELS_ISA");
  const auto allowed = [wanted](const char* isa) {
    return wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, isa) == 0;
  };
#ifdef KVPLANE_X86_64
  if (allowed("avx512") && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return row_ops_avx512();
  }
  if (allowed("avx2") && __builtin_cpu_supports("avx2")) return row_ops_avx2();
#else
  (void)allowed;
#endif
  return row_ops_baseline();
}

}  // namespace

const RowOps& row_ops() {
  static const RowOps ops = pick();
  return ops;
}

const char* cpu_isa() { return row_ops().isa; }

}  // namespace kvplane
