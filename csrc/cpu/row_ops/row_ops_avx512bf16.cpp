// The row operations for AVX-512 with bf16 dot products: vdpbf16ps takes 32 products of two rows
// and adds them in pairs to 16 sums in fp32.
//
//   scores   16 keys of the tile, each a sum of 16 lanes; a tree of additions turns them into one
//            vector of 16 scores
//   values   rows of tokens 2p and 2p+1 are interleaved, so that a pair of products is a pair of
//            tokens:   |v[2p][0] v[2p+1][0]|v[2p][1] v[2p+1][1]|...   times   |w[2p] w[2p+1]|
//   8 bits   are looked up in two tables of 128 bytes, by AVX-512 VBMI: one has the upper bytes of
//            the bf16 numbers, one the lower bytes; the sign is set afterwards. With one or two
//            rows this is done while attending; with more, once for each tile before

#define KVPLANE_VECTOR_BYTES 64
#include "bare_products.h"
#include "row_ops_stored.h"
#include "row_ops_vector.h"
#include "stream_vector.h"

namespace kvplane {
namespace {

constexpr int64_t kChunk = 2 * kLanes;  // bf16 elements of one register
constexpr int64_t kPairs = kTileTokens / 2;

alignas(64) const char kZeros[2 * kMaxRowSize] = {};

struct Workspace {
  alignas(64) float weights[kAttendRows][kTileTokens];
  alignas(64) uint32_t pairs[kAttendRows][kPairs];    // the weights in bf16
  alignas(64) uint32_t values[kPairs * kMaxRowSize];  // [kPairs, value_size], interleaved
  int64_t value_size;
  float corrections[kAttendRows];
};

KVPLANE_INLINE __m512i load_bits(const void* from) { return _mm512_loadu_si512(from); }

KVPLANE_INLINE __m512 add_products(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// The bf16 numbers that the 8-bit numbers without a sign stand for.
struct Table {
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];

  explicit Table(float (*to_float)(uint8_t)) {
    for (int code = 0; code < 128; ++code) {
      const uint16_t bits = float_to_bf16(to_float(static_cast<uint8_t>(code)));
      high[code] = static_cast<uint8_t>(bits >> 8);
      low[code] = static_cast<uint8_t>(bits);
    }
  }
};

// Made on first use: before that, this file's instructions must not run.
const Table& table_of(Dtype dtype) {
  static const Table e4m3(e4m3_to_float), e5m2(e5m2_to_float);
  return dtype == Dtype::kFloat8E4M3 ? e4m3 : e5m2;
}

// Rows of bf16.
struct Bf16Rows {
  // Calls visit(c, register c) for all registers of a row.
  template <typename Visit>
  KVPLANE_INLINE void for_each_chunk(const char* row, int64_t num_chunks,
                                     const Visit& visit) const {
    KVPLANE_UNROLL for (int64_t c = 0; c < num_chunks; ++c) visit(c, load_bits(row + c * 64));
  }

  // Interleaves the columns of two rows, 16 columns in each register.
  template <int kChunks>
  KVPLANE_INLINE void interleave(const char* first, const char* second, int64_t column,
                                 __m512i* to) const {
    const __m512i columns =
        _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i more = _mm512_add_epi16(columns, _mm512_set1_epi16(16));
    KVPLANE_UNROLL for (int c = 0; c < kChunks; ++c) {
      const int64_t at = 2 * (column + c * kChunk);
      const __m512i a = load_bits(first + at), b = load_bits(second + at);
      to[2 * c] = _mm512_permutex2var_epi16(a, columns, b);
      to[2 * c + 1] = _mm512_permutex2var_epi16(a, more, b);
    }
  }
};

// Rows of 8 bits, with a multiple of 64 numbers.
struct ByteRows {
  const __m512i low0, low1, high0, high1;

  explicit ByteRows(const Table& table)
      : low0(load_bits(table.low)),
        low1(load_bits(table.low + 64)),
        high0(load_bits(table.high)),
        high1(load_bits(table.high + 64)) {}

  // Converts to bf16: the lower half of each 16 bytes goes to `first`, the upper half to `second`.
  KVPLANE_INLINE void look_up(__m512i codes, __m512i* first, __m512i* second) const {
    const __m512i signs = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
    const __m512i magnitude = _mm512_permutex2var_epi8(high0, codes, high1);
    const __m512i high = _mm512_ternarylogic_epi64(magnitude, codes, signs, 0xF8);  // a | (b & c)
    *first = _mm512_unpacklo_epi8(low, high);
    *second = _mm512_unpackhi_epi8(low, high);
  }

  // Converts 64 numbers to bf16, in order.
  KVPLANE_INLINE void convert(__m512i codes, __m512i* first, __m512i* second) const {
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    look_up(_mm512_permutexvar_epi64(order, codes), first, second);
  }

