// Sixteen floats at a time, on any processor: GCC's and Clang's vector types, intrinsics only where they say more.
//
// The build sets -ffp-contract=off: a product and a sum are fused where `fma` says so and nowhere else, so that every
// instance of a template rounds alike.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvferry {

typedef float F32x16 __attribute__((vector_size(64)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef int8_t I8x16 __attribute__((vector_size(16)));
typedef _Float16 F16x16 __attribute__((vector_size(32)));

struct Bf16 {
  uint16_t bits;
};
struct Int8 {
  int8_t value;
};
struct Half {
  uint16_t bits;
};

constexpr int64_t LANES = 16;
constexpr int64_t VECTOR_BYTES = 64;
constexpr float NO_SCORE = -std::numeric_limits<float>::infinity();

template <typename To, typename From>
inline To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <typename V>
inline V load_bytes(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Asks for a line of memory, to lie in the second cache when it is needed. GCC takes a function that does nothing but
// __builtin_prefetch for one that does nothing.
inline void fetch_line(const void* at) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(at)));
#else
  __builtin_prefetch(at, 0, 2);
#endif
}

inline F32x16 splat(float value) { return F32x16{} + value; }
inline U32x16 splat_bits(uint32_t value) { return U32x16{} + value; }

inline F32x16 load(const float* from) { return load_bytes<F32x16>(from); }
inline F32x16 load(const Bf16* from) {
  const U16x16 halves = load_bytes<U16x16>(from);
  return bits_of<F32x16>(__builtin_convertvector(halves, U32x16) << 16);
}

// Compilers turn GCC's conversion into sixteen single ones.
inline F32x16 load(const Half* from) {
#if defined(__AVX512F__)
  return (F32x16)_mm512_cvtph_ps(load_bytes<__m256i>(from));
#elif defined(__F16C__)
  F32x16 values;
  for (int64_t half = 0; half < 2; ++half) {
    const __m256 part = _mm256_cvtph_ps(load_bytes<__m128i>(from + half * 8));
    std::memcpy(reinterpret_cast<char*>(&values) + half * 32, &part, 32);
  }
  return values;
#else
  return __builtin_convertvector(load_bytes<F16x16>(from), F32x16);
#endif
}

inline void store(float* to, F32x16 value) { std::memcpy(to, &value, sizeof value); }
// Rounds to nearest, ties to even; a NaN stays one.
inline void store(Bf16* to, F32x16 value) {
#if defined(__AVX512BF16__)
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)value);  // less than a normal number becomes 0
#else
  const U32x16 bits = bits_of<U32x16>(value);
  const U32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U32x16 is_nan = bits_of<U32x16>(value != value);
  const U16x16 halves = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0u), U16x16);
#endif
  std::memcpy(to, &halves, sizeof halves);
}

inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
#if defined(__AVX512F__)
  return (F32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) || defined(__aarch64__)
  F32x16 sum;
  for (int lane = 0; lane < LANES; ++lane) sum[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return sum;
#else
  return a * b + c;
#endif
}

inline F32x16 larger(F32x16 a, F32x16 b) { return a > b ? a : b; }
inline F32x16 smaller(F32x16 a, F32x16 b) { return a < b ? a : b; }

// Units: what a 32-bit lane of a dot product holds, one float, two neighbours of bfloat16 or four of int8.
template <typename T>
constexpr int64_t PER_UNIT = 4 / sizeof(T);

// sum + a · b, lane by lane, over units.
template <typename T>
inline F32x16 dot_units(F32x16 sum, U32x16 a, U32x16 b);

template <>
inline F32x16 dot_units<float>(F32x16 sum, U32x16 a, U32x16 b) {
  return fma(bits_of<F32x16>(a), bits_of<F32x16>(b), sum);
}

