#include "cuda/attention/short/attention_short.cuh"

namespace kvplane::cuda {

template void launch_short<E4m3>(const Work&, const Launch&);
template size_t least_shared_bytes<E4m3>(int64_t);

}  // namespace kvplane::cuda
