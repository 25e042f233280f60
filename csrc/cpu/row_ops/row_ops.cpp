// Picks the instruction set.

#include "row_ops.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvplane/isa.h"

namespace kvplane {

RowOps row_ops_baseline();
#ifdef KVPLANE_X86_64
RowOps row_ops_avx2();
RowOps row_ops_avx512();
RowOps row_ops_avx512bf16();
#endif

namespace {

// The instruction sets that this machine has, best first.
const std::vector<RowOps>& sets() {
  static const std::vector<RowOps> sets = [] {
    std::vector<RowOps> found;
#ifdef KVPLANE_X86_64
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
    // On Intel's processors vdpbf16ps computes half as many products a second as fused products of
    // fp32 do: kvplane_kernels.fused_products shows it.
    const bool slow_bf16 = __builtin_cpu_is("intel");
    if (avx512 && bf16 && !slow_bf16) found.push_back(row_ops_avx512bf16());
    if (avx512) found.push_back(row_ops_avx512());
    if (avx512 && bf16 && slow_bf16) found.push_back(row_ops_avx512bf16());
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    if (avx2) found.push_back(row_ops_avx2());
#endif
    found.push_back(row_ops_baseline());
    return found;
  }();
  return sets;
}

const RowOps* find(const char* source, const std::string& isa) {
  std::string names;
  for (const RowOps& ops : sets()) {
    if (isa == ops.isa) return &ops;
    names += (names.empty() ? "" : ", ") + std::string(ops.isa);
  }
  throw std::invalid_argument(std::string(source) + " must be one of " + names + ", is " + isa);
}

const RowOps* wanted() {
  const char* isa = std::getenv("KVPLANE_KERNELS_ISA");
  return isa == nullptr || *isa == '\0' ? &sets().front() : find("KVPLANE_KERNELS_ISA", isa);
}

std::atomic<const RowOps*>& current() {
  static std::atomic<const RowOps*> ops{wanted()};
  return ops;
}

}  // namespace

const RowOps& row_ops() { return *current().load(std::memory_order_acquire); }

const char* cpu_isa() { return row_ops().isa; }

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const RowOps& ops : sets()) names.push_back(ops.isa);
  return names;
}

void use_cpu_isa(const std::string& isa) {
  current().store(find("isa", isa), std::memory_order_release);
}

}  // namespace kvplane
