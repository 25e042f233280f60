#include "attention_short.cuh"

namespace kvplane::cuda {

template void launch_short<E5m2>(const Work&, int64_t, uintptr_t);

}  // namespace kvplane::cuda
