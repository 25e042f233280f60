#include "attention_short.cuh"

namespace kvplane::cuda {

template void launch_short<Half, E4m3>(const Work&, int64_t, uintptr_t);
template void launch_short<Bfloat, E4m3>(const Work&, int64_t, uintptr_t);

}  // namespace kvplane::cuda
