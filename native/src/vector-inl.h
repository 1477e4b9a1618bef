// Vectors of kLanes elements for the kernels, in GCC's vector types: the same source becomes SSE2, AVX2 or
// AVX-512 code by the flags of the file that includes it.
//
// Two rules keep the kernels safe and exact. Nothing here may call an inline function or template from
// another header: the linker keeps one copy of those, and it could be the AVX-512 one. (The compiler's
// intrinsics have no such copy: they are always inlined. They stand where GCC 12 takes a vector apart.) All
// arithmetic is element-wise IEEE that the compiler (without -ffast-math, with -ffp-contract=off) may neither
// reassociate nor fuse, so all builds give the same bits.

#pragma once

#include <stdint.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "store_kind.h"

namespace lohan {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
// The forms with a mask are the same instructions without GCC 12's false warning of an undefined operand.
constexpr __mmask16 kAllLanes = 0xFFFF;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
constexpr int kDoubleLanes = kLanes / 2;
typedef double Doubles __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef int16_t SignedHalves __attribute__((vector_size(kLanes * 2)));

template <typename Vector, typename Element>
inline Vector Load(const Element* source) {
  Vector vector;
  __builtin_memcpy(&vector, source, sizeof(vector));
  return vector;
}

/// Streaming stores are of whole vectors to targets aligned to them; where there are none, ordinary ones.
template <StoreKind kStore = StoreKind::kOrdinary, typename Vector, typename Element>
inline void Store(const Vector& vector, Element* target) {
#if defined(__SSE2__)
  if constexpr (kStore == StoreKind::kStreaming) {
    static_assert(sizeof(Vector) == sizeof(Floats));
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), __builtin_bit_cast(__m512i, vector));
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), __builtin_bit_cast(__m256i, vector));
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(target), __builtin_bit_cast(__m128i, vector));
#endif
    return;
  }
#endif
  __builtin_memcpy(target, &vector, sizeof(vector));
}

/// kDoubleLanes floats, each as a double.
inline Doubles LoadAsDoubles(const float* source) {
  typedef float HalfOfFloats __attribute__((vector_size(kLanes * 2)));
  return __builtin_convertvector(Load<HalfOfFloats>(source), Doubles);
}

inline Floats Broadcast(float value) { return value - Floats{}; }
inline Words BroadcastWord(uint32_t value) { return value - Words{}; }
inline Words BitsOf(Floats values) { return __builtin_bit_cast(Words, values); }
inline Floats FromBits(Words bits) { return __builtin_bit_cast(Floats, bits); }

/// `values`, negated in the lanes in which `signs` has its sign's bit set.
inline Floats FlipSigns(Floats values, Floats signs) {
#if defined(__AVX512F__)
  constexpr int kXorOfAnd = 0xF0 ^ (0xCC & 0xAA);  // of the three operands' truth tables
  return __builtin_bit_cast(
      Floats,
      _mm512_ternarylogic_epi32(__builtin_bit_cast(__m512i, values), __builtin_bit_cast(__m512i, signs),
                                _mm512_set1_epi32(static_cast<int32_t>(0x80000000u)), kXorOfAnd));
#else
  return FromBits(BitsOf(values) ^ (BitsOf(signs) & 0x80000000u));
#endif
}

inline Floats SquareRoot(Floats values) {
#if defined(__AVX512F__)
  return _mm512_maskz_sqrt_ps(kAllLanes, values);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(values);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(values);
#else
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = __builtin_sqrtf(values[lane]);
  return values;
#endif
}

/// kLanes 16-bit numbers, each in its lane.
inline Words LoadHalves(const uint16_t* source) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(Words, _mm512_maskz_cvtepu16_epi32(kAllLanes, Load<__m256i>(source)));
#elif defined(__AVX2__)
  return __builtin_bit_cast(Words, _mm256_cvtepu16_epi32(Load<__m128i>(source)));
#else
  return __builtin_convertvector(Load<Halves>(source), Words);
#endif
}

inline Ints LoadHalves(const int16_t* source) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(Ints, _mm512_maskz_cvtepi16_epi32(kAllLanes, Load<__m256i>(source)));
#elif defined(__AVX2__)
  return __builtin_bit_cast(Ints, _mm256_cvtepi16_epi32(Load<__m128i>(source)));
