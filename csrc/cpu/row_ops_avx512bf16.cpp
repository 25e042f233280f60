// The row operations for AVX-512 with bf16 dot products: vdpbf16ps takes 32 products of two rows
// and adds them in pairs to 16 sums in fp32.
//
//   scores   16 keys of the tile, each a sum of 16 lanes; a tree of additions turns them into one
//            vector of 16 scores
//   values   rows of tokens 2p and 2p+1 are interleaved, so that a pair of products is a pair of
//            tokens:   |v[2p][0] v[2p+1][0]|v[2p][1] v[2p+1][1]|...   times   |w[2p] w[2p+1]|
//   8 bits   are looked up in two tables of 128 bytes, by AVX-512 VBMI: one has the upper bytes of
//            the bf16 numbers, one the lower bytes; the sign is put in afterwards

#define KVPLANE_VECTOR_BYTES 64
#include "row_ops_vector.h"
#include "stream_vector.h"

namespace kvplane {
namespace {

constexpr int64_t kChunk = 2 * kLanes;  // bf16 elements of one register
constexpr int64_t kPairs = kTileTokens / 2;

alignas(64) const char kZeros[2 * kMaxRowSize] = {};

struct Workspace {
  alignas(64) float weights[kAttendRows][kTileTokens];
  alignas(64) uint32_t pairs[kAttendRows][kPairs];   // the weights in bf16
  alignas(64) uint32_t values[kPairs][kMaxRowSize];  // interleaved
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

// Made when first wanted: before that this file's instructions must not run.
const Table& table_of(Dtype dtype) {
  static const Table e4m3(e4m3_to_float), e5m2(e5m2_to_float);
  return dtype == Dtype::kFloat8E4M3 ? e4m3 : e5m2;
}

// Converts 64 numbers of 8 bits.
struct Lookup {
  const __m512i low0, low1, high0, high1;

  explicit Lookup(const Table& table)
      : low0(load_bits(table.low)),
        low1(load_bits(table.low + 64)),
        high0(load_bits(table.high)),
        high1(load_bits(table.high + 64)) {}

  KVPLANE_INLINE void convert(__m512i codes, __m512i* first, __m512i* second) const {
    // Unpacking takes the lower half of each 16 bytes to `first`, the upper half to `second`.
    codes = _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), codes);
    const __m512i signs = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
    const __m512i magnitude = _mm512_permutex2var_epi8(high0, codes, high1);
    const __m512i high = _mm512_ternarylogic_epi64(magnitude, codes, signs, 0xF8);  // a | (b & c)
    *first = _mm512_unpacklo_epi8(low, high);
    *second = _mm512_unpackhi_epi8(low, high);
  }
};

void load_tile_bf16(const LoadArgs& args) {
  Prefetch prefetch(args.prefetch, args.prefetch_bytes, kTileTokens);
  if (args.dtype == Dtype::kBFloat16) {
    for (int64_t t = 0; t < kTileTokens; ++t) {
      prefetch.step();
      std::memcpy(args.to + t * args.row_bytes, args.rows[t], static_cast<size_t>(2 * args.count));
    }
    return;
  }
  const Lookup lookup(table_of(args.dtype));
  const int64_t whole = args.count / 64 * 64;
  const __mmask64 mask = (__mmask64{1} << (args.count - whole)) - 1;
  for (int64_t t = 0; t < kTileTokens; ++t) {
    prefetch.step();
    const char* from = args.rows[t];
    char* to = args.to + t * args.row_bytes;
    __m512i first, second;
    for (int64_t i = 0; i < whole; i += 64) {
      lookup.convert(load_bits(from + i), &first, &second);
      _mm512_storeu_si512(to + 2 * i, first);
      _mm512_storeu_si512(to + 2 * i + 64, second);
    }
    if (mask == 0) continue;
    lookup.convert(_mm512_maskz_loadu_epi8(mask, from + whole), &first, &second);
    to += 2 * whole;
    _mm512_mask_storeu_epi16(to, static_cast<__mmask32>(mask), first);
    _mm512_mask_storeu_epi16(to + 64, static_cast<__mmask32>(mask >> 32), second);
  }
}

// kChunks: registers of a row, 0 when known only at run time.
template <int kRows, int kChunks>
KVPLANE_INLINE void bf16_dot_products(const Row* rows, const Tile& tile, int64_t row_size,
                                      Prefetch* prefetch, float (*dots)[kTileTokens]) {
  const int64_t num_chunks = kChunks > 0 ? kChunks : row_size / kChunk;
  const auto dot = [&](int64_t token) __attribute__((always_inline)) {
    if (token % 2 == 0) prefetch->step();
    const char* key = tile.key[token];
    __m512 sums[kRows] = {};
    KVPLANE_UNROLL for (int64_t c = 0; c < num_chunks; ++c) {
      const __m512i k = load_bits(key + c * 64);
      KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
        const char* query = static_cast<const char*>(rows[r].query);
        sums[r] = add_products(sums[r], k, load_bits(query + c * 64));
      }
    }
    PerRow<kRows> vectors;
    KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) vectors.row[r] = (Vector)sums[r];
    return vectors;
  };
  for (int64_t first = 0; first < kTileTokens; first += kLanes) {
    const PerRow<kRows> sums = totals<kLanes, kRows>(first, dot);
    KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) store_vector(sums.row[r], dots[r] + first);
  }
}

