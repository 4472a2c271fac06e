// Tile registers of AMX: eight of them, 16 rows of 64 bytes each, and products of two added to a third.
//
// Instructions are written out, since compilers' own wrappers do not say what memory they read. Built with
// KVFERRY_EMULATE_AMX they are plain code that takes the steps of Intel's manual, so that other processors can test what
// is written on top of them. A thread may use them while it has a `Session`, a process once it is `permitted`.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define KVFERRY_HAS_AMX
#endif

namespace kvferry::amx {

constexpr int64_t ROWS = 16;   // of a register
constexpr int64_t UNITS = 16;  // of its row
constexpr int REGISTERS = 8;

// What registers hold, as the processor wants to be told. Palette 0: nothing.
struct alignas(64) Shapes {
  uint8_t palette, start_row, unused[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Shapes) == 64);

constexpr Shapes whole_registers() {
  Shapes shapes = {1, 0, {}, {}, {}};
  for (int number = 0; number < REGISTERS; ++number) {
    shapes.row_bytes[number] = VECTOR_BYTES;
    shapes.rows[number] = ROWS;
  }
  return shapes;
}

// Registers `NUMBER` from memory and back, their rows `stride_bytes` apart.
template <int NUMBER>
void zero();
template <int NUMBER>
void load(const void* from, int64_t stride_bytes);
template <int NUMBER>
void store(void* to, int64_t stride_bytes);
// SUMS += ROWS_OF · COLUMNS, which have pairs of bfloat16.
template <int SUMS, int ROWS_OF, int COLUMNS>
void dot_bf16();

#if defined(KVFERRY_EMULATE_AMX)

constexpr bool IS_PRESENT = true;

inline bool permitted() { return true; }

struct Emulated {
  Shapes shapes;
  U32x16 registers[REGISTERS][ROWS];
};

inline Emulated& emulated() {
  thread_local Emulated own = {};
  return own;
}

// The processor raises an exception.
inline void require(bool holds) {
  if (!holds) __builtin_trap();
}

inline void configure(const Shapes& shapes) {
  emulated() = {};
  emulated().shapes = shapes;
}

inline void release() { emulated() = {}; }

template <int NUMBER>
inline U32x16* used() {
  require(emulated().shapes.palette == 1 && emulated().shapes.rows[NUMBER] > 0);
  return emulated().registers[NUMBER];
}

template <int NUMBER>
inline void zero() {
  std::memset(used<NUMBER>(), 0, ROWS * VECTOR_BYTES);
}

template <int NUMBER>
inline void load(const void* from, int64_t stride_bytes) {
  zero<NUMBER>();
  const Shapes& shapes = emulated().shapes;
  for (int64_t row = 0; row < shapes.rows[NUMBER]; ++row)
    std::memcpy(used<NUMBER>() + row, static_cast<const char*>(from) + row * stride_bytes, shapes.row_bytes[NUMBER]);
}

template <int NUMBER>
inline void store(void* to, int64_t stride_bytes) {
  const Shapes& shapes = emulated().shapes;
  for (int64_t row = 0; row < shapes.rows[NUMBER]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride_bytes, used<NUMBER>() + row, shapes.row_bytes[NUMBER]);
}

// What is too small for a normal number is taken for zero, before and after each operation.
inline F32x16 flushed(F32x16 values) {
  const U32x16 bits = bits_of<U32x16>(values);
  return bits_of<F32x16>((bits & 0x7f800000u) == 0u ? bits & 0x80000000u : bits);
}

inline F32x16 add_product(U32x16 a, U32x16 b, F32x16 sum) {
  return flushed(fma(flushed(bits_of<F32x16>(a)), flushed(bits_of<F32x16>(b)), sum));
}

// A row's pairs with the columns' pairs: first values and second ones have sums of their own, which meet at the end.
template <int SUMS, int ROWS_OF, int COLUMNS>
inline void dot_bf16() {
  const Shapes& shapes = emulated().shapes;
  const int64_t num_units = shapes.row_bytes[ROWS_OF] / 4;
  require(shapes.rows[SUMS] == shapes.rows[ROWS_OF] && shapes.rows[COLUMNS] == num_units &&
          shapes.row_bytes[SUMS] == shapes.row_bytes[COLUMNS]);
  F32x16 columns[2];
  for (int64_t row = 0; row < shapes.rows[SUMS]; ++row) {
    F32x16 first = {}, second = {};
    for (int64_t unit = 0; unit < num_units; ++unit) {
      const U32x16 one = splat_bits(used<ROWS_OF>()[row][unit]), column = used<COLUMNS>()[unit];
      first = add_product(one << 16, column << 16, first);
      second = add_product(one & 0xffff0000u, column & 0xffff0000u, second);
    }
    const F32x16 sum = flushed(bits_of<F32x16>(used<SUMS>()[row]));
    used<SUMS>()[row] = bits_of<U32x16>(flushed(sum + flushed(first + second)));
  }
}

#elif defined(KVFERRY_HAS_AMX)

constexpr bool IS_PRESENT = true;

// Linux has memory for the registers for those processes alone that asked for it.
inline bool permitted() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

inline void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

inline void release() { asm volatile("tilerelease"); }

template <int NUMBER>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(NUMBER));
}