  template <typename Visit>
  KVPLANE_INLINE void for_each_chunk(const char* row, int64_t num_chunks,
                                     const Visit& visit) const {
    KVPLANE_UNROLL for (int64_t c = 0; c < num_chunks; c += 2) {
      __m512i first, second;
      convert(load_bits(row + c * kChunk), &first, &second);
      visit(c, first);
      visit(c + 1, second);
    }
  }

  template <int kChunks>
  KVPLANE_INLINE void interleave(const char* first, const char* second, int64_t column,
                                 __m512i* to) const {
    // Puts four numbers for each of the registers into each 16 bytes, then interleaves the rows.
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    KVPLANE_UNROLL for (int c = 0; c < kChunks; c += 2) {
      const int64_t at = column + c * kChunk;
      const __m512i a = _mm512_permutexvar_epi32(order, load_bits(first + at));
      const __m512i b = _mm512_permutexvar_epi32(order, load_bits(second + at));
      look_up(_mm512_unpacklo_epi8(a, b), &to[2 * c], &to[2 * c + 1]);
      look_up(_mm512_unpackhi_epi8(a, b), &to[2 * c + 2], &to[2 * c + 3]);
    }
  }
};

void load_tile_bf16(const LoadArgs& args) {
  Prefetch prefetch(args.prefetch, nullptr, args.prefetch_bytes, kTileTokens);
  if (args.dtype == Dtype::kBFloat16) {
    for (int64_t t = 0; t < kTileTokens; ++t) {
      prefetch.step();
      std::memcpy(args.to + t * args.row_bytes, args.rows[t], static_cast<size_t>(2 * args.count));
    }
    return;
  }
  const ByteRows bytes(table_of(args.dtype));
  const int64_t whole = args.count / 64 * 64;
  const __mmask64 mask = (__mmask64{1} << (args.count - whole)) - 1;
  for (int64_t t = 0; t < kTileTokens; ++t) {
    prefetch.step();
    const char* from = args.rows[t];
    char* to = args.to + t * args.row_bytes;
    __m512i first, second;
    for (int64_t i = 0; i < whole; i += 64) {
      bytes.convert(load_bits(from + i), &first, &second);
      _mm512_storeu_si512(to + 2 * i, first);
      _mm512_storeu_si512(to + 2 * i + 64, second);
    }
    if (mask == 0) continue;
    bytes.convert(_mm512_maskz_loadu_epi8(mask, from + whole), &first, &second);
    to += 2 * whole;
    _mm512_mask_storeu_epi16(to, static_cast<__mmask32>(mask), first);
    _mm512_mask_storeu_epi16(to + 64, static_cast<__mmask32>(mask >> 32), second);
  }
}

// kChunks: registers of a row, 0 when known only at run time.
template <int kRows, int kChunks, typename Keys>
KVPLANE_INLINE void bf16_dot_products(const Row* rows, const Tile& tile, int64_t row_size,
                                      const Keys& keys, Prefetch* prefetch,
                                      float (*dots)[kTileTokens]) {
  const int64_t num_chunks = kChunks > 0 ? kChunks : row_size / kChunk;
  const auto dot = [&](int64_t token) __attribute__((always_inline)) {
    if (kRows == 1 || token % 2 == 0) prefetch->step();
    __m512 sums[kRows] = {};
    const auto add = [&](int64_t c, __m512i k) __attribute__((always_inline)) {
      KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
        const char* query = static_cast<const char*>(rows[r].query);
        sums[r] = add_products(sums[r], k, load_bits(query + c * 64));
      }
    };
    keys.for_each_chunk(tile.key[token], num_chunks, add);
    PerRow<kRows> vectors;
    KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) vectors.row[r] = (Vector)sums[r];
    return vectors;
  };
  for (int64_t first = 0; first < kTileTokens; first += kLanes) {
    const PerRow<kRows> sums = totals<kLanes, kRows>(first, dot);
    KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) store_vector(sums.row[r], dots[r] + first);
  }
}

template <int kChunks, typename Values>
KVPLANE_INLINE void interleave_tile(const Tile& tile, int64_t row_size, const Values& values,
                                    Prefetch* prefetch, Workspace* w) {
  for (int64_t p = 0; p < kPairs; ++p) {
    if (p % 2 == 0) prefetch->step();
    for (int64_t d = 0; d < row_size; d += kChunks * kChunk) {
      __m512i columns[2 * kChunks];
      values.template interleave<kChunks>(tile.value[2 * p], tile.value[2 * p + 1], d, columns);
      KVPLANE_UNROLL for (int c = 0; c < 2 * kChunks; ++c) {
        _mm512_store_si512(w->values + p * row_size + d + c * kLanes, columns[c]);
      }
    }
  }
}

