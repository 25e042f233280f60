#include "attention_kernels.h"
#include "attention_long.cuh"

namespace kvplane::cuda {

void launch_long_bfloat(const Work& work, int64_t max_items, uintptr_t stream) {
  launch_long<Bfloat>(work, max_items, stream);
}

}  // namespace kvplane::cuda
