// Conversions between the forms of a state, and the memory reference. Part of adam-inl.h.

#pragma once

#include "adam_arrays-inl.h"
#include "moment_code-inl.h"

namespace lohan {
namespace {

void SplitAll(const float* master, uint16_t* weights, int16_t* remainder, int64_t count) {
  const auto split = [](const float* source, uint16_t* to_weights, int16_t* to_remainder) {
    Split(BitsOf(CanonicalNan(Load<Floats>(source))), BitsOf(CanonicalNan(Load<Floats>(source + kLanes))),
          to_weights, to_remainder);
  };
  int64_t i = 0;
  for (; i + kPair <= count; i += kPair) split(master + i, weights + i, remainder + i);
  if (i == count) return;
  float master_copy[kPair] = {};
  uint16_t weights_copy[kPair];
  int16_t remainder_copy[kPair];
  CopyIn(master, i, count, i, master_copy);
  split(master_copy, weights_copy, remainder_copy);
  CopyOut(weights_copy, i, count, i, weights);
  CopyOut(remainder_copy, i, count, i, remainder);
}

void JoinAll(const uint16_t* weights, const int16_t* remainder, float* master, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(Join(weights + i, remainder + i), master + i);
  if (i == count) return;
  uint16_t weights_copy[kLanes] = {};
  int16_t remainder_copy[kLanes] = {};
  float master_copy[kLanes];
  CopyIn(weights, i, count, i, weights_copy);
  CopyIn(remainder, i, count, i, remainder_copy);
  Store(Join(weights_copy, remainder_copy), master_copy);
  CopyOut(master_copy, i, count, i, master);
}

template <MomentCode kCode>
void DecodeAll(const uint8_t* codes, const float* scales, float* moments, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Decoder decoder(kCode == MomentCode::kFirst ? kSignedCode : kUnsignedCode,
                          scales[i / kMomentBlockElements]);
    uint8_t copy[kLanes] = {};
    const int64_t last = count - i < kLanes ? count : i + kLanes;
    CopyIn(codes, i, last, i, copy);
    Floats values;
    if constexpr (kCode == MomentCode::kFirst) {
      values = decoder.First(copy);
    } else {
      values = decoder.Root(copy);
      values *= values;
    }
    float decoded[kLanes];
    Store(CanonicalNan(values), decoded);
    CopyOut(decoded, i, last, i, moments);
  }
}

void ReadModifyWrite(float* a, float* b, float* c, const float* d, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const auto source = Load<Floats>(d + i);
    Store(Load<Floats>(a + i) + source, a + i);
    Store(Load<Floats>(b + i) + source, b + i);
    Store(Load<Floats>(c + i) + source, c + i);
  }
  for (; i < count; ++i) {
    a[i] += d[i];
    b[i] += d[i];
    c[i] += d[i];
  }
}

}  // namespace
}  // namespace lohan