// Values interleaved by `interleave_tile`.
struct InterleavedTile {
  template <int kChunks>
  KVPLANE_INLINE void columns(const Workspace& w, const Tile&, int64_t p, int64_t column,
                              __m512i* to) const {
    KVPLANE_UNROLL for (int c = 0; c < 2 * kChunks; ++c) {
      to[c] = load_bits(w.values + p * w.value_size + column + c * kLanes);
    }
  }
};

// Values that are interleaved on use.
template <typename Values>
struct TileInPlace {
  const Values& values;

  template <int kChunks>
  KVPLANE_INLINE void columns(const Workspace&, const Tile& tile, int64_t p, int64_t column,
                              __m512i* to) const {
    values.template interleave<kChunks>(tile.value[2 * p], tile.value[2 * p + 1], column, to);
  }
};

// Adds the tile's weighted values to kChunks * 32 columns of kRows rows.
template <int kRows, int kChunks, typename Source>
KVPLANE_INLINE void add_bf16_values(const Row* rows, int64_t r0, const Tile& tile, int64_t column,
                                    const Source& source, Prefetch* prefetch, const Workspace& w) {
  __m512 sums[kRows][2 * kChunks];
  KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
    const __m512 correction = _mm512_set1_ps(w.corrections[r0 + r]);
    KVPLANE_UNROLL for (int c = 0; c < 2 * kChunks; ++c) {
      sums[r][c] = _mm512_mul_ps(_mm512_loadu_ps(rows[r].out + column + c * kLanes), correction);
    }
  }
  for (int64_t p = 0; p < kPairs; ++p) {
    if (kRows == 1 || p % 2 == 0) prefetch->step();
    __m512i weights[kRows];
    KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
      weights[r] = _mm512_set1_epi32(static_cast<int>(w.pairs[r0 + r][p]));
    }
    __m512i values[2 * kChunks];
    source.template columns<kChunks>(w, tile, p, column, values);
    KVPLANE_UNROLL for (int c = 0; c < 2 * kChunks; ++c) {
      KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
        sums[r][c] = add_products(sums[r][c], values[c], weights[r]);
      }
    }
  }
  KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
    KVPLANE_UNROLL for (int c = 0; c < 2 * kChunks; ++c) {
      _mm512_storeu_ps(rows[r].out + column + c * kLanes, sums[r][c]);
    }
  }
}

// kUnit: a row's number of registers of 32 columns is a multiple of it.
template <int kRows, int kUnit, typename Source>
KVPLANE_INLINE void add_all_bf16_values(const Row* rows, int64_t r0, const Tile& tile,
                                        int64_t row_size, const Source& source, Prefetch* prefetch,
                                        const Workspace& w) {
  constexpr int kChunks = 4;
  int64_t column = 0;
  for (; column + kChunks * kChunk <= row_size; column += kChunks * kChunk) {
    add_bf16_values<kRows, kChunks>(rows, r0, tile, column, source, prefetch, w);
  }
  for (; column < row_size; column += kUnit * kChunk) {
    add_bf16_values<kRows, kUnit>(rows, r0, tile, column, source, prefetch, w);
  }
}

KVPLANE_INLINE bool sees_all(const Row& row) { return row.begin == 0 && row.end == kTileTokens; }

// For a row that attends to only some tokens: zeros stand for the other values, which may be
// anything.
template <int kUnit, typename Source>
void add_visible_values(const Row& row, int64_t r, const Tile& tile, int64_t row_size,
                        const Source& source, Prefetch* prefetch, const Workspace& w) {
  Tile visible;
  for (int64_t t = 0; t < kTileTokens; ++t) {
    visible.value[t] = t >= row.begin && t < row.end ? tile.value[t] : kZeros;
  }
  add_all_bf16_values<1, kUnit>(&row, r, visible, row_size, source, prefetch, w);
}

// Computes the dot products and weights of all rows.
template <int kChunks, typename Keys>
KVPLANE_INLINE void weigh_bf16_rows(const AttendArgs& args, const Tile& tile, const Keys& keys,
                                    Prefetch* prefetch, Workspace* w) {
  for (int64_t r = 0; r < args.num_rows;) {
    const Row* rows = args.rows + r;
    const int64_t num = r + 1 < args.num_rows ? 2 : 1;
    if (num == 2) {
      bf16_dot_products<2, kChunks>(rows, tile, args.row_size, keys, prefetch, w->weights + r);
    } else {
      bf16_dot_products<1, kChunks>(rows, tile, args.row_size, keys, prefetch, w->weights + r);
    }
    for (const int64_t end = r + num; r < end; ++r) {
      w->corrections[r] = weigh(args.rows[r], args.scale, args.soft_cap, w->weights[r]);
      const __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_load_ps(w->weights[r] + kLanes),
                                                 _mm512_load_ps(w->weights[r]));
      _mm512_store_si512(w->pairs[r], (__m512i)pairs);
    }
  }
}