// The values of one pair of tokens in 32 columns: the first 16 of them in `low`.
KVPLANE_INLINE void interleave(const char* first, const char* second, __m512i* low, __m512i* high) {
  const __m512i columns =
      _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                       37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i more = _mm512_add_epi16(columns, _mm512_set1_epi16(16));
  const __m512i a = load_bits(first), b = load_bits(second);
  *low = _mm512_permutex2var_epi16(a, columns, b);
  *high = _mm512_permutex2var_epi16(a, more, b);
}

void interleave_tile(const Tile& tile, int64_t row_size, Prefetch* prefetch, Workspace* w) {
  for (int64_t p = 0; p < kPairs; ++p) {
    if (p % 2 == 0) prefetch->step();
    for (int64_t d = 0; d < row_size; d += kChunk) {
      __m512i low, high;
      interleave(tile.value[2 * p] + 2 * d, tile.value[2 * p + 1] + 2 * d, &low, &high);
      _mm512_store_si512(w->values[p] + d, low);
      _mm512_store_si512(w->values[p] + d + kLanes, high);
    }
  }
}

// Adds the tile's weighted values to kChunks * 32 columns of kRows rows. kInterleaved: takes them
// from the workspace, not from the tile.
template <int kRows, int kChunks, bool kInterleaved>
KVPLANE_INLINE void add_bf16_values(const Row* rows, int64_t r0, const Tile& tile, int64_t column,
                                    Prefetch* prefetch, const Workspace& w) {
  __m512 sums[kRows][2 * kChunks];
  KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
    const __m512 correction = _mm512_set1_ps(w.corrections[r0 + r]);
    KVPLANE_UNROLL for (int c = 0; c < 2 * kChunks; ++c) {
      sums[r][c] = _mm512_mul_ps(_mm512_loadu_ps(rows[r].out + column + c * kLanes), correction);
    }
  }
  for (int64_t p = 0; p < kPairs; ++p) {
    if (p % 2 == 0) prefetch->step();
    __m512i weights[kRows];
    KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
      weights[r] = _mm512_set1_epi32(static_cast<int>(w.pairs[r0 + r][p]));
    }
    KVPLANE_UNROLL for (int c = 0; c < kChunks; ++c) {
      __m512i low, high;
      if (kInterleaved) {
        low = load_bits(w.values[p] + column + c * kChunk);
        high = load_bits(w.values[p] + column + c * kChunk + kLanes);
      } else {
        const int64_t at = 2 * (column + c * kChunk);
        interleave(tile.value[2 * p] + at, tile.value[2 * p + 1] + at, &low, &high);
      }
      KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
        sums[r][2 * c] = add_products(sums[r][2 * c], low, weights[r]);
        sums[r][2 * c + 1] = add_products(sums[r][2 * c + 1], high, weights[r]);
      }
    }
  }
  KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
    KVPLANE_UNROLL for (int c = 0; c < 2 * kChunks; ++c) {
      _mm512_storeu_ps(rows[r].out + column + c * kLanes, sums[r][c]);
    }
  }
}

