#include "attention_fma.cuh"

namespace kvplane::cuda {

template void launch_fma<float, float>(const Work&, int64_t, uintptr_t);
template void launch_fma<float, Half>(const Work&, int64_t, uintptr_t);
template void launch_fma<float, Bfloat>(const Work&, int64_t, uintptr_t);
template void launch_fma<Half, float>(const Work&, int64_t, uintptr_t);
template void launch_fma<Half, Half>(const Work&, int64_t, uintptr_t);
template void launch_fma<Half, Bfloat>(const Work&, int64_t, uintptr_t);
template void launch_fma<Bfloat, float>(const Work&, int64_t, uintptr_t);
template void launch_fma<Bfloat, Half>(const Work&, int64_t, uintptr_t);
template void launch_fma<Bfloat, Bfloat>(const Work&, int64_t, uintptr_t);

}  // namespace kvplane::cuda