// a: without sign, b: with.
inline I32x16 dot_bytes(I32x16 sum, U32x16 a, U32x16 b) {
#if defined(__AVX512VNNI__)
  return (I32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
  for (int shift = 0; shift < 32; shift += 8)
    sum += bits_of<I32x16>((a >> shift) & 255u) * (bits_of<I32x16>(b << (24 - shift)) >> 24);
  return sum;
#endif
}

template <>
inline F32x16 dot_units<Bf16>(F32x16 sum, U32x16 a, U32x16 b) {
#if defined(__AVX512BF16__)
  return (F32x16)_mm512_dpbf16_ps((__m512)sum, bits_of<__m512bh>(a), bits_of<__m512bh>(b));
#else
  sum = fma(bits_of<F32x16>(a << 16), bits_of<F32x16>(b << 16), sum);
  return fma(bits_of<F32x16>(a & 0xffff0000u), bits_of<F32x16>(b & 0xffff0000u), sum);
#endif
}

// 32 units of neighbouring rows, `PER_UNIT` of them, from 32 values of each.
struct Units {
  U32x16 first, second;
};
inline Units interleave(const float* const* rows, int64_t at) {
  return {load_bytes<U32x16>(rows[0] + at), load_bytes<U32x16>(rows[0] + at + LANES)};
}
inline Units interleave(const Bf16* const* rows, int64_t at) {
#if defined(__AVX512BW__)
  alignas(64) static constexpr uint16_t FIRST[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i upper = _mm512_loadu_si512(rows[0] + at), lower = _mm512_loadu_si512(rows[1] + at);
  const __m512i first = _mm512_load_si512(FIRST), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  return {(U32x16)_mm512_permutex2var_epi16(upper, first, lower), (U32x16)_mm512_permutex2var_epi16(upper, second, lower)};
#else
  const auto wide = [&](int row, int64_t from) {
    return __builtin_convertvector(load_bytes<U16x16>(rows[row] + from), U32x16);
  };
  return {wide(0, at) | (wide(1, at) << 16), wide(0, at + LANES) | (wide(1, at + LANES) << 16)};
#endif
}

inline float sum_of(F32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  for (int width = 8; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) v[lane] += v[lane + width];
  return v[0];
#endif
}

inline float largest_of(F32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float largest = v[0];
  for (int lane = 1; lane < LANES; ++lane) largest = v[lane] > largest ? v[lane] : largest;
  return largest;
#endif
}

// Swaps the groups of WIDTH lanes that lie across in two rows of a 2 · WIDTH square.
template <int WIDTH>
inline void swap_across(U32x16& upper, U32x16& lower) {
  U32x16 first, second;
  for (uint32_t lane = 0; lane < LANES; ++lane) {
    const bool is_right = lane & WIDTH;
    first[lane] = is_right ? LANES + lane - WIDTH : lane;
    second[lane] = is_right ? LANES + lane : lane + WIDTH;
  }
  const U32x16 above = upper;
#if defined(__clang__)
  const U32x16 below = lower;
  for (int lane = 0; lane < LANES; ++lane) {
    upper[lane] = (first[lane] < LANES ? above : below)[first[lane] % LANES];
    lower[lane] = (second[lane] < LANES ? above : below)[second[lane] % LANES];
  }
#else
  upper = __builtin_shuffle(above, lower, first);
  lower = __builtin_shuffle(above, lower, second);
#endif
}

template <int WIDTH>
inline void swap_squares(U32x16 (&rows)[LANES]) {
#pragma GCC unroll 16
  for (int row = 0; row < LANES; ++row)
    if (!(row & WIDTH)) swap_across<WIDTH>(rows[row], rows[row + WIDTH]);
}

// Lane j of row i ↔ lane i of row j.
inline void transpose(U32x16 (&rows)[LANES]) {
  swap_squares<1>(rows);
  swap_squares<2>(rows);
  swap_squares<4>(rows);
  swap_squares<8>(rows);
}

// e to the power of x, for x <= 88; relative error about 2e-7; 0 below -87, NaN of NaN. Cody and Waite's reduction,
// Taylor's series.
inline F32x16 exp_of(F32x16 x) {
  const F32x16 magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to whole numbers
  const F32x16 shifted = fma(x, splat(1.44269504f), magic);
  const F32x16 whole = shifted - magic;
  F32x16 rest = fma(whole, splat(-0.693359375f), x);
  rest = fma(whole, splat(2.12194440e-4f), rest);
  F32x16 series = splat(1.0f / 5040);
  series = fma(series, rest, splat(1.0f / 720));
  series = fma(series, rest, splat(1.0f / 120));
  series = fma(series, rest, splat(1.0f / 24));
  series = fma(series, rest, splat(1.0f / 6));
  series = fma(series, rest, splat(0.5f));
  series = fma(series, rest, splat(1.0f));
  series = fma(series, rest, splat(1.0f));
  const U32x16 power = bits_of<U32x16>(shifted) << 23;  // of 2, into the exponent
  const F32x16 scaled = bits_of<F32x16>(bits_of<U32x16>(series) + power);
  return x < -87.0f ? F32x16{} : (x == x ? scaled : x);
}

inline int64_t padded(int64_t count) { return (count + 31) / 32 * 32; }

}  // namespace kvferry
