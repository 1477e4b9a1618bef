// How the AdamW kernels reach their arrays: gradients and master weights in their forms, groups that a range
// covers in part, and the squares that go into the norm. Part of adam-inl.h.
//
// Everything works in groups of 32 elements that begin at multiples of 32: two of the widest vectors, whose
// bytes and halves make whole vectors again. A range that covers a group in part goes through a copy of the
// group, so that every element meets the same instructions.

#pragma once

#include "adam_kernels.h"
#include "vector-inl.h"

namespace lohan {
namespace {

constexpr int64_t kGroup = 32;
constexpr int64_t kPair = 2 * kLanes;

// ---------------------------------------------------------------- loading and storing

template <GradientType kType>
struct GradientOf {
  using Element = float;
  static Floats LoadFrom(const float* source) { return Load<Floats>(source); }
};

template <>
struct GradientOf<GradientType::kBfloat16> {
  using Element = uint16_t;
  static Floats LoadFrom(const uint16_t* source) { return FromBits(LoadHalves(source) << 16); }
};

/// Rounds to nearest even; the values hold no NaN but the canonical one, whose rounding is itself.
template <StoreKind kStore>
inline void StoreBfloat16(Words first, Words second, uint16_t* target) {
  // Adds just under half of the dropped 16 bits' range, and one more when the kept part is odd.
  StoreUpperHalves<kStore>(first + 0x7FFFu + ((first >> 16) & 1u), second + 0x7FFFu + ((second >> 16) & 1u),
                           target);
}

inline Floats Join(const uint16_t* weights, const int16_t* remainder) {
  return FromBits((LoadHalves(weights) << 16) + __builtin_bit_cast(Words, LoadHalves(remainder)));
}

/// The values hold no NaN but the canonical one.
template <StoreKind kStore = StoreKind::kOrdinary>
inline void Split(Words first, Words second, uint16_t* weights, int16_t* remainder) {
  StoreUpperHalves<kStore>(first + 0x8000u, second + 0x8000u, weights);
  // What the rounding left out lies in [-32768, 32767]: the low 16 bits, read as a signed number.
  StoreLowerHalves<kStore>(first, second, remainder);
}

/// Asks for the cache line 512 elements ahead. The processor's own prefetching starts anew at every page of
/// every stream; asking early gives 8-16 % on 16 cores (beyond the arrays' end it does nothing).
template <typename Element>
inline void Prefetch(const Element* group) {
  __builtin_prefetch(group + 512);
  if constexpr (sizeof(Element) * kGroup > 64) __builtin_prefetch(group + 512 + kGroup / 2);
}

// ---------------------------------------------------------------- the norm

/// The kNormLanes sums of a part of kNormPartElements, in registers.
struct Sums {
  Floats parts[kNormLanes / kLanes];

