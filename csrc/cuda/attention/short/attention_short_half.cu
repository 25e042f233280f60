#include "cuda/attention/short/attention_shared.cuh"

namespace kvplane::cuda {

template void launch_short<Half>(const Work&, const Launch&);
template void launch_shared<Half>(const Work&, const Launch&);
template size_t shared_memory_of_families<Half>(int64_t);
template size_t least_shared_bytes<Half>(int64_t);

}  // namespace kvplane::cuda
