#include "attention_kernels.h"
#include "attention_long.cuh"

namespace kvplane::cuda {

void launch_long_half(const Work& work, int64_t max_items, uintptr_t stream) {
  launch_long<Half>(work, max_items, stream);
}

}  // namespace kvplane::cuda
