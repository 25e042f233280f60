#pragma once

namespace kvplane {

// The instruction set the CPU kernels use in this process: "baseline", "avx2" or "avx512".
// KVPLANE_KERNELS_ISA picks a smaller one than the machine's best; results are the same bits.
const char* cpu_isa();

}  // namespace kvplane
