// The row operations for AVX-512 (F, BW, DQ, VL).

#define KVPLANE_VECTOR_BYTES 64
#include "bare_products.h"
#include "row_ops_stored.h"
#include "row_ops_vector.h"
#include "stream_vector.h"

namespace kvplane {

RowOps row_ops_avx512();

RowOps row_ops_avx512() {
  return {"avx512", load,    store,          load_tile,        nullptr,
          attend,   nullptr, attend_stored,  reorder,          kUnitColumns,
          merge,    finish,  fused_products, kChains * kWidth, stream};
}

}  // namespace kvplane