template <int NUMBER>
inline void load(const void* from, int64_t stride_bytes) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(NUMBER), "r"(from), "r"(stride_bytes) : "memory");
}

template <int NUMBER>
inline void store(void* to, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(NUMBER), "r"(to), "r"(stride_bytes) : "memory");
}

template <int SUMS, int ROWS_OF, int COLUMNS>
inline void dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS_OF), "i"(COLUMNS));
}

#else

constexpr bool IS_PRESENT = false;

inline bool permitted() { return true; }  // nothing is asked for
inline void configure(const Shapes&) {}
inline void release() {}

#endif

// Of one thread. What it leaves behind costs nothing when the system changes to another thread.
class Session {
 public:
  Session() {
    static constexpr Shapes SHAPES = whole_registers();
    configure(SHAPES);
  }
  ~Session() { release(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

constexpr int64_t COLUMNS = 2 * UNITS;  // of weights: two registers beside each other

// One step of a product: 16 units of 16 · BLOCKS rows and of 32 outputs. Registers 0 … 3 are sums, 4 and 5 rows, 6 and 7
// weights; four sums hide what one product takes.
template <int BLOCKS>
inline void step(const uint32_t* rows, int64_t stride, const uint32_t* weights) {
  load<6>(weights, COLUMNS * 4);
  load<4>(rows, stride * 4);
  dot_bf16<0, 4, 6>();
  load<7>(weights + UNITS, COLUMNS * 4);
  dot_bf16<1, 4, 7>();
  if constexpr (BLOCKS == 2) {
    load<5>(rows + ROWS * stride, stride * 4);
    dot_bf16<2, 5, 6>();
    dot_bf16<3, 5, 7>();
  }
}

// The last units, fewer than 16, with zeros behind them.
template <int BLOCKS>
inline void last_step(const uint32_t* rows, int64_t stride, const uint32_t* weights, int64_t num_units) {
  uint32_t some_rows[BLOCKS * ROWS][UNITS] = {}, some_weights[UNITS][COLUMNS] = {};
  for (int64_t row = 0; row < BLOCKS * ROWS; ++row) std::memcpy(some_rows[row], rows + row * stride, num_units * 4);
  std::memcpy(some_weights, weights, num_units * COLUMNS * 4);
  step<BLOCKS>(some_rows[0], UNITS, some_weights[0]);
}

// Sums of 16 · BLOCKS rows of bfloat16 with 32 outputs' weights [units][32]. Each sum takes the same steps, whatever
// BLOCKS is. In a session.
template <int BLOCKS>
inline void sum_rows(const uint32_t* rows, int64_t stride, const uint32_t* weights, int64_t num_units,
                     float (&sums)[BLOCKS * ROWS][COLUMNS]) {
  zero<0>();
  zero<1>();
  if constexpr (BLOCKS == 2) {
    zero<2>();
    zero<3>();
  }
  int64_t unit = 0;
  for (; unit + UNITS <= num_units; unit += UNITS) step<BLOCKS>(rows + unit, stride, weights + unit * COLUMNS);
  if (unit < num_units) last_step<BLOCKS>(rows + unit, stride, weights + unit * COLUMNS, num_units - unit);
  store<0>(sums[0], sizeof sums[0]);
  store<1>(sums[0] + UNITS, sizeof sums[0]);
  if constexpr (BLOCKS == 2) {
    store<2>(sums[ROWS], sizeof sums[0]);
    store<3>(sums[ROWS] + UNITS, sizeof sums[0]);
  }
}

}  // namespace kvferry::amx
