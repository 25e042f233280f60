#include "cuda/attention/short/attention_shared.cuh"

namespace kvplane::cuda {

template void launch_short<E4m3>(const Work&, const Launch&);
template void launch_shared<E4m3>(const Work&, const Launch&);
template size_t shared_memory_of_families<E4m3>(int64_t);
template size_t least_shared_bytes<E4m3>(int64_t);

}  // namespace kvplane::cuda
