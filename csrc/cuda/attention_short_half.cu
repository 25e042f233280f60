#include "attention_kernels.h"
#include "attention_short.cuh"

namespace kvplane::cuda {

void launch_short_half(const Work& work, int64_t max_items, uintptr_t stream) {
  launch_short<Half>(work, max_items, stream);
}

}  // namespace kvplane::cuda
