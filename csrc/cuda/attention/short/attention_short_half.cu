#include "cuda/attention/short/attention_short.cuh"

namespace kvplane::cuda {

template void launch_short<Half>(const Work&, const Launch&);
template size_t least_shared_bytes<Half>(int64_t);

}  // namespace kvplane::cuda
