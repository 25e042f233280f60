#include "attention_fma.cuh"

namespace kvplane::cuda {

template void launch_fma<float, E4m3>(const Work&, int64_t, uintptr_t);
template void launch_fma<float, E5m2>(const Work&, int64_t, uintptr_t);
template void launch_fma<Half, E4m3>(const Work&, int64_t, uintptr_t);
template void launch_fma<Half, E5m2>(const Work&, int64_t, uintptr_t);
template void launch_fma<Bfloat, E4m3>(const Work&, int64_t, uintptr_t);
template void launch_fma<Bfloat, E5m2>(const Work&, int64_t, uintptr_t);

}  // namespace kvplane::cuda
