#include "cuda/attention/short/attention_short.cuh"

namespace kvplane::cuda {

template void launch_short<Bfloat>(const Work&, const Launch&);
template size_t least_shared_bytes<Bfloat>(int64_t);

}  // namespace kvplane::cuda
