#include "cuda/attention/short/attention_shared.cuh"

namespace kvplane::cuda {

template void launch_short<E5m2>(const Work&, const Launch&);
template void launch_shared<E5m2>(const Work&, const Launch&);
template size_t shared_memory_of_families<E5m2>(int64_t);
template size_t least_shared_bytes<E5m2>(int64_t);

}  // namespace kvplane::cuda
