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

namespace lohan {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
// The forms with a mask are the same instructions without GCC 12's false warning of an undefined operand.
constexpr __mmask16 kAllLanes = 0xFFFF;
constexpr __mmask8 kAllDoubles = 0xFF;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef int16_t SignedHalves __attribute__((vector_size(kLanes * 2)));
// Doubles are twice as wide: half a vector of floats at a time.
typedef float HalfFloats __attribute__((vector_size(kLanes * 2)));
typedef double Doubles __attribute__((vector_size(kLanes * 4)));

template <typename Vector, typename Element>
inline Vector Load(const Element* source) {
  Vector vector;
  __builtin_memcpy(&vector, source, sizeof(vector));
  return vector;
}

template <typename Vector, typename Element>
inline void Store(const Vector& vector, Element* target) {
  __builtin_memcpy(target, &vector, sizeof(vector));
}

inline Floats Broadcast(float value) { return value - Floats{}; }
inline Words BroadcastWord(uint32_t value) { return value - Words{}; }
inline Words BitsOf(Floats values) { return __builtin_bit_cast(Words, values); }
inline Floats FromBits(Words bits) { return __builtin_bit_cast(Floats, bits); }

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

/// The lower 16 bits of each lane.
template <typename Element>
inline void StoreHalves(Words values, Element* target) {
  static_assert(sizeof(Element) == 2);
#if defined(__AVX512F__)
  Store(_mm512_maskz_cvtepi32_epi16(kAllLanes, __builtin_bit_cast(__m512i, values)), target);
#else
  Store(__builtin_convertvector(values, Halves), target);
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

/// The lowest byte of each lane.
inline void StoreBytes(Ints values, uint8_t* target) {
#if defined(__AVX512F__)
  Store(_mm512_maskz_cvtepi32_epi8(kAllLanes, __builtin_bit_cast(__m512i, values)), target);
#elif defined(__AVX2__)
  const __m256i words =
      _mm256_packus_epi32(__builtin_bit_cast(__m256i, values & 0xFF), _mm256_setzero_si256());
  const __m256i bytes =
      _mm256_packus_epi16(words, words);  // lanes 0-3 in bytes 0-3, lanes 4-7 in bytes 16-19
  const uint32_t low = static_cast<uint32_t>(_mm256_extract_epi32(bytes, 0));
  const uint32_t high = static_cast<uint32_t>(_mm256_extract_epi32(bytes, 4));
  Store(low | static_cast<uint64_t>(high) << 32, target);
#else
  for (int lane = 0; lane < kLanes; ++lane) target[lane] = static_cast<uint8_t>(values[lane]);
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

/// The lower and the upper half of a vector, as doubles.
inline Doubles LowerDoubles(Floats values) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtps_pd(kAllDoubles, __builtin_shufflevector(values, values, 0, 1, 2, 3, 4, 5, 6, 7));
#elif defined(__AVX2__)
  return _mm256_cvtps_pd(_mm256_castps256_ps128(values));
#else
  return __builtin_convertvector(Load<HalfFloats>(reinterpret_cast<const float*>(&values)), Doubles);
#endif
}

inline Doubles UpperDoubles(Floats values) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtps_pd(kAllDoubles,
                               __builtin_shufflevector(values, values, 8, 9, 10, 11, 12, 13, 14, 15));
#elif defined(__AVX2__)
  return _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
#else
  return __builtin_convertvector(Load<HalfFloats>(reinterpret_cast<const float*>(&values) + kLanes / 2),
                                 Doubles);
#endif
}

/// The product where both factors and it are in [0, 32767]: one instruction where 32-bit products take two.
inline Ints MultiplySmall(Ints values, int16_t factor) {
  typedef int16_t Shorts __attribute__((vector_size(sizeof(Ints))));
  return __builtin_bit_cast(Ints, __builtin_bit_cast(Shorts, values) * factor);
}

/// Rounds towards zero; the lowest byte of a NaN's or a too large value's result is 0.
inline Ints Truncate(Floats values) {
#if defined(__SSE2__)
  return __builtin_convertvector(values, Ints);
#else
  Ints result;
  for (int lane = 0; lane < kLanes; ++lane) {
    const float value = values[lane];
    result[lane] = value > -2147483648.0f && value < 2147483648.0f ? static_cast<int32_t>(value) : 0;
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

// Which NaN an operation on two NaNs returns depends on operand order, which the compiler chooses: one
// canonical NaN keeps the builds bitwise equal.
inline Floats CanonicalNan(Floats values) {
  return values != values ? FromBits(BroadcastWord(0x7FC00000u)) : values;
}

}  // namespace
}  // namespace lohan
