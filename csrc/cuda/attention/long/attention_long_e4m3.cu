#include "cuda/attention/long/attention_long.cuh"

namespace kvplane::cuda {

template void launch_long<E4m3>(const Work&, const Launch&);

}  // namespace kvplane::cuda
