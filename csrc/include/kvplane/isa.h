#pragma once

#include <string>
#include <vector>

namespace kvplane {

// The instruction set that the CPU kernels use in this process: at first the best one of the
// machine, or the one that KVPLANE_KERNELS_ISA names. Throws std::invalid_argument when the
// machine does not have that one.
const char* cpu_isa();

// The ones that this machine has, best first, of "avx512bf16", "avx512", "avx2", "baseline".
std::vector<std::string> cpu_isas();

// Uses another one from now on. Throws std::invalid_argument when the machine does not have it.
void use_cpu_isa(const std::string& isa);

}  // namespace kvplane
