#include "cuda/attention/long/attention_long.cuh"

namespace kvplane::cuda {

template void launch_long<Bfloat>(const Work&, int64_t, uintptr_t);

}  // namespace kvplane::cuda