  explicit Sums(const float* sums) {
    for (int part = 0; part < kNormLanes / kLanes; ++part) parts[part] = Load<Floats>(sums + part * kLanes);
  }
  void StoreTo(float* sums) const {
    for (int part = 0; part < kNormLanes / kLanes; ++part) Store(parts[part], sums + part * kLanes);
  }
  /// Adds the squares of a group's vector number `vector`.
  void Add(Floats squares, int vector) { parts[vector % (kNormLanes / kLanes)] += squares; }
};

/// Calls body(part's begin, its end, its sums) for the parts of kNormPartElements that [begin, end) touches.
template <typename Body>
inline void ForNormParts(int64_t begin, int64_t end, float* block_sums, Body&& body) {
  for (int64_t start = begin; start < end;) {
    const int64_t part = start / kNormPartElements;
    const int64_t stop = (part + 1) * kNormPartElements < end ? (part + 1) * kNormPartElements : end;
    body(start, stop, block_sums + part % (kBlockElements / kNormPartElements) * kNormLanes);
    start = stop;
  }
}

/// Calls body(group's first element) for whole groups and partial(begin, end within the group, its first
/// element) for the others.
template <typename Whole, typename Partial>
inline void ForGroups(int64_t begin, int64_t end, Whole&& whole, Partial&& partial) {
  int64_t group = begin / kGroup * kGroup;
  if (group < begin) {
    partial(begin, end < group + kGroup ? end : group + kGroup, group);
    group += kGroup;
  }
  for (; group + kGroup <= end; group += kGroup) whole(group);
  if (group < end) partial(group, end, group);
}

/// Copies elements [begin, end) of `source` to their places in a group's copy.
template <typename Element>
inline void CopyIn(const Element* source, int64_t begin, int64_t end, int64_t group, Element* copy) {
  __builtin_memcpy(copy + (begin - group), source + begin,
                   static_cast<uint64_t>(end - begin) * sizeof(Element));
}
template <typename Element>
inline void CopyOut(const Element* copy, int64_t begin, int64_t end, int64_t group, Element* target) {
  __builtin_memcpy(target + begin, copy + (begin - group),
                   static_cast<uint64_t>(end - begin) * sizeof(Element));
}

template <GradientType kType>
void AddSquares(const void* gradients, float gradient_scale, int64_t begin, int64_t end, float* block_sums) {
  using Gradient = GradientOf<kType>;
  const auto* source = static_cast<const typename Gradient::Element*>(gradients);
  const Floats scale = Broadcast(gradient_scale);
  ForNormParts(begin, end, block_sums, [&](int64_t start, int64_t stop, float* sums) {
    Sums accumulated(sums);
    const auto add = [&](const typename Gradient::Element* group) {
      for (int vector = 0; vector < kGroup / kLanes; ++vector) {
        const Floats gradient = Gradient::LoadFrom(group + vector * kLanes) * scale;
        accumulated.Add(gradient * gradient, vector);
      }
    };
    ForGroups(
        start, stop, [&](int64_t group) { add(source + group); },
        [&](int64_t first, int64_t last, int64_t group) {
          typename Gradient::Element copy[kGroup] = {};
          CopyIn(source, first, last, group, copy);
          add(copy);
        });
    accumulated.StoreTo(sums);
  });
}

double SumOf(const float* block_sums) {
  constexpr int kVectors = kNormLanes / kDoubleLanes;
  Doubles lanes[kVectors] = {};
  for (int64_t part = 0; part < kNormSumsPerBlock; part += kNormLanes) {
    for (int vector = 0; vector < kVectors; ++vector) {
      lanes[vector] += LoadAsDoubles(block_sums + part + vector * kDoubleLanes);
    }
  }
  double sums[kNormLanes];
  for (int vector = 0; vector < kVectors; ++vector) Store(lanes[vector], sums + vector * kDoubleLanes);
  for (int64_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

template <GradientType kType>
void AddExactly(const void* gradients, float gradient_scale, int64_t begin, int64_t end, ExactNorm* norm) {
  const auto* source = static_cast<const typename GradientOf<kType>::Element*>(gradients);
  for (int64_t i = begin; i < end; ++i) {
    float value;
    if constexpr (kType == GradientType::kFloat32) {
      value = source[i];
    } else {
      value = __builtin_bit_cast(float, static_cast<uint32_t>(source[i]) << 16);
    }
    value *= gradient_scale;
    norm->squared_norm += static_cast<double>(value) * static_cast<double>(value);
    norm->non_finite += (__builtin_bit_cast(uint32_t, value) & 0x7F800000u) == 0x7F800000u;
  }
}

template <MasterKernel kMaster>
struct MasterOf {
  static Floats LoadFrom(const AdamState& in, int64_t i) {
    if constexpr (kMaster == kSplitMaster) return Join(in.weights + i, in.remainder + i);
    if constexpr (kMaster != kSplitMaster) return Load<Floats>(in.master + i);
  }

  static void PrefetchAt(const AdamState& in, int64_t group) {
    if constexpr (kMaster == kSplitMaster) {
      Prefetch(in.weights + group);
      Prefetch(in.remainder + group);
    } else {
      Prefetch(in.master + group);
    }
  }

  /// Two vectors at a time: halves of two make a whole one.
  template <StoreKind kStore>
  static void StoreTo(Floats first, Floats second, const AdamState& out, int64_t i) {
    if constexpr (kMaster == kSplitMaster) {
      Split<kStore>(BitsOf(first), BitsOf(second), out.weights + i, out.remainder + i);
    } else {
      Store<kStore>(first, out.master + i);
      Store<kStore>(second, out.master + i + kLanes);
      if constexpr (kMaster == kFloat32MasterWithWeights)
        StoreBfloat16<kStore>(BitsOf(first), BitsOf(second), out.weights + i);
    }
  }
};

/// A group's copy of the arrays that any form of the state has.
template <typename GradientElement>
struct GroupCopy {
  GradientElement gradients[kGroup] = {};
  float master[kGroup] = {}, first_moment[kGroup] = {}, second_moment[kGroup] = {};
  uint16_t weights[kGroup] = {};
  int16_t remainder[kGroup] = {};
  uint8_t first_codes[kGroup] = {}, second_codes[kGroup] = {};

  AdamState State() {
    return {master,      weights,      remainder, first_moment, second_moment,
            first_codes, second_codes, nullptr,   nullptr};
  }
};

template <MasterKernel kMaster>
void CopyMasterIn(const AdamState& in, int64_t begin, int64_t end, int64_t group, const AdamState& copy) {
  if constexpr (kMaster == kSplitMaster) {
    CopyIn(in.weights, begin, end, group, copy.weights);
    CopyIn(in.remainder, begin, end, group, copy.remainder);
  } else {
    CopyIn(in.master, begin, end, group, copy.master);
  }
}

template <MasterKernel kMaster>
void CopyMasterOut(const AdamState& copy, int64_t begin, int64_t end, int64_t group, const AdamState& out) {
  if constexpr (kMaster != kSplitMaster) CopyOut(copy.master, begin, end, group, out.master);
  if constexpr (kMaster == kSplitMaster) CopyOut(copy.remainder, begin, end, group, out.remainder);
  if constexpr (kMaster != kFloat32Master) CopyOut(copy.weights, begin, end, group, out.weights);
}

}  // namespace
}  // namespace lohan