#else
  return __builtin_convertvector(Load<SignedHalves>(source), Ints);
#endif
}

/// kLanes bytes, each in its lane.
inline Ints LoadBytes(const uint8_t* source) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(Ints, _mm512_maskz_cvtepu8_epi32(kAllLanes, Load<__m128i>(source)));
#elif defined(__AVX2__)
  return __builtin_bit_cast(Ints,
                            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source))));
#else
  Ints values;
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = source[lane];
  return values;
#endif
}

/// kLanes signed bytes, each in its lane.
inline Ints LoadSignedBytes(const uint8_t* source) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(Ints, _mm512_maskz_cvtepi8_epi32(kAllLanes, Load<__m128i>(source)));
#elif defined(__AVX2__)
  return __builtin_bit_cast(Ints,
                            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source))));
#else
  Ints values;
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = static_cast<int8_t>(source[lane]);
  return values;
#endif
}

/// The lower 16 bits of each lane of both vectors, in order.
template <StoreKind kStore = StoreKind::kOrdinary, typename Element>
inline void StoreLowerHalves(Words first, Words second, Element* target) {
  static_assert(sizeof(Element) == 2);
#if defined(__AVX512F__)
  typedef uint16_t AllHalves __attribute__((vector_size(64)));
  constexpr AllHalves kEven = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                               32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  Store<kStore>(
      __builtin_shuffle(__builtin_bit_cast(AllHalves, first), __builtin_bit_cast(AllHalves, second), kEven),
      target);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32(__builtin_bit_cast(__m256i, first & 0xFFFF),
                                             __builtin_bit_cast(__m256i, second & 0xFFFF));
  // Packing works in halves of 128 bits.
  Store<kStore>(_mm256_permute4x64_epi64(packed, 0b11011000), target);
#elif defined(__SSE2__)
  // Sign-extended, so that packing, which saturates, finds nothing too large.
  Store<kStore>(_mm_packs_epi32(__builtin_bit_cast(__m128i, __builtin_bit_cast(Ints, first << 16) >> 16),
                                __builtin_bit_cast(__m128i, __builtin_bit_cast(Ints, second << 16) >> 16)),
                target);
#else
  Store(__builtin_convertvector(first, Halves), target);
  Store(__builtin_convertvector(second, Halves), target + kLanes);
#endif
}

/// The upper 16 bits of each lane of both vectors, in order.
template <StoreKind kStore = StoreKind::kOrdinary, typename Element>
inline void StoreUpperHalves(Words first, Words second, Element* target) {
#if defined(__AVX512F__)
  typedef uint16_t AllHalves __attribute__((vector_size(64)));
  constexpr AllHalves kOdd = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                              33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  Store<kStore>(
      __builtin_shuffle(__builtin_bit_cast(AllHalves, first), __builtin_bit_cast(AllHalves, second), kOdd),
      target);
#else
  StoreLowerHalves<kStore>(first >> 16, second >> 16, target);
#endif
}

/// What four vectors' lanes make as bytes.
constexpr int kBytesStored = 4 * kLanes;

enum class Bytes { kSigned, kUnsigned };

/// Each lane of four vectors as a byte, in order; numbers that a byte cannot hold become the nearest it can.
template <Bytes kKind, StoreKind kStore>
inline void StoreBytes(const Ints (&values)[4], uint8_t* target) {
#if defined(__AVX512F__)
  __m512i v[4];
  for (int i = 0; i < 4; ++i) v[i] = __builtin_bit_cast(__m512i, values[i]);
  __m512i packed;
  if constexpr (kKind == Bytes::kSigned) {
    packed = _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
  } else {
    packed = _mm512_packus_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
  }
  // Packing works in parts of 128 bits: the four bytes of vector i's part k are now group 4k + i.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  Store<kStore>(_mm512_maskz_permutexvar_epi32(kAllLanes, order, packed), target);
#elif defined(__AVX2__)
  __m256i v[4];
  for (int i = 0; i < 4; ++i) v[i] = __builtin_bit_cast(__m256i, values[i]);
  __m256i packed;
  if constexpr (kKind == Bytes::kSigned) {
    packed = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  } else {
    packed = _mm256_packus_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  }
  // Packing works in parts of 128 bits: the four bytes of vector i's part k are now group 4k + i.
  Store<kStore>(_mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)), target);
