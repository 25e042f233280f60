#include "cuda/attention/short/attention_short.cuh"

namespace kvplane::cuda {

template void launch_short<E5m2>(const Work&, const Launch&);
template size_t least_shared_bytes<E5m2>(int64_t);

}  // namespace kvplane::cuda
