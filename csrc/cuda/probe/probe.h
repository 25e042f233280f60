// Single steps of the kernels, for tests: results of instructions, in the emulator and on a GPU.
#pragma once

#include <cstdint>

namespace kvplane::cuda {

// Runs the step of this name on `count` inputs; probe.cu lists names, inputs and outputs. Throws
// std::out_of_range for an unknown name.
void probe(const char* name, const void* inputs, void* outputs, int64_t count, uintptr_t stream);

}  // namespace kvplane::cuda