#else
  static_assert(kStore == StoreKind::kOrdinary);
  constexpr int32_t kLeast = kKind == Bytes::kSigned ? -128 : 0;
  constexpr int32_t kMost = kKind == Bytes::kSigned ? 127 : 255;
  for (int i = 0; i < kBytesStored; ++i) {
    const int32_t value = values[i / kLanes][i % kLanes];
    target[i] = static_cast<uint8_t>(value < kLeast ? kLeast : value > kMost ? kMost : value);
  }
#endif
}

/// table[index[lane] % 8] in each lane; the table's second half repeats the first.
inline Floats LookUp(const float (&table)[16], Ints index) {
#if defined(__AVX2__)
  return __builtin_shuffle(Load<Floats>(table), index);
#else
  Floats values;
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = table[index[lane] & 7];
  return values;
#endif
}

/// Such a table times a factor; in a register where one holds it.
#if defined(__AVX2__)
struct ScaledTable {
  Floats values;

  ScaledTable(const float (&table)[16], float scale) : values(Load<Floats>(table) * scale) {}
  Floats At(Ints index) const { return __builtin_shuffle(values, index); }
};
#else
struct ScaledTable {
  float values[16];

  ScaledTable(const float (&table)[16], float scale) {
    for (int i = 0; i < 16; ++i) values[i] = table[i] * scale;
  }
  Floats At(Ints index) const { return LookUp(values, index); }
};
#endif

#if defined(__AVX512F__)
/// table[index[lane] % 32] in each lane.
inline Floats LookUp(const float (&table)[32], Ints index) {
  return __builtin_shuffle(Load<Floats>(table), Load<Floats>(table + 16), index);
}
#endif

/// max(values - amount, 0) of values in [0, 65535].
inline Ints SubtractSaturating(Ints values, uint16_t amount) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(
      Ints, _mm512_subs_epu16(__builtin_bit_cast(__m512i, values), _mm512_set1_epi32(amount)));
#elif defined(__AVX2__)
  return __builtin_bit_cast(
      Ints, _mm256_subs_epu16(__builtin_bit_cast(__m256i, values), _mm256_set1_epi32(amount)));
#elif defined(__SSE2__)
  return __builtin_bit_cast(Ints,
                            _mm_subs_epu16(__builtin_bit_cast(__m128i, values), _mm_set1_epi32(amount)));
#else
  const Ints difference = values - static_cast<int32_t>(amount);
  return difference > 0 ? difference : Ints{};
#endif
}

/// The product where both factors and it are in [0, 32767]: one instruction where 32-bit products take two.
inline Ints MultiplySmall(Ints values, int16_t factor) {
  typedef int16_t Shorts __attribute__((vector_size(sizeof(Ints))));
  return __builtin_bit_cast(Ints, __builtin_bit_cast(Shorts, values) * factor);
}

/// Rounds towards zero; a NaN or a too large value becomes the least number.
inline Ints Truncate(Floats values) {
#if defined(__SSE2__)
  return __builtin_convertvector(values, Ints);
#else
  Ints result;
  for (int lane = 0; lane < kLanes; ++lane) {
    const float value = values[lane];
    result[lane] = value > -2147483648.0f && value < 2147483648.0f ? static_cast<int32_t>(value) : INT32_MIN;
  }
  return result;
#endif
}

/// The largest of all lanes.
inline int32_t LargestLane(Ints values) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    Ints partner;
    for (int lane = 0; lane < kLanes; ++lane) partner[lane] = lane ^ distance;
    const Ints others = __builtin_shuffle(values, partner);
    values = others > values ? others : values;
  }
  return values[0];
}

inline bool AnyNan(Floats values) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps(values, values, _CMP_UNORD_Q)) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps(_mm_cmpunord_ps(values, values)) != 0;
#else
  bool any = false;
  for (int lane = 0; lane < kLanes; ++lane) any |= values[lane] != values[lane];
  return any;
#endif
}

inline Floats CanonicalNan(Floats values) {
  return values != values ? FromBits(BroadcastWord(0x7FC00000u)) : values;
}

}  // namespace
}  // namespace lohan