// Adds the weighted values to all rows; rows that attend to the whole tile take them from `all`.
template <int kUnit, typename Values, typename Source>
KVPLANE_INLINE void add_rows_of_values(const AttendArgs& args, const Values& values,
                                       const Source& all, Prefetch* prefetch, const Workspace& w) {
  const Tile& tile = *args.tile;
  for (int64_t r = 0; r < args.num_rows;) {
    const Row* rows = args.rows + r;
    const bool two = r + 1 < args.num_rows && sees_all(rows[0]) && sees_all(rows[1]);
    if (!sees_all(rows[0])) {
      const TileInPlace<Values> some{values};
      add_visible_values<kUnit>(rows[0], r, tile, args.value_size, some, prefetch, w);
    } else if (two) {
      add_all_bf16_values<2, kUnit>(rows, r, tile, args.value_size, all, prefetch, w);
    } else {
      add_all_bf16_values<1, kUnit>(rows, r, tile, args.value_size, all, prefetch, w);
    }
    r += two ? 2 : 1;
  }
}

template <int kChunks, int kUnit, typename Rows>
void attend_few_bf16_rows(const AttendArgs& args, const Rows& source) {
  Workspace w;
  const int64_t finer = args.num_rows == 1 ? 2 : 1;  // a single row is done soonest
  Prefetch keys = prefetch_with_keys(args, 16 * finer);
  weigh_bf16_rows<kChunks>(args, *args.tile, source, &keys, &w);
  Prefetch values = prefetch_with_values(args, 8 * finer);
  add_rows_of_values<kUnit>(args, source, TileInPlace<Rows>{source}, &values, w);
}

// `converted`: the tile's keys in bf16.
template <int kChunks, int kUnit, typename Rows>
void attend_many_bf16_rows(const AttendArgs& args, const Tile& converted, const Rows& source) {
  Workspace w;
  w.value_size = args.value_size;
  const int64_t num_pairs = (args.num_rows + 1) / 2;
  Prefetch keys = prefetch_with_keys(args, 16 * num_pairs);
  weigh_bf16_rows<kChunks>(args, converted, Bf16Rows{}, &keys, &w);
  Prefetch values = prefetch_with_values(args, 8 * (num_pairs + 1));
  interleave_tile<kUnit>(*args.tile, args.value_size, source, &values, &w);
  add_rows_of_values<kUnit>(args, source, InterleavedTile{}, &values, w);
}

template <int kChunks>
void attend_bf16_rows(const AttendArgs& args) {
  const bool few = args.num_rows <= 2;
  if (args.dtype == Dtype::kBFloat16) {
    if (few) return attend_few_bf16_rows<kChunks, 1>(args, Bf16Rows{});
    return attend_many_bf16_rows<kChunks, 1>(args, *args.tile, Bf16Rows{});
  }
  const ByteRows bytes(table_of(args.dtype));
  if (few) return attend_few_bf16_rows<kChunks, 2>(args, bytes);
  alignas(64) char keys[kTileTokens * 2 * kMaxRowSize];
  Tile converted;
  for (int64_t t = 0; t < kTileTokens; ++t) {
    char* to = keys + t * 2 * args.row_size;
    converted.key[t] = to;
    const auto store = [&](int64_t c, __m512i k) { _mm512_store_si512(to + c * 64, k); };
    bytes.for_each_chunk(args.tile->key[t], args.row_size / kChunk, store);
  }
  attend_many_bf16_rows<kChunks, 2>(args, converted, bytes);
}

void attend_bf16(const AttendArgs& args) {
  switch (args.row_size) {
    case 64:
      return attend_bf16_rows<2>(args);
    case 128:
      return attend_bf16_rows<4>(args);
    default:
      return attend_bf16_rows<0>(args);
  }
}

float bf16_products(int64_t num_rounds) {
  const __m512i a = hold(_mm512_set1_epi16(0x3F80)), b = hold(_mm512_set1_epi16(0x3500));
  return add_in_chains(num_rounds, [&](Vector sum) __attribute__((always_inline)) {
    return (Vector)add_products((__m512)sum, a, b);
  });
}

}  // namespace

RowOps row_ops_avx512bf16();

RowOps row_ops_avx512bf16() {
  return {"avx512bf16", load,        store,         load_tile,        load_tile_bf16,
          attend,       attend_bf16, attend_stored, reorder,          kUnitColumns,
          merge,        finish,      bf16_products, kChains * kChunk, stream};
}

}  // namespace kvplane
