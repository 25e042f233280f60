// The row operations for AVX2.

#define KVPLANE_VECTOR_BYTES 32
#include "bare_products.h"
#include "row_ops_stored.h"
#include "row_ops_vector.h"
#include "stream_vector.h"

namespace kvplane {

RowOps row_ops_avx2();

RowOps row_ops_avx2() {
  return {"avx2", load,    store,          load_tile,        nullptr,
          attend, nullptr, attend_stored,  reorder,          kUnitColumns,
          merge,  finish,  fused_products, kChains * kWidth, stream};
}

}  // namespace kvplane