template <int kRows, bool kInterleaved>
KVPLANE_INLINE void add_all_bf16_values(const Row* rows, int64_t r0, const Tile& tile,
                                        int64_t row_size, Prefetch* prefetch, const Workspace& w) {
  constexpr int kChunks = 4;
  int64_t column = 0;
  for (; column + kChunks * kChunk <= row_size; column += kChunks * kChunk) {
    add_bf16_values<kRows, kChunks, kInterleaved>(rows, r0, tile, column, prefetch, w);
  }
  for (; column < row_size; column += kChunk) {
    add_bf16_values<kRows, 1, kInterleaved>(rows, r0, tile, column, prefetch, w);
  }
}

KVPLANE_INLINE bool sees_all(const Row& row) { return row.begin == 0 && row.end == kTileTokens; }

// A row that sees only some tokens: zeros stand for the others' values, which may be anything.
void add_visible_values(const Row& row, int64_t r, const Tile& tile, int64_t row_size,
                        Prefetch* prefetch, const Workspace& w) {
  Tile visible;
  for (int64_t t = 0; t < kTileTokens; ++t) {
    visible.value[t] = t >= row.begin && t < row.end ? tile.value[t] : kZeros;
  }
  add_all_bf16_values<1, false>(&row, r, visible, row_size, prefetch, w);
}

template <int kChunks>
void attend_bf16_rows(const AttendArgs& args) {
  Workspace w;
  const Tile& tile = *args.tile;
  // One or two rows are done too soon for a whole tile to arrive, and what comes early is in the
  // way: they ask for this tile's values and then for the next one's keys.
  const bool many = args.num_rows > 2;
  const Tile& next = *args.prefetch;
  Prefetch keys(many ? next.key : tile.value, args.prefetch_bytes, 16 * ((args.num_rows + 1) / 2));
  for (int64_t r = 0; r < args.num_rows;) {
    const Row* rows = args.rows + r;
    const int64_t num = r + 1 < args.num_rows ? 2 : 1;
    if (num == 2) {
      bf16_dot_products<2, kChunks>(rows, tile, args.row_size, &keys, w.weights + r);
    } else {
      bf16_dot_products<1, kChunks>(rows, tile, args.row_size, &keys, w.weights + r);
    }
    for (const int64_t end = r + num; r < end; ++r) {
      w.corrections[r] = weigh(args.rows[r], args.scale, w.weights[r]);
      const __m512bh pairs =
          _mm512_cvtne2ps_pbh(_mm512_load_ps(w.weights[r] + kLanes), _mm512_load_ps(w.weights[r]));
      _mm512_store_si512(w.pairs[r], (__m512i)pairs);
    }
  }
  Prefetch values(many ? next.value : next.key, args.prefetch_bytes,
                  8 * ((args.num_rows + 1) / 2 + (many ? 1 : 0)));
  if (many) interleave_tile(tile, args.row_size, &values, &w);
  for (int64_t r = 0; r < args.num_rows;) {
    const Row* rows = args.rows + r;
    const bool two = r + 1 < args.num_rows && sees_all(rows[0]) && sees_all(rows[1]);
    if (!sees_all(rows[0])) {
      add_visible_values(rows[0], r, tile, args.row_size, &values, w);
    } else if (many && two) {
      add_all_bf16_values<2, true>(rows, r, tile, args.row_size, &values, w);
    } else if (two) {
      add_all_bf16_values<2, false>(rows, r, tile, args.row_size, &values, w);
    } else {
      add_all_bf16_values<1, false>(rows, r, tile, args.row_size, &values, w);
    }
    r += two ? 2 : 1;
  }
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

}  // namespace

RowOps row_ops_avx512bf16();

RowOps row_ops_avx512bf16() {
  return {"avx512bf16", load,        store, load_tile, load_tile_bf16,
          attend,       attend_bf16, merge, finish,    stream};
}

}  // namespace kvplane
